"""Checkpoints keep a loader's position, in loops of one's own and in `fit`."""

from contextlib import closing
from itertools import count, islice
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import new_state, train_step
from grades import graded
from helpers import assert_close, make_loader, make_mesh, stack

import eqxshard
from eqxshard.callbacks import Callback

_ = train_step  # A fixture.
Index = list[list[int]]


def batch_of(number):
    (batch,) = islice(_at(number), 1)
    return {name: np.asarray(entry) for name, entry in batch.items()}


def _at(number):
    loader = make_loader(prefetch=0)
    loader.seek(number)
    return loader


class Again:
    """Batches without a length or a state."""

    def __iter__(self):
        return map(batch_of, count())


def dataset():
    """The batches of a loader of four batches an epoch, by Grain."""
    return eqxshard.Loader(grain.MapDataset.range(100).map(batch_of), mesh=make_mesh())


def filtered():
    numbers = grain.MapDataset.range(200).to_iter_dataset().filter(lambda i: i % 2 == 0)
    return eqxshard.Loader(numbers.map(lambda i: batch_of(i // 2)), mesh=make_mesh())


def iterable():
    return eqxshard.Loader(Again(), mesh=make_mesh())


LOADERS: dict[str, Any] = {
    "host": make_loader,
    "on demand": lambda: make_loader(prefetch=0),
    "device": lambda: make_loader(placement="device"),
    "dataset": dataset,
    "filtered": filtered,
    "iterable": iterable,
}
KINDS = graded(LOADERS, ["host", "device", "filtered"], LOADERS)


def indices(batches) -> Index:
    return [np.asarray(batch["index"]).tolist() for batch in batches]


def resumed(checkpointer, step, loader):
    """The loader at the position in a checkpoint."""
    checkpointer.wait()
    loader.restore(checkpointer.description(step)["loader"])
    return loader


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_loop_goes_on_with_the_batch_that_was_next(train_step, tmp_path, kind):
    """It reads three batches for each step, over the padded ends of epochs."""
    whole = indices(islice(make_loader(), 12))
    loader = LOADERS[kind]()
    checkpointer = eqxshard.Checkpointer(tmp_path, max_to_keep=9)
    state = new_state()
    with closing(iter(loader)) as batches:
        for _ in range(3):
            for _ in range(2):
                next(batches)
            state, _ = train_step(state, next(batches))
            checkpointer.save(state, loader=loader)
    for step in (1, 2, 3):
        again = resumed(checkpointer, step, LOADERS[kind]())
        with closing(iter(again)) as batches:
            assert indices(islice(batches, 3)) == whole[3 * step :][:3]
            # One that was resumed is saved again.
            assert again.state()["step"] == 3 * step + 3


def test_steps_of_several_batches_count_each_of_them(train_step, tmp_path):
    loader, checkpointer = make_loader(remainder="drop"), eqxshard.Checkpointer(tmp_path)
    whole = indices(islice(make_loader(remainder="drop"), 6))
    with closing(iter(loader)) as batches:
        host = [jax.tree.map(np.asarray, batch) for batch in islice(batches, 4)]
        state, _ = train_step.many(new_state(), stack(host))
        checkpointer.save(state, loader=loader)
    with closing(iter(resumed(checkpointer, 4, make_loader(remainder="drop")))) as batches:
        assert indices(islice(batches, 2)) == whole[4:]
    device = make_loader(placement="device")
    state, _ = train_step.many(new_state(), device.stacked(3, capacity=8))
    checkpointer = eqxshard.Checkpointer(tmp_path / "device")
    checkpointer.save(state, loader=device)
    assert resumed(checkpointer, 3, make_loader()).state()["step"] == 3


def test_a_loader_that_nothing_read_stays_where_it_is(train_step, tmp_path):
    batch, loader = next(iter(make_loader())), make_loader()
    loader.seek(2)
    state, _ = train_step(new_state(), batch)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state, loader=loader)
    assert resumed(checkpointer, 1, make_loader()).state()["step"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_leaves_the_position_alone(kind):
    loader, whole = LOADERS[kind](), indices(islice(make_loader(), 6))
    if not loader.has_rows:
        four = [batch_of(number) for number in range(4)]
        batches = {
            "dataset": grain.MapDataset.source(four),
            "filtered": grain.MapDataset.source(four).to_iter_dataset(),
            "iterable": four,
        }[kind]
        loader, whole = eqxshard.Loader(batches, mesh=make_mesh()), whole[:4]
    step = eqxshard.make_eval_step(
        lambda model, batch: {"index": batch["index"].astype(jnp.float32)}
    )
    model, last = new_state().model, len(whole) - 1
    with closing(iter(loader)) as batches:
        assert indices(islice(batches, last)) == whole[:last]
        assert eqxshard.evaluate(model, step, loader)["index"] == pytest.approx(49.5)
        assert loader.state()["step"] == last
        if loader.has_rows:
            index = eqxshard.predict(model, lambda model, batch: batch["index"], loader)
            np.testing.assert_array_equal(index, np.arange(100))
            assert loader.state()["step"] == last
        assert indices(islice(batches, 1)) == whole[last:]
    assert loader.state()["step"] == last + 1


class Reads(Callback):
    """Reads the loader of a run, and so moves it."""

    every = 1

    def after_step(self, loop):
        loop.loader.seek(11)
        next(iter(loop.loader))


@pytest.mark.parametrize("kind", KINDS)
def test_fit_saves_the_position_of_its_steps(train_step, tmp_path, kind):
    loader, checkpointer = LOADERS[kind](), eqxshard.Checkpointer(tmp_path, save_every=2)
    options: dict = {"checkpointer": checkpointer, "callbacks": [Reads()]}
    state = eqxshard.fit(new_state(), train_step, loader, steps=6, **options)
    # The run itself was not disturbed.
    assert_close(state, eqxshard.fit(new_state(), train_step, make_loader(), steps=6))
    whole = indices(islice(make_loader(), 12))
    for step in checkpointer.steps():
        with closing(iter(resumed(checkpointer, step, LOADERS[kind]()))) as batches:
            assert indices(islice(batches, 2)) == whole[step:][:2]


def test_the_batch_of_a_step_that_failed_is_read_again(train_step, tmp_path):
    def step(state, batch):
        if int(state.step) == 2:
            raise OSError("the third step fails")
        return train_step(state, batch)

    checkpointer, loader = eqxshard.Checkpointer(tmp_path), make_loader()
    with pytest.raises(OSError, match="the third step fails"):
        eqxshard.fit(new_state(), step, loader, steps=4, checkpointer=checkpointer)
    assert loader.state()["step"] == 3
    assert resumed(checkpointer, 2, make_loader()).state()["step"] == 2


def test_a_step_that_is_skipped_has_read_its_batch(tmp_path, train_step):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    loader = make_loader()
    with closing(iter(loader)) as batches:
        batch = next(batches)
        bad = {**batch, "x": batch["x"] * np.float32(np.nan)}
        state, metrics = train_step(new_state(), bad)
        assert bool(metrics.nonfinite)
        checkpointer.save(state, loader=loader)
    assert resumed(checkpointer, int(state.step), make_loader()).state()["step"] == 1


def test_fit_refuses_the_position_of_a_loop_that_read_otherwise(train_step, tmp_path):
    loader, checkpointer = make_loader(), eqxshard.Checkpointer(tmp_path / "own")
    with closing(iter(loader)) as batches:
        next(batches)
        state, _ = train_step(new_state(), next(batches))
        checkpointer.save(state, loader=loader)
    checkpointer.wait()
    says = "checkpoint of step 1 was saved when its loader had given 2 batches, .*; go on "
    options: dict = {"steps": 3, "checkpointer": checkpointer}
    with pytest.raises(ValueError, match=says):
        eqxshard.fit(state, train_step, make_loader(), **options)
    # The remedy of the error works.
    options["checkpointer"] = eqxshard.Checkpointer(tmp_path / "fit")
    state = eqxshard.fit(state, train_step, make_loader(), **options)
    assert int(state.step) == 3
