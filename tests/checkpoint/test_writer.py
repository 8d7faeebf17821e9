"""Checkpoints that are written while training continues, and failures of that."""

import errno
import gc
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import copied, like, new_state, placed
from helpers import (
    make_loader,
)

import eqxshard
from eqxshard.checkpoint import _folder, _writer


@pytest.mark.parametrize(
    "where, value, named",
    [
        (lambda s: s.model.first.bias, jnp.nan, "model.first.bias"),
        (lambda s: s.model.first.bias, jnp.inf, "model.first.bias"),
        (lambda s: s.opt_state[0].mu.first.bias, jnp.nan, "opt_state.0.mu.first.bias"),
        # Such as the best loss so far.
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3, "complex64"])
@pytest.mark.parametrize("find", [_writer._is_not_finite, _writer._has_nan])
def test_numbers_are_looked_through_alike_on_the_host_and_on_devices(dtype, find):
    for value in (0, -1, jnp.nan, jnp.inf, -jnp.inf):
        x = jnp.zeros((3, 2)).at[2, 1].set(value).astype(dtype)
        on_device = jax.jit(find, static_argnums=1)(x, jnp)
        assert bool(find(np.asarray(x), np)) == bool(on_device)


def test_what_is_frozen_may_be_infinite(tmp_path):
    def make_model(key):
        return {"mask": jnp.full((4,), -jnp.inf), "weight": jnp.ones((4,))}

    frozen = {"mask": False, "weight": True}
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(new_state(make_model, trainable=frozen, **placed()))
    checkpointer.wait()
    assert checkpointer.steps() == [0]


def _cannot_save(*args):
    raise OSError("no")


def test_a_save_in_progress_is_finished_when_a_run_fails(tmp_path, train_step, monkeypatch):
    fit = eqxshard.fit  # Imported before one of its functions is replaced.
    # As where the state cannot be saved any more.
    monkeypatch.setattr("eqxshard.loop._ends.save", _cannot_save)

    class Fails:
        def log(self, step, values):
            if step == 6:
                raise RuntimeError

        def close(self, error=None):
            pass

    checkpointer = eqxshard.Checkpointer(tmp_path, save_every=5)
    with pytest.raises(RuntimeError):
        fit(
            new_state(),
            train_step,
            make_loader(),
            steps=9,
            log_every=1,
            trackers=[Fails()],
            checkpointer=checkpointer,
        )
    assert int(eqxshard.Checkpointer(tmp_path).restore(like()).step) == 5


# Orbax leaves a coroutine behind that never ran.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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
    # Here, and not in a test that does not ignore the coroutine.
    gc.collect()


def test_an_error_of_a_save_is_logged_and_raised_by_wait(tmp_path, monkeypatch, caplog):
    def fails(*args):
        raise RuntimeError("a broken\n  cable")

    checkpointer = eqxshard.Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("eqxshard.checkpoint._writer.write", fails)
        checkpointer.save(new_state())
    checkpointer.close()
    says = (
        f"the checkpoint of step 0 could not be written to {tmp_path}: a broken cable; the "
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

    checkpointer = eqxshard.Checkpointer(
        tmp_path, max_to_keep=1, save_every=1, on_error="raise"
    )
    state = eqxshard.fit(
        new_state(), train_step, make_loader(), steps=1, checkpointer=checkpointer
    )
    monkeypatch.setattr(_folder, "_remove", fails)
    eqxshard.fit(state, train_step, make_loader(), steps=3, checkpointer=checkpointer)
    (line,) = [r.message for r in caplog.records if r.name.startswith("eqxshard")]
    assert line == "old checkpoints could not be removed: Directory not empty."
    assert checkpointer.steps() == [3]
    # What is left of it does not keep a later run from saving.
    again = eqxshard.Checkpointer(tmp_path, on_error="raise")
    state = again.restore(like())
    eqxshard.fit(state, train_step, make_loader(), steps=4, checkpointer=again)
    assert again.steps() == [3, 4]


class Written:
    """What `write` returns, for a process whose part is written."""

    def result(self):
        pass


def test_a_damaged_checkpoint_that_is_replaced_is_good_in_all_processes(
    checkpoints, tmp_path, monkeypatch
):
    folder = copied(checkpoints, tmp_path)
    (folder / "10" / "description.json").write_text("{")
    first, other = eqxshard.Checkpointer(folder), eqxshard.Checkpointer(folder)
    for each in (first, other):
        assert int(each.restore(like()).step) == 8
    states = {"history": [1, 2]}
    first.save(checkpoints[1], callbacks=states)
    first.wait()
    with monkeypatch.context() as patch:
        patch.setattr("eqxshard.checkpoint._writer.is_main_process", lambda: False)
        patch.setattr("eqxshard.checkpoint._writer.write", lambda *args: Written())
        other.save(checkpoints[1], callbacks=states)
        other.wait()
    for each in (first, other):
        assert each.claim_run(10, None) == states
