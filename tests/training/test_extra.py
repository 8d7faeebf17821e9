"""Companions of a step, such as a teacher, and steps that follow their state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RULES, Model, assert_close, make_batch, make_mesh, stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_helpers import KEY, OPTIM, without_dropout

import eqxshard
from eqxshard.sharding import batch_sharding


def to_teacher(model, batch, key, teacher):
    """Losses against another model's outputs, and the outputs' mean as a metric."""
    model, teacher = eqx.nn.inference_mode((model, teacher))
    wanted = jax.vmap(teacher)(batch["x"])
    return jnp.sum((jax.vmap(model)(batch["x"]) - wanted) ** 2, axis=-1)


def state_on(mesh="data=2,fsdp=4", rule="fsdp", seed=0, **options):
    key = jax.random.key(seed)
    placed = {"mesh": make_mesh(mesh), "rule": RULES[rule]}
    return eqxshard.init_state(Model, OPTIM, key=key, **placed, **options)


def teacher_on(mesh="data=2,fsdp=4", rule="fsdp"):
    return state_on(mesh, rule, seed=1).model


@pytest.mark.slow
@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_a_sharded_teacher_gives_the_losses_of_one_device(mesh, rule):
    train_step = eqxshard.make_train_step(to_teacher, OPTIM)
    one, many = state_on("data=1", "replicate"), state_on(mesh, rule)
    for seed in range(2):
        batch = make_batch(seed=seed)
        one, expected = train_step(one, batch, teacher_on("data=1", "replicate"))
        many, metrics = train_step(many, batch, teacher_on(mesh, rule))
        assert metrics.compute() == pytest.approx(expected.compute(), rel=2e-5)
    assert_close(one, many)


def test_another_teacher_compiles_nothing_and_both_are_left_as_they_are():
    traced = []

    def loss_fn(model, batch, key, teacher):
        traced.append(None)
        return to_teacher(model, batch, key, teacher)

    train_step = eqxshard.make_train_step(loss_fn, OPTIM)
    state, first, second = state_on(), teacher_on(), state_on(seed=2).model
    before = jax.device_get(eqx.filter(first, eqx.is_array))
    state, _ = train_step(state, make_batch(), first)
    count = len(traced)
    state, metrics = train_step(state, make_batch(), second)
    assert len(traced) == count
    assert metrics.compute()["loss"] > 0
    jax.tree.map(np.testing.assert_array_equal, before, eqx.filter(first, eqx.is_array))


def test_a_part_of_the_state_may_be_its_own_companion():
    train_step = eqxshard.make_train_step(to_teacher, OPTIM)
    state = state_on()
    target = state.model
    before = jax.device_get(eqx.filter(target, eqx.is_array))
    losses = []
    for _ in range(3):
        state, metrics = train_step(state, make_batch(), target)
        losses.append(metrics.compute()["loss"])
    # The target stays while the model moves away from it.
    jax.tree.map(np.testing.assert_array_equal, before, eqx.filter(target, eqx.is_array))
    assert losses[0] == 0
    state, metrics = train_step(state, make_batch(), state.model)
    assert metrics.compute()["loss"] == 0


def same_memory(tree):
    """Other arrays, which have the memory of those that are given."""

    def one(x):
        spec = P(*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
        other = jax.device_put(x, NamedSharding(x.sharding.mesh, spec))
        addresses = [y.addressable_data(0).unsafe_buffer_pointer() for y in (x, other)]
        assert addresses[0] == addresses[1]
        return other

    return jax.tree.map(lambda x: one(x) if eqx.is_array(x) else x, tree)


def test_a_companion_may_have_the_memory_of_the_state():
    """That memory is then not donated, because XLA would end the process."""
    train_step = eqxshard.make_train_step(to_teacher, OPTIM)
    state = state_on()
    # A new companion at each call.
    for _ in range(2):
        state, metrics = train_step(state, make_batch(), same_memory(state.model))
        assert metrics.compute()["loss"] == 0
    # A companion that stays, and a state that is made of it later.
    target = same_memory(state.model)
    kept = jax.device_get(eqx.filter(target, eqx.is_array))
    for _ in range(2):
        state, _ = train_step(state, make_batch(), target)
    state = eqx.tree_at(lambda s: s.model, state, same_memory(target))
    state, metrics = train_step(state, make_batch(), target)
    assert metrics.compute()["loss"] == 0
    jax.tree.map(np.testing.assert_array_equal, kept, eqx.filter(target, eqx.is_array))

    # A call that failed does not make a companion known either.
    target = same_memory(state.model)
    with pytest.raises(KeyError, match="x"):
        train_step(state, {"z": make_batch()["x"]}, target)
    state, metrics = train_step(state, make_batch(), target)
    assert metrics.compute()["loss"] == 0

    # A batch, and the data of a key, may have it, too.
    def loss_fn(model, batch, key, extra):
        of_key = extra["zero"] * jnp.sum(extra["key"].astype(jnp.float32))
        return of_key + jnp.sum((batch["w"] - model.first.weight) ** 2, axis=-1)

    train_step = eqxshard.make_train_step(loss_fn, OPTIM)
    state = state_on("data=8", "replicate")
    for _ in range(2):
        rows = batch_sharding(make_mesh())
        batch = {"w": jax.device_put(state.model.first.weight, rows)}
        extra = {"key": jax.random.key_data(state.key), "zero": np.float32(0)}
        state, _ = train_step(state, batch, extra)


@pytest.mark.slow
def test_another_sharding_of_a_companion_is_said(caplog):
    train_step = eqxshard.make_train_step(to_teacher, OPTIM)
    eval_step = eqxshard.make_eval_step(lambda m, b: {"x": jax.vmap(m)(b["x"])[:, 0]})
    state = state_on()
    for teacher in (teacher_on(), teacher_on(rule="replicate"), teacher_on()):
        state, _ = train_step(state, make_batch(), teacher)
        eval_step(eqx.nn.inference_mode(teacher), make_batch())
    for name, record in zip(("extra", "model"), caplog.records, strict=True):
        said = record.getMessage()
        assert f"compiles again. Changed: sharding of {name}.first.weight: P(" in said
        assert "on 8 x cpu (data=2, fsdp=4) -> P() on 8 x cpu" in said


def test_a_companion_on_other_devices_is_refused():
    train_step = eqxshard.make_train_step(to_teacher, OPTIM)
    on_one = jax.tree.map(
        lambda x: jax.device_put(x, jax.devices()[1]) if eqx.is_array(x) else x,
        teacher_on(),
    )
    state, _ = train_step(state_on(), make_batch(), teacher_on())
    for teacher, where in [(on_one, "on cpu:1"), (teacher_on("data=2"), r"on 2 x cpu")]:
        for call in (train_step, lambda s, b, t: train_step.many(s, stack([b]), t)):
            with pytest.raises(ValueError, match=f"the extra is {where}.*; make both with"):
                call(state, make_batch(), teacher)
    # It has the signature of one that is not on any device yet.
    on_host = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, on_one)
    state, _ = train_step(state, make_batch(), on_host)
    with pytest.raises(ValueError, match="the extra is on cpu:1, and the step on 8 x cpu"):
        train_step(state, make_batch(), on_one)


# Of a step that is given no mesh, rule, trainable or precision


def test_a_step_trains_what_the_state_trains():
    frozen = jax.tree.map(lambda _: False, eqx.filter_eval_shape(Model, KEY))
    only_last = eqx.tree_at(lambda m: m.last, frozen, replace=True)
    state = state_on(trainable=only_last, precision=eqxshard.Precision(jnp.bfloat16))
    before = jax.device_get(eqx.filter(state.model, eqx.is_array))
    seen = []

    def loss_fn(model, batch, key):
        seen.append(model.first.weight.dtype)
        return jnp.square(without_dropout(model, batch, key))

    state, _ = eqxshard.make_train_step(loss_fn, OPTIM)(state, make_batch())
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(before.first.weight, state.model.first.weight)
    assert (before.last.weight != np.asarray(state.model.last.weight)).any()


def test_a_companion_that_was_donated_is_refused():
    train_step = eqxshard.make_train_step(to_teacher, OPTIM)
    state = state_on()
    old = state.model
    state, _ = train_step(state, make_batch(), teacher_on())
    with pytest.raises(ValueError, match="an array of the extra was donated"):
        train_step(state, make_batch(), old)
