"""A recipe written from the guide alone: `eqxshard.train` gives it what our own have."""

import contextlib
import io
import json
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from process_helpers import read_until, started
from run_helpers import PNG, assert_refused, call, environment, files, read_lines

import eqxshard

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("vit.py")
#: Five epochs of 20 steps, by default.
SMALL = ["--width", 16, "--log-every", 10, "--save-every", 25]
LAST_LINE = re.compile(
    r"test accuracy (0\.\d{4}|1\.0000) \| \d+\.\d s/epoch \| \d{1,3}(,\d{3})* examples/s"
    r" \| vit on 1 x cpu \(data=1\)"
)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs the recipe in this process; returns its status, stdout and stderr."""
    return partial(call, capsys, monkeypatch, SCRIPT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run on one device that was never stopped, and what it printed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    out, err = io.StringIO(), io.StringIO()
    printed = SimpleNamespace(readouterr=lambda: (out.getvalue(), err.getvalue()))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        options = [*SMALL, "--devices", 1, "--output", folder]
        status, *_ = call(printed, patch, SCRIPT, *options)
    assert status == 0, err.getvalue()
    return folder, out.getvalue()


def saved_steps(folder):
    return eqxshard.Checkpointer(folder / "checkpoints").steps()


def measured(folder):
    """The losses and accuracies of a run, by step."""
    return {
        line["step"]: {k: v for k, v in line.items() if re.search("loss|accuracy", k)}
        for line in read_lines(folder)
    }


def test_the_recipe_has_60_lines():
    text = SCRIPT.read_text()
    lines = text.splitlines()
    assert len(lines) <= 60
    # And no more than that by longer lines.
    assert max(map(len, lines)) <= 92 and "# fmt" not in text


def test_a_run_learns_and_writes_its_files(whole):
    folder, out = whole
    *_, last = out.splitlines()
    assert LAST_LINE.fullmatch(last), last
    lines = read_lines(folder)
    # It is also logged where it saves.
    steps = sorted({*range(10, 101, 10), 25, 75})
    assert [line["step"] for line in lines] == steps
    assert lines[-1]["train/loss"] < 0.8 * lines[0]["train/loss"]
    accuracy = lines[-1]["eval/accuracy"]
    assert accuracy > 0.9 and f"test accuracy {accuracy:.4f} " in last
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["test_accuracy"] == accuracy
    assert len(summary["test_accuracy_by_epoch"]) == 5
    assert summary["devices"] == "1 x cpu (data=1)"
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    assert saved_steps(folder) == [50, 75, 100]


def test_a_second_run_into_the_same_folder_is_refused(main, whole):
    folder, _ = whole
    before = files(folder)
    result = main(*SMALL, "--devices", 1, "--output", folder)
    assert_refused(result, f"{folder} has a run at step 100; add --resume to continue it")
    assert files(folder) == before


def test_a_resumed_run_equals_one_that_was_not_stopped(main, whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    # As if it had been killed before the checkpoint of step 75, in the middle of an epoch.
    for step in (75, 100):
        shutil.rmtree(folder / "checkpoints" / str(step))
    (folder / "summary.json").unlink()
    (folder / "curves.png").unlink()
    options = [*SMALL, "--devices", 1, "--output", folder]
    status, out, err = main(*options, "--resume", "yes")
    assert status == 0, err
    assert "resuming from step 50." in out.splitlines()
    assert list(measured(folder)) == [line["step"] for line in read_lines(folder)]
    assert measured(folder) == measured(whole[0])
    assert saved_steps(folder) == [50, 75, 100]
    assert (folder / "summary.json").exists() and (folder / "curves.png").exists()


@pytest.mark.thorough
def test_a_split_run_has_the_same_numbers(main, whole, tmp_path, monkeypatch):
    runs = []
    train = eqxshard.train
    monkeypatch.setattr(
        eqxshard, "train", lambda *a, **k: runs.append(train(*a, **k)) or runs[-1]
    )
    mesh = ["--mesh", "data=2,fsdp=4", "--rule", "fsdp"]
    status, out, err = main(*SMALL, *mesh, "--steps", 20, "--output", tmp_path / "run")
    assert status == 0, err
    assert out.splitlines()[-1].endswith("| vit on 8 x cpu (data=2, fsdp=4)")
    weight = runs[0].state.model["mlp"][0].layers[0].weight
    assert weight.sharding.spec == jax.P("fsdp")
    ours, expected = measured(tmp_path / "run"), measured(whole[0])
    assert list(ours) == [10, 20] and ours[20].keys() == {"train/loss", "eval/accuracy"}
    for step, values in ours.items():
        assert values == pytest.approx(expected[step], rel=1e-4)


MISTAKES = {
    "--devices 8 --mesh data=3": "mesh data=3 does not use exactly the 8 devices",
    "--devices 8 --batch-size 60": "batch size 60 does not divide over data=8",
    "--devices 1 --resume yes": "run to resume; leave --resume out",
    "--widht 8": "Unrecognized options: --widht, 8. Did you mean --width?",
    "--rule fsdb": "invalid choice 'fsdb' for argument '--rule'. Expected one of",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(main, tmp_path, options):
    result = main("--output", tmp_path / "run", *options.split())
    assert_refused(result, MISTAKES[options])
    assert not (tmp_path / "run").exists()


def test_another_width_does_not_resume(main, whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    before = files(folder)
    options = ["--width", 32, "--epochs", 6, "--devices", 1, "--output", folder]
    result = main(*options, "--resume", "yes")
    wrong = "model.attention.0.query_proj.weight has shape [16, 16] there, not [32, 32]"
    assert_refused(result, wrong)
    # Of 60 arrays, it names a few.
    assert "more; use the model" in result[2] and len(result[2]) < 600
    assert files(folder) == before


@pytest.mark.thorough
def test_ctrl_c_saves_and_the_run_resumes(main, tmp_path):
    options = ["--width", 16, "--log-every", 2, "--devices", 2, "--output", tmp_path]
    command = [sys.executable, SCRIPT, *options, "--epochs", 100_000]
    with started(command, env=environment()) as process:
        read_until(process, process.stderr, "step 20/")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "--resume continues" in err.splitlines()[-1] and "Traceback" not in err
    at = saved_steps(tmp_path)[-1]
    assert at >= 20 and not (tmp_path / "summary.json").exists()
    status, out, err = main(*options, "--steps", at + 4, "--resume", "yes")
    assert status == 0, err
    assert f"resuming from step {at}." in out.splitlines()
    steps = [line["step"] for line in read_lines(tmp_path)]
    assert steps == sorted(set(steps)) and {2, 20, at} <= set(steps)
    assert steps[-1] == saved_steps(tmp_path)[-1] == at + 4
    assert (tmp_path / "summary.json").exists()
