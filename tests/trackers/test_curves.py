import time

import numpy as np
import pytest
from matplotlib import image

import eqxshard
from eqxshard.trackers import Curves


def train(step, **metrics):
    return {"epoch": step / 10, **{f"train/{k}": v for k, v in metrics.items()}}


def test_the_plot_is_drawn_after_each_evaluation_and_at_the_end(tmp_path):
    path = tmp_path / "new" / "curves.png"
    tracker = Curves(path, title="LeNet, synthetic")
    assert isinstance(tracker, eqxshard.trackers.Tracker)
    plots = []

    def read():
        plots.append(path.read_bytes() if path.exists() else None)

    tracker.log(5, train(5, loss=2.0, seconds=1.0))
    read()
    tracker.log(10, {"epoch": 1.0, "eval/loss": 1.5})
    read()
    tracker.log(15, train(15, loss=1.0))
    read()
    tracker.close()
    read()
    tracker.close()
    read()
    assert plots[0] is None
    assert plots[1] == plots[2] != plots[3]
    assert plots[3] == plots[4]
    # No partial files are left.
    assert list(path.parent.iterdir()) == [path]


def test_drawing_takes_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    now, drawn = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tracker = Curves(tmp_path / "c.png")

    def write():
        drawn.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(tracker, "_write", write)
    for moment in (100.0, 119.0, 120.0, 121.0, 300.0):
        now[0] = moment
        tracker.log(len(drawn), {"eval/loss": 1.0})
    assert drawn == [100.0, 121.0, 300.0]
    tracker.close()
    assert drawn[-1] == 301.0


def size(path):
    height, width, _ = image.imread(path).shape
    return width, height


@pytest.mark.slow
def test_each_metric_has_a_panel_but_speed_has_none(tmp_path):
    sizes = {}
    for names in (["loss"], ["loss", "f1"], ["loss", "f1", "a/b"], ["a", "b", "c", "d"]):
        tracker = Curves(tmp_path / "c.png")
        values = {f"{kind}/{name}": 0.5 for name in names for kind in ("train", "eval")}
        speeds = {"train/seconds": 1.0, "train/examples_per_second": 10.0}
        times = {"seconds/device": 90.0, "goodput": 0.6}
        tracker.log(1, {"epoch": 0.1, **values, **speeds, **times})
        tracker.close()
        sizes[len(names)] = size(tmp_path / "c.png")
    assert sizes[1][0] < sizes[2][0] < sizes[3][0] == sizes[4][0]
    assert sizes[1][1] == sizes[2][1] == sizes[3][1] < sizes[4][1]


def slope(path):
    """The correlation of the coloured pixels' height with their position, -1 to 1."""
    pixels = image.imread(path)[..., :3]
    rows, columns = np.nonzero(np.ptp(pixels, axis=-1) > 0.2)
    return -np.corrcoef(rows, columns)[0, 1]


@pytest.mark.parametrize("kind, direction", [("train", 1), ("eval", -1)])
def test_the_curve_follows_the_values(tmp_path, kind, direction):
    tracker = Curves(tmp_path / "c.png")
    for step in range(1, 11):
        tracker.log(step, {"epoch": step / 10, f"{kind}/loss": float(direction * step)})
    tracker.close()
    assert direction * slope(tmp_path / "c.png") > 0.6


@pytest.mark.parametrize("name", [".", "file/curves.png", "curves.pdf"])
def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="; use "):
        Curves(tmp_path / name)
