import subprocess
import sys

import numpy as np
import pytest

import eqxshard
from eqxshard.trackers import TensorBoard


@pytest.fixture
def read(tmp_path):
    """Returns the values in the event files: (step, value) by name."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read_events():
        # The default keeps a sample of the steps.
        events = module.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        events.Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }

    return read_events


def test_values_are_in_the_file_when_log_returns(tmp_path, read):
    tracker = TensorBoard(tmp_path)
    assert isinstance(tracker, eqxshard.Tracker)
    tracker.log(1, {"epoch": 0.5, "train/loss": 2.0})
    assert read() == {"epoch": [(1, 0.5)], "train/loss": [(1, 2.0)]}
    tracker.log(2, {"train/loss": np.float64(1.5), "eval/accuracy": 0.25})
    assert read() == {
        "epoch": [(1, 0.5)],
        "train/loss": [(1, 2.0), (2, 1.5)],
        "eval/accuracy": [(2, 0.25)],
    }
    tracker.close()


def test_values_that_are_not_finite_are_kept(tmp_path, read):
    tracker = TensorBoard(tmp_path)
    tracker.log(1, {"train/loss": float("inf")})
    tracker.log(2, {"train/loss": float("nan")})
    tracker.close()
    (_, first), (_, second) = read()["train/loss"]
    assert first == np.inf and np.isnan(second)


@pytest.mark.parametrize("purge_after, steps", [(2, [1, 2, 9]), (0, [1, 2, 3, 9])])
def test_a_resumed_run_hides_the_steps_that_it_takes_again(
    tmp_path, read, purge_after, steps
):
    tracker = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    # TensorBoard reads files by name, and those of the same second in no useful order.
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / "events.out.tfevents.0000000001.first")
    tracker = TensorBoard(tmp_path, purge_after=purge_after)
    tracker.log(9, {"train/loss": 1.0})
    tracker.close()
    assert [step for step, _ in read()["train/loss"]] == steps


def test_without_tensorboard_the_error_names_the_package(tmp_path):
    code = """if True:
        import sys
        from eqxshard.trackers import TensorBoard
        assert not any(name.startswith("tensorboard") for name in sys.modules)
        sys.modules["tensorboard"] = None  # as if it were not installed
        TensorBoard("events")
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: the TensorBoard tracker needs TensorBoard; install it with `pip "
        "install tensorboard`."
    )
    assert list(tmp_path.iterdir()) == []
