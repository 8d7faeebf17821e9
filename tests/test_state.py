import copy
import dataclasses
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    MESHES,
    RULES,
    Model,
    arrays,
    assert_equal,
    compiled_by_jit,
    lenient,
    make_batch,
    make_mesh,
    squared_errors,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard

KEY = jax.random.key(0)


def init(mesh, rule, optim=None, make_model: Any = Model, key=KEY):
    optim = lenient(optax.adam(1e-3)) if optim is None else optim
    return eqxshard.init_state(make_model, optim, key=key, mesh=mesh, rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mesh", MESHES)
def test_initial_values_do_not_depend_on_mesh_or_rule(mesh, rule):
    alone = init(make_mesh("data=1"), eqxshard.replicate())
    assert_equal(init(make_mesh(mesh), RULES[rule]), alone)


def test_make_model_gets_the_key_as_it_is():
    state = init(make_mesh(), eqxshard.replicate())
    # Compiled and not, the last bit may differ.
    np.testing.assert_allclose(state.model.first.weight, Model(KEY).first.weight, rtol=1e-6)
    assert state.key.dtype == KEY.dtype
    assert not np.array_equal(jax.random.key_data(state.key), jax.random.key_data(KEY))


def test_old_style_keys_work():
    state = init(make_mesh(), eqxshard.replicate(), key=jax.random.PRNGKey(0))
    assert state.key.shape == (2,)


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=4"])
def test_every_array_of_the_model_is_where_the_rule_says(mesh):
    mesh = make_mesh(mesh)
    state = init(mesh, RULES["fsdp"])
    places = eqxshard.shardings(state.model, mesh, RULES["fsdp"])
    leaves = jax.tree.leaves(eqx.filter(state.model, eqx.is_array))
    assert [leaf.sharding for leaf in leaves] == jax.tree.leaves(places)
    assert state.model.first.weight.sharding.spec == P("fsdp")
    whole = NamedSharding(mesh, P())
    assert state.step.sharding == state.key.sharding == whole


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "plain": optax.sgd(0.1),
    "schedule": optax.adam(optax.linear_schedule(0.0, 1e-3, 10)),
    "masked": optax.masked(
        optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    ),
    "partitioned": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1)},
        lambda tree: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree),
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "average": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "lbfgs memory": optax.scale_by_lbfgs(memory_size=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_placed_explicitly(name):
    """What has a parameter's shape lies like it; the rest is whole; and it all trains."""
    mesh, rule, optim = make_mesh("data=2,fsdp=4"), RULES["fsdp"], lenient(OPTIMIZERS[name])
    state = init(mesh, rule, optim)
    params = jax.tree_util.tree_leaves_with_path(
        eqx.filter(state.model, eqx.is_inexact_array)
    )
    before = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        (place,) = [
            param.sharding
            for name, param in params
            if path[-len(name) :] == name and leaf.shape == param.shape
        ] or [NamedSharding(mesh, P())]
        assert leaf.sharding == place, path
        before[path] = leaf.sharding
    train_step = eqxshard.make_train_step(squared_errors, optim, mesh=mesh, rule=rule)
    state, metrics = train_step(state, make_batch())
    assert np.isfinite(metrics.compute()["loss"])
    after = dict(jax.tree_util.tree_leaves_with_path(state.opt_state))
    assert {path: leaf.sharding for path, leaf in after.items()} == before


def test_no_array_is_whole_on_the_way_in(monkeypatch):
    """A device needs its own parts, and room for about one leaf's part besides."""
    side = 1024
    with compiled_by_jit(monkeypatch) as compiled:
        state = init(
            make_mesh("fsdp=8"),
            eqxshard.fsdp(),
            make_model=lambda key: eqx.nn.MLP(side, side, side, 3, key=key),
        )
    (memory,) = [c.memory_analysis() for c in compiled]
    largest = side * side * 4
    parts = sum(x.addressable_shards[0].data.nbytes for x in plain_arrays(state))
    assert memory.output_size_in_bytes == pytest.approx(parts, rel=0.01)
    assert memory.temp_size_in_bytes < largest
    sizes = {x.addressable_shards[0].data.shape for x in plain_arrays(state.model)}
    assert sizes == {(side // 8, side), (side,)}


def plain_arrays(tree):
    return [
        leaf
        for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def test_an_array_in_two_places_is_refused():
    def make(key):
        model = eqx.nn.MLP(8, 8, 8, 2, key=key)
        return eqx.tree_at(lambda m: m.layers[1].weight, model, model.layers[0].weight)

    with pytest.raises(ValueError, match=r"layers.0.weight and layers.1.weight .*Shared"):
        init(make_mesh(), eqxshard.replicate(), make_model=make)


def test_a_shared_array_is_trained_as_one():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            pair = (eqx.nn.Linear(8, 8, key=key), eqx.nn.Linear(8, 8, key=key))
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, x, key):
            first, second = self.shared()
            return second(first(x))[:4]

    mesh, rule, optim = make_mesh("fsdp=8"), RULES["fsdp"], lenient(optax.sgd(0.1))
    state = init(mesh, rule, optim, make_model=Tied)
    train_step = eqxshard.make_train_step(squared_errors, optim, mesh=mesh, rule=rule)
    before = arrays(state.model)
    for seed in range(2):
        state, _ = train_step(state, make_batch(seed=seed))
    first, second = state.model.shared()
    np.testing.assert_array_equal(first.weight, second.weight)
    assert not np.array_equal(first.weight, next(iter(before.values())))


def test_a_rule_that_does_not_fit_is_refused_at_birth():
    rule = eqxshard.by_path({"last.weight": P("fsdp")})
    with pytest.raises(ValueError, match=r"last.weight \(4, 32\).* fsdp=8.*multiple of 8"):
        init(make_mesh("fsdp=8"), rule)


@pytest.fixture(scope="module")
def trained():
    """A state as a step returns it, which nobody has looked into yet."""
    mesh, rule, optim = make_mesh(), RULES["replicate"], lenient(optax.adam(1e-3))
    train_step = eqxshard.make_train_step(squared_errors, optim, mesh=mesh, rule=rule)

    def make():
        return train_step(init(mesh, rule, optim), make_batch())[0]

    return make


LOOKS = {
    "map": lambda state: jax.tree.map(lambda x: x, state),
    "flatten": lambda state: jax.tree.unflatten(
        jax.tree.structure(state), jax.tree.leaves(state)
    ),
    "replace": lambda state: dataclasses.replace(state),
    "copy": copy.copy,
    "tree_at": lambda state: eqx.tree_at(lambda s: s.step, state, state.step),
    "partition": lambda state: eqx.combine(*eqx.partition(state, eqx.is_array)),
    "attributes": lambda state: eqxshard.TrainState(
        state.step, state.model, state.opt_state, state.key
    ),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_state_from_a_step_is_a_module_like_others(trained, look):
    state = trained()
    seen = LOOKS[look](state)
    assert isinstance(seen, eqxshard.TrainState)
    assert_equal(seen, state)
    assert jax.tree.structure(seen) == jax.tree.structure(state)
    assert int(seen.step) == 1
    assert eqx.tree_equal(seen, state)
    assert repr(seen).startswith("TrainState(\n  step=i32[],\n  model=Model(")


def test_a_state_from_a_step_pickles(trained):
    state = trained()
    state = eqx.tree_at(lambda s: s.key, state, jax.random.key_data(state.key))
    model = eqx.filter(state.model, eqx.is_array)
    state = eqx.tree_at(lambda s: s.model, state, model)
    assert_equal(pickle.loads(pickle.dumps(state)), state)


def test_a_state_has_no_other_attributes(trained):
    state = trained()
    with pytest.raises(AttributeError, match="TrainState has no attribute 'params'"):
        _ = state.params
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.step = 3
