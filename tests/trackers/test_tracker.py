import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxshard
from eqxshard.trackers import Curves, Image, JSONLines, ProgressBar, TensorBoard
from eqxshard.trackers._metrics import is_installed


def test_pixels_are_bytes_of_rows_columns_and_channels():
    grey = np.array([[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]])
    assert Image(grey).pixels[..., 0].tolist() == [[0, 128, 255], [0, 255, 0]]
    assert Image(jnp.ones((2, 3, 4), jnp.bfloat16)).pixels.tolist() == [[[255] * 4] * 3] * 2
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(Image(pixels).pixels, pixels)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), (1, 2, 2, 3), (0, 3)])
def test_other_arrays_are_no_images(shape):
    for array in (np.zeros(shape), np.zeros((2, 2), int)):
        with pytest.raises(ValueError, match="is not an image; give rows by columns, or"):
            Image(array)


def test_a_folder_of_a_packages_name_is_no_package(tmp_path, monkeypatch):
    """W&B writes one beside the script, which Python can import."""
    config = eqxshard.RunConfig(track=("wandb",))
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert importlib.util.find_spec("wandb") is not None
    with pytest.raises(
        ValueError, match=r"not installed; .*pip install 'eqxshard\[wandb\]'"
    ):
        config.check()


def test_only_the_first_process_writes(tmp_path, monkeypatch, capsys):
    """Others must not empty the file that the first writes, or hide its events."""
    (tmp_path / "m.jsonl").write_text('{"step": 9}\n')

    def follow():
        trackers = [
            JSONLines(tmp_path / "m.jsonl", keep_until=3),
            Curves(tmp_path / "new" / "curves.png"),
            ProgressBar(4, title="small"),
        ]
        if is_installed("tensorboard"):
            trackers.append(TensorBoard(tmp_path / "events", purge_after=3))
        for tracker in trackers:
            tracker.log(4, {"train/loss": 1.0, "eval/loss": 1.0})
            tracker.close()
        return {path.name for path in tmp_path.iterdir()}

    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        assert follow() == {"m.jsonl"}
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 9}\n'
    assert capsys.readouterr() == ("", "")
    assert follow() >= {"m.jsonl", "new"}
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 4
    assert "small" in capsys.readouterr().err
