"""Checkpoints that are written while training continues, and failures to write."""

import errno
import os
import threading

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import like, new_state
from helpers import assert_equal, make_loader

import eqxshard
from eqxshard.checkpoint import _folder, _writer


@pytest.mark.parametrize(
    "where, value, named",
    [
        (lambda s: s.model.first.bias, jnp.nan, "model.first.bias"),
        (lambda s: s.model.first.bias, jnp.inf, "model.first.bias"),
        (lambda s: s.opt_state[0].mu.first.bias, jnp.nan, "opt_state.0.mu.first.bias"),
        # An infinity may be intended, such as the best loss so far.
        (lambda s: s.opt_state[0].mu.first.bias, jnp.inf, None),
    ],
)
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, caplog, where, value, named):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(eqx.tree_at(where, new_state(), jnp.full((32,), value)))
    checkpointer.wait()
    assert checkpointer.steps() == ([] if named else [0])
    says = f"the state of step 0 is not finite ({named}) and was not saved; the newest"
    assert (says in caplog.text) == (named is not None)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, "complex64"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_numbers_are_looked_through_alike_on_the_host_and_on_devices(dtype, is_trained):
    for value in (0, -1, jnp.nan, jnp.inf, -jnp.inf):
        x = jnp.zeros((3, 2)).at[2, 1].set(value).astype(dtype)
        on_device = _writer._find_on_devices(x, is_trained, jnp)
        assert bool(_writer._find_flaw(np.asarray(x), is_trained, np)) == bool(on_device)


@pytest.mark.slow
def test_a_run_continues_if_the_disk_is_full(small_disk, train_step, caplog):
    folder, filler = small_disk / "run", small_disk / "filler"
    steps = []

    class Fills:
        def log(self, step, values):
            steps.append(step)
            if step == 3:
                free = os.statvfs(small_disk)
                filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 8192))

        def close(self, error=None):
            pass

    message = r"step 6 could not be written to .*; the newest checkpoint: step [123]\."
    with pytest.raises(OSError, match=message):
        eqxshard.fit(
            new_state(),
            train_step,
            make_loader(),
            steps=6,
            log_every=1,
            checkpointer=eqxshard.Checkpointer(folder, save_every=1),
            trackers=[Fills()],
        )
    assert steps == [1, 2, 3, 4, 5, 6]
    assert "could not be written" in caplog.text and "Training continues." in caplog.text
    kept = eqxshard.Checkpointer(folder).steps()
    assert kept and kept[-1] <= 3
    filler.unlink()
    assert int(eqxshard.Checkpointer(folder).restore(like()).step) == kept[-1]


@pytest.mark.parametrize(
    "why, shown",
    [
        ("a broken\n  cable", "a broken cable"),
        (
            "RESOURCE_EXHAUSTED: x: No space left on device [os_error_code='28']",
            "No space left on device; free some, or give the run another folder",
        ),
    ],
)
def test_an_error_of_a_save_is_logged_and_raised_by_wait(
    tmp_path, monkeypatch, caplog, why, shown
):
    def fails(*args):
        raise RuntimeError(why)

    checkpointer = eqxshard.Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("eqxshard.checkpoint._writer.Save", fails)
        checkpointer.save(new_state())
    checkpointer.close()
    says = (
        f"the checkpoint of step 0 could not be written to {tmp_path}: {shown}; the "
        "newest checkpoint: none."
    )
    assert f"{says} Training continues." in caplog.text
    with pytest.raises(OSError) as error:
        checkpointer.wait()
    assert str(error.value) == says
    # The next one may succeed.
    checkpointer.save(new_state())
    checkpointer.wait()
    assert checkpointer.steps() == [0]


def test_an_old_checkpoint_that_cannot_be_removed_is_only_logged(
    tmp_path, train_step, monkeypatch, caplog
):
    remove = _folder._remove

    def fails(path):
        if path.name == "1":
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        remove(path)

    checkpointer = eqxshard.Checkpointer(tmp_path, max_to_keep=1, save_every=1)
    state = eqxshard.fit(
        new_state(), train_step, make_loader(), steps=1, checkpointer=checkpointer
    )
    monkeypatch.setattr(_folder, "_remove", fails)
    eqxshard.fit(state, train_step, make_loader(), steps=3, checkpointer=checkpointer)
    lines = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert {*lines} == {"old checkpoints could not be removed: Directory not empty."}
    assert checkpointer.steps() == [3]
    # The rest of old checkpoints does not keep a later run from saving.
    again = eqxshard.Checkpointer(tmp_path)
    state = again.restore(like())
    eqxshard.fit(state, train_step, make_loader(), steps=4, checkpointer=again)
    assert again.steps() == [3, 4]


def test_a_checkpoint_that_another_checkpointer_is_writing_stays(tmp_path, monkeypatch):
    """Two of one program, in one folder: neither removes what the other has begun."""
    going_on, complete = threading.Event(), _folder.write_checksums

    def completed(path):
        assert path.name != "0" or going_on.wait(60)
        complete(path)

    monkeypatch.setattr(_folder, "write_checksums", completed)
    state = new_state()
    first, second, third = (eqxshard.Checkpointer(tmp_path) for _ in range(3))
    first.save(state)
    second.save(eqx.tree_at(lambda s: s.step, state, state.step + 1))
    second.wait()
    third.save(state)
    with pytest.raises(OSError, match=r"0 is being written already; wait for that save"):
        third.wait()
    going_on.set()
    first.wait()
    assert first.steps() == [0, 1]
    assert_equal(first.restore(like(), step=0), state)
