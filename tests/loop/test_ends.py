"""Errors that end a run: the state is saved, or handed back."""

import itertools
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grades import graded
from helpers import assert_equal, make_mesh
from loop_helpers import (
    ROWS,
    Recorder,
    fresh,
    loss_fn,
    make,
    make_loader,
    nan_loss,
    run,
)
from process_helpers import finished

import eqxshard
from eqxshard.callbacks import Callback, Every
from eqxshard.loop import _clock
from eqxshard.training._step import InFlight


class Boom(Exception):
    """Somebody's bug."""


def boom(*args):
    raise Boom


class Fails:
    """A tracker that fails."""

    def log(self, step, values):
        boom()

    def close(self, error=None):
        pass


class FailsAfterReport(Callback):
    def after_report(self, loop):
        boom()


def batches_that_end(loader):
    """A loader whose fourth batch cannot be read."""

    class Ends:
        def seek(self, step):
            loader.seek(step)

        def __iter__(self):
            batches = iter(loader)
            for _ in range(3):
                yield next(batches)
            boom()

    return Ends()


def fit(steps=6, loader=None, **options):
    state, train_step = fresh()
    options = {"log_every": 3, **options}
    return eqxshard.fit(state, train_step, loader or make_loader(), steps=steps, **options)


CASES = {
    "after_step": {"callbacks": [Every(3, boom)]},
    "after_report": {"callbacks": [FailsAfterReport()]},
    "evaluate": {"evaluate": boom, "evaluate_every": 3},
    "loader": {"loader": batches_that_end(make_loader())},
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_saves_the_state(tmp_path, case, caplog):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    with pytest.raises(Boom) as caught:
        fit(checkpointer=checkpointer, **CASES[case])
    assert checkpointer.steps() == [3]
    assert "the checkpoint of step 3 is saved." in caplog.text
    assert not hasattr(caught.value, "state")
    # The run goes on from there as if nothing had happened.
    state, train_step = fresh()
    state = checkpointer.restore(state)
    state = eqxshard.fit(
        state, train_step, make_loader(), steps=6, checkpointer=checkpointer
    )
    assert_equal(state, fit())


@pytest.mark.parametrize("case", CASES)
def test_without_a_checkpointer_the_error_has_the_state(case):
    with pytest.raises(Boom) as caught:
        fit(**CASES[case])
    assert_equal(caught.value.state, fit(3))  # pyright: ignore
    notes = caught.value.__notes__
    assert notes == ["The state after step 3 is the error's `state`."]


def test_an_error_of_a_tracker_saves_the_state_and_reaches_no_other(tmp_path):
    checkpointer, recorder = eqxshard.Checkpointer(tmp_path), Recorder()
    with pytest.raises(Boom):
        fit(checkpointer=checkpointer, trackers=[Fails(), recorder])
    # The report of step 3 is sent while step 4 runs.
    assert recorder.steps("train/loss")[0] == 3 and checkpointer.steps() == [4]
    assert_equal(checkpointer.restore(fresh()[0]), fit(4))


@pytest.mark.parametrize("role", ["trackers", "callbacks"])
def test_an_error_while_closing_has_the_state(role):
    class Closes(Callback):
        def log(self, step, values):
            pass

        def close(self, error=None):
            boom()

    options: dict = {role: [Closes()]}
    with pytest.raises(Boom) as caught:
        fit(**options)
    assert_equal(caught.value.state, fit())  # pyright: ignore


def test_an_evaluation_that_was_not_finished_is_not_the_best(tmp_path):
    checkpointer = eqxshard.Checkpointer(tmp_path, best="eval/score", mode="max")
    scores = iter([0.5])
    with pytest.raises(StopIteration):
        fit(
            checkpointer=checkpointer,
            evaluate=lambda model: {"score": next(scores)},
            evaluate_every=2,
        )
    assert checkpointer.steps() == [2, 4]
    assert checkpointer.best_step() == 2
    assert "eval/score" not in checkpointer.description(4)["metrics"]


def fails_fifth(error):
    """A step that fails once it has taken the state, as steps on devices do."""
    _, train_step = fresh()

    def step(state, batch):
        if int(state.step) == 4:
            jax.tree.map(lambda leaf: leaf.delete(), (state.model, state.opt_state))
            raise error
        return train_step(state, batch)

    return step


def run_into(error, checkpointer):
    state, _ = fresh()
    step, loader = fails_fifth(error), make_loader()
    with pytest.raises(type(error)) as caught:
        eqxshard.fit(state, step, loader, steps=6, checkpointer=checkpointer)
    # A state that cannot be read is not handed back.
    assert not hasattr(caught.value, "state")
    return caught.value.__notes__


def test_out_of_memory_says_what_to_try_and_where_the_last_checkpoint_is(tmp_path):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 B")
    checkpointer = eqxshard.Checkpointer(tmp_path, save_every=3)
    advice, saved = run_into(error, checkpointer)
    assert advice.startswith("The devices were out of memory in step 5; use a smaller ba")
    where = f"; resume from the newest checkpoint, of step 3: {tmp_path / '3'}"
    assert saved.endswith(where)
    assert_equal(checkpointer.restore(fresh()[0]), fit(3))


def test_out_of_memory_in_a_step_that_still_runs_names_the_steps(monkeypatch):
    # Not the step of other tests, which may have larger programs.
    state, train_step = make()
    rooms = itertools.count(1)

    class Fails(InFlight):
        def make_room(self):
            super().make_room()
            if next(rooms) == 4:
                raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 9 B")

    monkeypatch.setattr("eqxshard.loop._fit.InFlight", Fails)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        eqxshard.fit(state, train_step, make_loader(), steps=12)
    said = caught.value.__notes__[0]
    assert said.startswith(
        "The devices were out of memory in the steps before step 4, or in one of the steps "
        "from 2 on; train_step of loss_fn needs "
    )


def test_a_host_without_memory_says_which_batch_and_saves_the_state(tmp_path, caplog):
    class Batches:
        def __iter__(self):
            for wide in (1, 1, 1, 10**13):
                yield {"x": np.ones((8, 4, wide), np.float32)[..., 0]}

    state, train_step = fresh()
    loader = eqxshard.Loader(Batches(), mesh=state.step.sharding.mesh)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    with pytest.raises(MemoryError, match="Unable to allocate") as caught:
        eqxshard.fit(state, train_step, loader, steps=6, checkpointer=checkpointer)
    assert caught.value.__notes__[-1].startswith("The host was out of memory in the batch ")
    assert "; use a smaller prefetch=" in caught.value.__notes__[-1]
    assert checkpointer.steps() == [3]
    assert "the checkpoint of step 3 is saved" in caplog.text


def test_a_host_without_memory_for_a_save_says_what_it_takes(tmp_path, monkeypatch):
    def full(*args, **options):
        raise MemoryError

    monkeypatch.setattr("eqxshard.checkpoint._checkpointer.Checkpointer.save", full)
    with pytest.raises(MemoryError) as caught:
        fit(3, checkpointer=eqxshard.Checkpointer(tmp_path))
    said, handed = caught.value.__notes__
    # Of 121 parameters, without the key.
    assert "memory in the checkpoint of step 3; a save holds a copy of this pro" in said
    assert "part of the state, 488 B; save" in said and "error's `state`" in handed


@pytest.mark.parametrize("error", [FloatingPointError("nan"), KeyboardInterrupt()])
def test_a_state_that_a_step_took_is_not_promised(tmp_path, error):
    *_, note = run_into(error, None)
    assert note.endswith("; give fit a checkpointer, to have one to resume from.")
    *_, note = run_into(error, eqxshard.Checkpointer(tmp_path))
    assert note.endswith("; nothing was saved before, so the run has to start again.")


def test_an_error_before_the_first_step_saves_nothing(tmp_path):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    with pytest.raises(Boom):
        state, _ = fresh()
        eqxshard.fit(state, boom, make_loader(), steps=6, checkpointer=checkpointer)
    assert checkpointer.steps() == []


def test_a_full_disk_does_not_hide_the_error(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eqxshard.checkpoint._writer.Save", full)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    with pytest.raises(Boom) as caught:
        fit(checkpointer=checkpointer, callbacks=[Every(3, boom)])
    assert "the state of step 3 could not be saved: the checkpoint of" in caplog.text
    assert_equal(caught.value.state, fit(3))  # pyright: ignore
    # The state is not lost either if saving the last checkpoint is the error.
    with pytest.raises(OSError, match="No space left on device") as full_disk:
        fit(3, checkpointer=checkpointer)
    assert_equal(full_disk.value.state, fit(3))  # pyright: ignore


# Steps that are not finite


class Reread:
    """A loader that notices when it is read again."""

    def __init__(self, loader):
        self.loader, self.is_read = loader, False

    def read_again(self):
        raise NotImplementedError

    def seek(self, step):
        self.loader.seek(step)

    def __iter__(self):
        if self.is_read:
            self.read_again()
        self.is_read = True
        return iter(self.loader)


@pytest.mark.parametrize("log_every", graded([1, 2, 50], [2], [1, 50]))
def test_too_many_in_a_row_end_the_run_with_an_error_that_names_the_examples(
    tmp_path, log_every
):
    loader = make_loader(bad=[18, 25, 26, 33, 41])
    with pytest.raises(eqxshard.UsageError) as error:
        run(tmp_path, loader, epochs=3, log_every=log_every, max_nonfinite=3)
    assert isinstance(error.value, FloatingPointError)
    assert str(error.value).endswith(
        "steps in a row, from step 3 on, was not finite; in step 3, batch entry x "
        "contains NaN; the loss is not finite in rows [2] of the batch (examples [18] of "
        "the source)."
    )
    # Skipped steps did not change what was saved.
    assert eqxshard.Checkpointer(tmp_path).steps()[-1] >= 2


@pytest.mark.parametrize("placement", graded(["host", "device"], ["host"], ["device"]))
def test_the_error_names_the_line_without_a_checkpointer_too(placement):
    x = np.zeros((ROWS, 4), np.float32)
    x[8:, 0] = -3
    source = eqxshard.data.ArraySource({"x": x})
    where = {"batch_size": 8, "mesh": make_mesh(), "shuffle": False}
    loader = eqxshard.Loader(source, placement=placement, **where)
    with pytest.raises(FloatingPointError) as error:
        run(None, loader, loss_fn=logarithm, steps=4, log_every=1, max_nonfinite=2)
    code = logarithm.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + 2} (logarithm)"
    assert str(error.value) == (
        "the loss, a gradient or an update of 2 steps in a row, from step 2 on, was not "
        f"finite; in step 2, the first NaN appears in log, {line}; the loss is not finite "
        "in rows [0, 1, 2, 3, 4, 5, 6, 7] of the batch (examples [8, 9, 10, 11, 12, 13, "
        "14, 15] of the source)."
    )
    # The search has read a batch again.
    assert loader.state()["step"] == int(error.value.state.step)  # pyright: ignore


@pytest.mark.slow
def test_hang_seconds_does_not_end_the_search(monkeypatch):
    ended, looks, readings = threading.Event(), threading.Semaphore(0), itertools.count()
    passed = [0.0]

    def perf_counter():
        now = passed[0] + next(readings) * 1e-6
        if threading.current_thread().name == "watchdog":
            looks.release()
        return now

    monkeypatch.setattr(_clock, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(_clock, "abort_process", lambda status: ended.set())

    class Slow(Reread):
        def read_again(self):
            while looks.acquire(blocking=False):
                pass
            # The next look begins in the search.
            assert looks.acquire(timeout=60)
            passed[0] += 1000
            # The first look may have begun before this; the second began later, and ended.
            for _ in range(3):
                assert looks.acquire(timeout=60)

    options = {"log_every": 1, "max_nonfinite": 1, "hang_seconds": 1.0}
    with pytest.raises(FloatingPointError, match="in step 1, the first NaN appears in "):
        run(None, Slow(make_loader()), loss_fn=nan_loss, steps=2, **options)
    assert passed == [1000] and not ended.is_set()


def test_steps_that_are_finite_again_at_the_report_do_not_end_the_run():
    """The state has changed since, so it would not show why the others failed."""
    loader = make_loader(bad=[1, 9, 17])
    state = run(None, loader, epochs=2, log_every=50, max_nonfinite=3)
    assert int(state.step) == 12


def test_what_cannot_be_found_does_not_hide_why_the_run_ended():
    """Such as for want of memory."""

    class Once(Reread):
        def read_again(self):
            raise KeyError("gone")

    options = {"log_every": 1, "max_nonfinite": 1}
    loader = make_loader()
    with pytest.raises(FloatingPointError, match="not be found: KeyError: 'gone'") as error:
        run(None, Once(loader), loss_fn=nan_loss, steps=2, **options)
    assert isinstance(error.value.__cause__, KeyError)
    assert loader.state()["step"] == int(error.value.state.step)  # pyright: ignore


NOT_FINITE = "its loss, a gradient or its update was not finite. "


def squares(model, batch, key):
    """Losses for a step of its own, which also takes many steps in one dispatch."""
    return loss_fn(model, batch, key)


@pytest.mark.parametrize("placement", graded(["host", "device"], ["device"], ["host"]))
def test_the_steps_that_a_run_skipped_are_counted_and_the_first_is_explained(
    tmp_path, caplog, placement
):
    loader = make_loader(bad=[18, 25], placement=placement)
    run(tmp_path, loader, loss_fn=squares, epochs=1)
    bad_row = (
        f"the first of them step 3: {NOT_FINITE}Its batch entry x is not finite in rows "
        "[2] of the batch (examples [18] of the source)."
    )
    assert caplog.messages == [f"2 of 6 steps were skipped, {bad_row}"]
    assert loader.state()["step"] == 6
    # Skipped steps of earlier starts count, too, unless this start takes no step.
    state = eqxshard.Checkpointer(tmp_path).restore(fresh(loss_fn=squares)[0])
    for epochs in (2, 2):
        checkpointer, step = eqxshard.Checkpointer(tmp_path), fresh(loss_fn=squares)[1]
        state = eqxshard.fit(state, step, loader, epochs=epochs, checkpointer=checkpointer)
    assert caplog.messages[1:] == [f"4 of 12 steps were skipped, {bad_row}"]
    # A part of a run whose earlier steps are not known.
    state, step = fresh(loss_fn=squares)
    state = eqxshard.fit(state, step, make_loader(), steps=8)
    eqxshard.fit(state, step, loader, steps=9)
    assert len(caplog.messages) == 3
    assert caplog.messages[2].startswith("1 of 1 steps since step 8 was skipped, step 9: ")


def logarithm(model, batch, key):
    """Losses that are NaN for a finite example."""
    return loss_fn(model, batch, key) + jnp.log(batch["x"][:, 0] + 2)


def test_a_skipped_step_whose_batch_is_finite_names_its_examples(caplog):
    x = np.zeros((ROWS, 4), np.float32)
    x[9, 0] = -3
    where = {"batch_size": 8, "mesh": make_mesh(), "shuffle": False}
    loader = eqxshard.Loader(eqxshard.data.ArraySource({"x": x}), **where)
    run(None, loader, loss_fn=logarithm, steps=4)
    assert caplog.messages == [
        f"1 of 4 steps was skipped, step 2: {NOT_FINITE}Its batch is finite: examples "
        "8, 9, 10, 11, and 4 more of the source, loader.rows(1). Find the line with "
        "eqxshard.first_nonfinite(train_step, state, batch) of this batch and a state from "
        "before that step, such as that of a checkpoint."
    ]


def test_a_skipped_step_of_other_loaders_does_not_end_a_run_in_error(caplog):
    run(None, batches_that_end(make_loader(bad=[1])), steps=3)
    assert caplog.messages[0].endswith(f"{NOT_FINITE}Look at the batch of step 1.")


# Several processes

PROCESSES = """
import sys
import jax, numpy as np, optax, equinox as eqx
import eqxshard
from eqxshard.callbacks import Every
eqxshard.initialize()
mesh = eqxshard.make_mesh()
where = {"mesh": mesh, "rule": eqxshard.replicate()}
source = eqxshard.data.ArraySource({"x": np.ones((64, 4), np.float32)})
loader = eqxshard.Loader(source, batch_size=8, mesh=mesh)
optim = optax.adam(1e-3)
make_model = lambda key: eqx.nn.MLP(4, 1, 8, 1, key=key)
state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
step = eqxshard.make_train_step(
    lambda model, batch, key: (jax.vmap(model)(batch["x"])[:, 0] - 1) ** 2, optim, **where
)
checkpointer = eqxshard.Checkpointer(sys.argv[1])
def look(loop):
    if jax.process_index() == 1 and loop.step == 4:
        loop.save()
    if jax.process_index() == 1 and loop.step == 6:
        loop.stop("process 1 has had enough")
state = eqxshard.fit(state, step, loader, steps=100, checkpointer=checkpointer,
                     callbacks=[Every(2, look)])
print(f"ended at step {int(state.step)}")
"""


@pytest.mark.slow
def test_what_one_process_asks_for_all_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    launch = [sys.executable, "-m", "eqxshard.launch", "--processes=2"]
    command = [*launch, "--devices-per-process=1", script, tmp_path / "run"]
    status, out, err = finished(command)
    assert status == 0, out + err
    usual = ("[0] compiling the train step", "[0] goodput")
    lines = [line for line in out.splitlines() if not line.startswith(usual)]
    assert sorted(lines) == [
        "[0] ended at step 6",
        "[0] stopped after step 6: process 1 has had enough; the checkpoint of step 6 is "
        "saved.",
        "[1] ended at step 6",
    ]
    assert eqxshard.Checkpointer(tmp_path / "run").steps() == [4, 6]


NONFINITE = """
import jax, jax.numpy as jnp, numpy as np, optax, equinox as eqx
import eqxshard
eqxshard.initialize()
where = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
x = np.ones((64, 4), np.float32)
x[5] = -1
source = eqxshard.data.ArraySource({"x": x})
loader = eqxshard.Loader(source, batch_size=64, mesh=where["mesh"])
optim = optax.adam(1e-3)
make_model = lambda key: eqx.nn.MLP(4, 1, 8, 1, key=key)
state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
def loss_fn(model, batch, key):
    return jax.vmap(model)(batch["x"])[:, 0] + jnp.log(batch["x"][:, 0])
step = eqxshard.make_train_step(loss_fn, optim)
try:
    eqxshard.fit(state, step, loader, steps=4, log_every=1, max_nonfinite=2)
except FloatingPointError as error:
    print(error)
"""


@pytest.mark.slow
def test_all_processes_find_the_same_line_and_example(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NONFINITE)
    launch = [sys.executable, "-m", "eqxshard.launch", "--processes=2"]
    status, out, err = finished([*launch, "--devices-per-process=1", script])
    assert status == 0, out + err
    line = 1 + next(i for i, x in enumerate(NONFINITE.splitlines()) if "jnp.log(" in x)
    found = f"the first NaN appears in log, {script}:{line} (loss_fn); the loss is not "
    said = [x for x in out.splitlines() if found in x]
    assert sorted(x[:3] for x in said) == ["[0]", "[1]"]
    assert all(x.endswith("of the batch (examples [5] of the source).") for x in said)
