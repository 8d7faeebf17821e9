"""`Loader(placement="device")`: the same batches, gathered where the examples are."""

import itertools
from contextlib import closing
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
    make_batch,
    make_loader,
    make_mesh,
    source,
    squared_errors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import eqxshard
from eqxshard.testing import collectives

OPTIM = lenient(optax.adam(1e-2))
RULE = RULES["replicate"]


@pytest.fixture(scope="module")
def train_step():
    return eqxshard.make_train_step(squared_errors, OPTIM, mesh=make_mesh(), rule=RULE)


@pytest.fixture(scope="module")
def eval_step():
    return eqxshard.make_eval_step(
        lambda model, batch: {"index": batch["index"].astype("float32")},
        mesh=make_mesh(),
        rule=RULE,
    )


def new_state(mesh=None):
    key = jax.random.key(0)
    mesh = make_mesh() if mesh is None else mesh
    return eqxshard.init_state(Model, OPTIM, key=key, mesh=mesh, rule=RULE)


def on_device(**options):
    return make_loader(placement="device", **options)


def read(loader, count):
    with closing(iter(loader)) as batches:
        return list(itertools.islice(batches, count))


@settings(max_examples=12, deadline=None)
@given(
    examples=st.integers(8, 70),
    batch_size=st.sampled_from([8, 16]),
    remainder=st.sampled_from(["pad", "drop"]),
    shuffle=st.booleans(),
    first=st.integers(0, 20),
    mesh=st.sampled_from(["data=1", "data=2,fsdp=4"]),
)
def test_the_batches_are_those_of_the_host(
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
    here = eqxshard.Loader(source(examples), **options)
    there = eqxshard.Loader(source(examples), placement="device", **options)
    for loader in here, there:
        loader.seek(first)
    for ours, theirs in zip(read(there, 5), read(here, 5), strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name].sharding == theirs[name].sharding
            assert ours[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(ours[name], theirs[name])
    assert there.state() == here.state()


def test_weights_of_the_source_are_kept_and_padding_has_none():
    weight = np.r_[np.nan, np.arange(1, 10)].astype(np.float32)
    data = eqxshard.data.ArraySource({"weight": weight})
    options = {"batch_size": 8, "mesh": make_mesh(), "shuffle": False}
    there = eqxshard.Loader(data, placement="device", **options)
    for ours, theirs in zip(read(there, 2), read(eqxshard.Loader(data, **options), 2)):
        np.testing.assert_array_equal(ours["weight"], theirs["weight"])


def test_steps_that_gather_are_the_steps_of_the_loop(train_step):
    state, losses = new_state(), []
    for batch in read(make_loader(), 6):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    many, metrics = train_step.many(new_state(), on_device().stacked(6))
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    assert_close(many, state, rtol=1e-4, atol=1e-6)


def test_there_may_be_room_for_more_and_all_counts_share_a_program(train_step, caplog):
    whole, metrics = train_step.many(new_state(), on_device().stacked(7, room=8))
    assert metrics.weight.shape == (8,)
    np.testing.assert_array_equal(metrics.weight[7:], 0)
    loader, parts = on_device(), []
    state = new_state()
    with jax.log_compiles():
        for count in (1, 4, 2):
            state, part = train_step.many(state, loader.stacked(count, room=8))
            parts.append(part["loss"][:count])
    assert "Compiling train_steps" not in caplog.text
    assert loader.state()["step"] == int(state.step) == 7
    np.testing.assert_array_equal(np.concatenate(parts), metrics["loss"][:7])
    assert_equal(state, whole)


class Recorder:
    def __init__(self):
        self.lines = []

    def log(self, step, values):
        times = ("seconds", "examples_per_second")
        kept = {n: v for n, v in values.items() if not n.endswith(times)}
        self.lines.append((step, kept))

    def close(self):
        pass


def run(train_step, eval_step, loader, tests, **options):
    recorder = Recorder()
    state = eqxshard.fit(
        new_state(),
        train_step,
        loader,
        evaluate=lambda model: eqxshard.evaluate(model, eval_step, tests),
        trackers=[recorder],
        **options,
    )
    return state, recorder.lines


@pytest.mark.parametrize("options", [{"epochs": 3, "log_every": 3}, {"steps": 7}])
def test_fit_reports_and_returns_the_same(train_step, eval_step, options):
    here = run(train_step, eval_step, make_loader(), make_loader(shuffle=False), **options)
    there = run(train_step, eval_step, on_device(), on_device(shuffle=False), **options)
    assert_close(there[0], here[0], rtol=1e-4, atol=1e-6)
    assert [step for step, _ in there[1]] == [step for step, _ in here[1]]
    for (_, ours), (_, theirs) in zip(there[1], here[1]):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_fit_dispatches_once_between_reports(train_step, monkeypatch):
    counts = []

    def many(self, state, batches):
        counts.append(int(batches.count))
        return original(self, state, batches)

    original = eqxshard.TrainStep.many
    monkeypatch.setattr(eqxshard.TrainStep, "many", many)
    monkeypatch.setattr(eqxshard.TrainStep, "__call__", None)
    eqxshard.fit(new_state(), train_step, on_device(), steps=11, log_every=3)
    # An epoch has 4 steps.
    assert counts == [3, 1, 2, 2, 1, 2]


def test_a_checkpoint_is_saved_when_it_is_due_and_goes_on_on_the_host(train_step, tmp_path):
    checkpointer = eqxshard.Checkpointer(tmp_path, every=3, keep=9)
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


def test_each_example_counts_once_in_an_evaluation(eval_step):
    values = eqxshard.evaluate(new_state().model, eval_step, on_device())
    assert values["index"] == np.arange(100).mean()


def test_devices_gather_without_asking_each_other():
    loader = on_device()
    batches = loader.stacked(1)
    assert all(x.sharding.is_fully_replicated for x in batches.examples.values())
    compiled = (
        jax.jit(lambda b: b.batch(jax.numpy.int32(0), make_mesh())).lower(batches).compile()
    )
    assert collectives(compiled).counts == {}


def test_after_a_step_that_is_not_finite_the_number_is_the_step(train_step):
    data = source(64)
    data.arrays["x"][40] = np.nan
    loader = eqxshard.Loader(
        data, batch_size=32, mesh=make_mesh(), shuffle=False, placement="device"
    )
    step = eqxshard.make_train_step(
        squared_errors, OPTIM, mesh=make_mesh(), rule=RULE, nonfinite="raise"
    )
    with pytest.raises(FloatingPointError, match="in step 2;"):
        step.many(new_state(), loader.stacked(2, room=5))


@pytest.mark.parametrize("options", [{"transform": dict}, {"workers": 1}])
def test_nothing_is_done_on_a_host_that_is_not_there(options):
    with pytest.raises(ValueError, match="placement='device' has no host"):
        on_device(**options)


def test_another_place_is_refused(unannotated):
    with pytest.raises(ValueError, match="placement='disk' is not 'host' or 'device'"):
        make_loader(placement="disk")


@pytest.mark.parametrize("count, room", [(0, None), (3, 2)])
def test_counts_that_make_no_sense_are_refused(count, room):
    with pytest.raises(ValueError, match=f"{count} batches cannot be stacked"):
        on_device().stacked(count, room=room)


def test_more_than_is_left_is_refused():
    loader = on_device(epochs=1)
    loader.stacked(3)
    with pytest.raises(ValueError, match="1 batches are left, and 2 were asked for"):
        loader.stacked(2)


def test_stacks_of_the_host_are_refused():
    with pytest.raises(ValueError, match="make it with placement='device'"):
        make_loader().stacked(2)


def test_stacks_are_for_many(train_step):
    with pytest.raises(TypeError, match="give them to many"):
        train_step(new_state(), on_device().stacked(2))


def test_a_loader_on_another_mesh_is_refused(train_step):
    loader = on_device(mesh=make_mesh("data=2"))
    with pytest.raises(ValueError, match="the step is on 8 x cpu"):
        train_step.many(new_state(), loader.stacked(2))


def test_what_fits_on_no_device_is_refused(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 2**30, "bytes_in_use": 2**30 - 100}

    # Devices of CPUs do not say how much memory they have.
    local_devices = property(lambda mesh: [Device()])
    monkeypatch.setattr(jax.sharding.Mesh, "local_devices", local_devices)
    with pytest.raises(ValueError, match=r"do not fit .*; use placement='host'"):
        on_device()


def test_many_of_an_eval_step_are_its_single_ones(eval_step):
    model = new_state().model
    batches = [{**make_batch(seed=i), "index": np.arange(32)} for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    many = eval_step.many(model, stacked)
    singles = eqxshard.Metrics.stack([eval_step(model, batch) for batch in batches])
    np.testing.assert_array_equal(many["index"], singles["index"])
