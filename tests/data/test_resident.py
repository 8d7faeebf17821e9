"""`Loader(placement="device")`: the same batches, gathered on the devices."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import (
    RULES,
    Model,
    assert_close,
    assert_equal,
    lenient,
    make_loader,
    make_mesh,
    source,
    squared_errors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import take

import eqxshard
from eqxshard.testing import collectives
from eqxshard.training import TrainStep

OPTIM = lenient(optax.adam(1e-2))
RULE = RULES["replicate"]


@pytest.fixture(scope="module")
def train_step():
    return eqxshard.make_train_step(squared_errors, OPTIM, mesh=make_mesh(), rule=RULE)


def new_state(mesh=None):
    key = jax.random.key(0)
    mesh = make_mesh() if mesh is None else mesh
    return eqxshard.init_state(Model, OPTIM, key=key, mesh=mesh, rule=RULE)


def on_device(**options):
    return make_loader(placement="device", **options)


@settings(max_examples=12, deadline=None)
@given(
    examples=st.integers(8, 70),
    batch_size=st.sampled_from([8, 16]),
    remainder=st.sampled_from(["pad", "drop"]),
    shuffle=st.booleans(),
    first=st.integers(0, 20),
    mesh=st.sampled_from(["data=1", "data=2,fsdp=4"]),
)
def test_batches_equal_those_of_the_host(
    examples, batch_size, remainder, shuffle, first, mesh
):
    if examples < batch_size:
        return
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "remainder": remainder,
        "shuffle": shuffle,
        "mesh": make_mesh(mesh),
    }
    host = eqxshard.Loader(source(examples), **options)
    device = eqxshard.Loader(source(examples), placement="device", **options)
    for loader in host, device:
        loader.seek(first)
    for batch, expected in zip(take(device, 5), take(host, 5), strict=True):
        assert batch.keys() == expected.keys()
        for name in expected:
            assert batch[name].sharding == expected[name].sharding
            assert batch[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(batch[name], expected[name])
    assert device.state() == host.state()


@pytest.mark.slow
def test_all_counts_with_the_same_capacity_share_a_program(train_step, caplog):
    whole, metrics = train_step.many(new_state(), on_device().stacked(7, capacity=8))
    assert metrics.weight.shape == (8,)
    np.testing.assert_array_equal(metrics.weight[7:], 0)
    loader, parts = on_device(), []
    state = new_state()
    with jax.log_compiles():
        for count in (1, 4, 2):
            state, part = train_step.many(state, loader.stacked(count, capacity=8))
            parts.append(part["loss"][:count])
    assert "Compiling train_steps" not in caplog.text
    assert loader.state()["step"] == int(state.step) == 7
    np.testing.assert_array_equal(np.concatenate(parts), metrics["loss"][:7])
    assert_equal(state, whole)


def test_fit_dispatches_once_between_reports(train_step, monkeypatch):
    counts = []

    def many(self, state, batches):
        counts.append(int(batches.count))
        return original(self, state, batches)

    def one(*_):
        raise AssertionError("A step was dispatched alone.")

    original = TrainStep.many
    monkeypatch.setattr(TrainStep, "many", many)
    monkeypatch.setattr(TrainStep, "__call__", one)
    eqxshard.fit(new_state(), train_step, on_device(), steps=11, log_every=3)
    # An epoch has 4 steps.
    assert counts == [3, 1, 2, 2, 1, 2]


@pytest.mark.slow
def test_checkpoints_are_saved_in_time_and_can_resume_on_the_host(train_step, tmp_path):
    checkpointer = eqxshard.Checkpointer(tmp_path, save_every=3, max_to_keep=9)
    whole = eqxshard.fit(
        new_state(), train_step, on_device(), steps=8, checkpointer=checkpointer
    )
    assert checkpointer.steps() == [3, 6, 8]
    like = eqxshard.abstract_state(
        Model, OPTIM, key=jax.random.key(0), mesh=make_mesh(), rule=RULE
    )
    state = checkpointer.restore(like, step=6)
    resumed = eqxshard.fit(state, train_step, make_loader(), steps=8)
    assert_close(resumed, whole, rtol=1e-4, atol=1e-6)


def test_gathering_needs_no_collectives():
    loader = on_device()
    batches = loader.stacked(1)
    assert all(x.sharding.is_fully_replicated for x in batches.examples.values())
    compiled = (
        jax.jit(lambda b: b.batch(jax.numpy.int32(0), make_mesh())).lower(batches).compile()
    )
    assert collectives(compiled).counts == {}


def test_mistakes_are_errors(train_step):
    other = on_device(mesh=make_mesh("data=2"))
    short = on_device(epochs=1)
    for make, error, says in (
        (lambda: on_device(transform=dict), ValueError, "cannot run transform= or wo"),
        (lambda: on_device(workers=1), ValueError, "cannot run transform= or workers="),
        (lambda: on_device().stacked(0), ValueError, "0 batches were asked for"),
        (lambda: on_device().stacked(3, capacity=2), ValueError, "for, capacity=2 and"),
        (lambda: short.stacked(5), ValueError, "5 batches .* and 4 are left; ask"),
        (lambda: make_loader().stacked(2), ValueError, "make it with placement='device'"),
        (
            lambda: train_step(new_state(), on_device().stacked(2)),
            TypeError,
            "give them to many",
        ),
        (
            lambda: train_step.many(new_state(), other.stacked(2)),
            ValueError,
            "and the step on 8 x cpu",
        ),
    ):
        with pytest.raises(error, match=says):
            make()
