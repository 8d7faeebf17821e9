"""Runs that end because their steps are not finite any more."""

import numpy as np
import pytest
from loop_helpers import ROWS, Layers, loss_fn, make_loader, nan_loss, run

import eqxshard
from eqxshard.debug._crash_dump import read_crash_dump
from eqxshard.debug._replay import replay
from eqxshard.debug._script import script_path


@pytest.mark.parametrize("log_every", [1, 2, 50])
def test_too_many_in_a_row_end_the_run_with_a_crash_dump(tmp_path, log_every):
    loader = make_loader(bad=[18, 25, 26, 33, 41])
    with pytest.raises(FloatingPointError) as error:
        run(tmp_path, loader, epochs=3, log_every=log_every, max_nonfinite=3)
    folder = tmp_path / "crash_dump"
    assert "steps in a row, from step 3 on, was not finite; find the" in str(error.value)
    command = f"with `python -m eqxshard.replay {folder} {script_path() or 'SCRIPT'}`."
    assert str(error.value).endswith(command)
    dump = read_crash_dump(eqxshard.Checkpointer(folder).directory, Layers)
    assert dump.steps[:3] == [3, 4, 5]
    assert dump.rows == list(range(16, 24))
    assert replay(dump, loss_fn) == (
        "batch entry x is not finite in rows [2] of the batch (examples [18] of the "
        "source)."
    )
    # Skipped steps did not change what was saved.
    assert eqxshard.Checkpointer(tmp_path).steps()[-1] >= 2


def test_steps_that_are_finite_again_at_the_report_do_not_end_the_run():
    """The state has changed since, so it would not show why the others failed."""
    loader = make_loader(bad=[1, 9, 17])
    state = run(None, loader, epochs=2, log_every=50, max_nonfinite=3)
    assert int(state.step) == 12


def test_a_run_without_a_checkpointer_ends_too():
    loader = make_loader(bad=list(range(ROWS)))
    with pytest.raises(FloatingPointError) as error:
        run(None, loader, epochs=1, log_every=1, max_nonfinite=2)
    assert str(error.value).startswith(
        "the loss, a gradient or an update of 2 steps in a row, from step 1 on, was not "
        "finite; use a lower learning rate, or give fit a checkpointer to get a crash dump"
    )


def test_a_full_disk_does_not_hide_why_the_run_ended(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eqxshard.debug._crash_dump.write", full)
    with pytest.raises(FloatingPointError, match=r"could not be written: .*No space left"):
        run(tmp_path, make_loader(), loss_fn=nan_loss, steps=2, max_nonfinite=1)


def test_the_state_is_as_before_the_steps_that_failed(tmp_path):
    loader = make_loader(bad=[18, 25, 33, 41])
    with pytest.raises(FloatingPointError):
        run(tmp_path, loader, epochs=1, log_every=1, max_nonfinite=3)
    whole = run(None, make_loader(), loss_fn=loss_fn, steps=2)
    folder = eqxshard.Checkpointer(tmp_path / "crash_dump").directory
    dump = read_crash_dump(folder, Layers)
    for ours, theirs in zip(dump.model.layers, whole.model.layers, strict=True):
        np.testing.assert_array_equal(ours.weight, theirs.weight)
