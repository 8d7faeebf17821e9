import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import on_versions
from helpers import (
    MESHES,
    RULES,
    Model,
    Named,
    arrays,
    assert_equal,
    compiled_by_jit,
    lenient,
    make_batch,
    make_mesh,
    once,
    squared_errors,
)

import eqxshard

KEY = jax.random.key(0)


def init(mesh, rule, optim=None, make_model: Any = Model, key: Any = KEY):
    optim = lenient(optax.adam(1e-3)) if optim is None else optim
    return eqxshard.init_state(make_model, optim, key=key, mesh=mesh, rule=rule)


@functools.cache
def on_one_device():
    return init(make_mesh("data=1"), eqxshard.replicate())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "mesh", on_versions(MESHES, ["fsdp=8", "data=2,fsdp=4"], MESHES.keys() - {"data=4"})
)
def test_initial_values_do_not_depend_on_mesh_or_rule(mesh, rule):
    assert_equal(init(make_mesh(mesh), RULES[rule]), on_one_device())


def test_the_mesh_of_a_caller_is_not_that_of_the_state():
    with jax.set_mesh(make_mesh("data=8")):
        state = init(make_mesh("data=1"), eqxshard.replicate())
    assert_equal(state, on_one_device())


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=4"])
def test_an_abstract_state_has_the_shapes_types_and_shardings(mesh):
    mesh, rule, optim = make_mesh(mesh), RULES["fsdp"], lenient(optax.adam(1e-3))
    state = init(mesh, rule, optim)
    like = eqxshard.abstract_state(Model, optim, key=KEY, mesh=mesh, rule=rule)
    found = [x for x in jax.tree.leaves(like) if isinstance(x, jax.ShapeDtypeStruct)]
    expected = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    for shape, array in zip(found, expected, strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


class Weak(eqx.Module):
    """Arrays of weak types, as numbers of Python make them."""

    weight: jax.Array
    scale: jax.Array
    shift: jax.Array
    count: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (8, 8))
        self.scale, self.shift, self.count = (
            jnp.asarray(2.0),
            jnp.full(8, 3.0),
            jnp.array(0),
        )

    def __call__(self, x):
        return x @ self.weight * self.scale + self.shift


@pytest.mark.versions
@pytest.mark.parametrize("explicit", [False, True])
def test_weak_types_are_those_of_an_abstract_state_and_of_a_checkpoint(
    explicit, tmp_path, as_scripts_run
):
    def weak(state):
        leaves = jax.tree_util.tree_leaves_with_path(state)
        found = [(path, getattr(x, "weak_type", False)) for path, x in leaves]
        return [jax.tree_util.keystr(path) for path, is_weak in found if is_weak]

    mesh, optim = eqxshard.make_mesh(fsdp=8, explicit=explicit), optax.adam(1e-2)
    placed: dict = {"key": KEY, "mesh": mesh, "rule": RULES["fsdp"]}
    state = eqxshard.init_state(Weak, optim, **placed)
    like = eqxshard.abstract_state(Weak, optim, **placed)
    assert ".model.scale" in weak(state) and ".model.shift" in weak(state)
    assert weak(like) == weak(state)

    def loss_fn(model, batch, key):
        return jnp.sum(model(batch["x"]) ** 2, -1)

    train_step = eqxshard.make_train_step(once(loss_fn), optim, lint="off")
    batch = {"x": np.ones((8, 8), np.float32)}
    state, _ = train_step(state, batch)
    checkpointer = eqxshard.Checkpointer(tmp_path / "run")
    checkpointer.save(state)
    checkpointer.wait()
    restored = checkpointer.restore(like)
    checkpointer.close()
    assert weak(restored) == weak(state)
    assert_equal(restored, state)
    train_step(restored, batch)


@pytest.mark.versions
def test_no_array_is_whole_on_the_way_in(monkeypatch):
    """A device needs its own parts, and room for about one more."""
    side = 1024
    with compiled_by_jit(monkeypatch) as compiled:
        state = init(
            make_mesh("fsdp=8"),
            eqxshard.fsdp(),
            make_model=lambda key: eqx.nn.MLP(side, side, side, 3, key=key),
        )
    memory = [c.memory_analysis() for c in compiled]
    largest = side * side * 4
    parts = sum(x.addressable_shards[0].data.nbytes for x in plain_arrays(state))
    made = sum(each.output_size_in_bytes for each in memory)
    assert made == pytest.approx(parts, rel=0.01)
    assert max(each.temp_size_in_bytes for each in memory) < largest
    assert max(each.argument_size_in_bytes for each in memory) < largest // 8
    sizes = {x.addressable_shards[0].data.shape for x in plain_arrays(state.model)}
    assert sizes == {(side // 8, side), (side,)}


def plain_arrays(tree):
    return [
        leaf
        for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


# Shared arrays


def tied(key):
    model = eqx.nn.MLP(8, 8, 8, 2, key=key)
    return eqx.tree_at(lambda m: m.layers[1].weight, model, model.layers[0].weight)


def test_an_array_that_is_trained_in_two_places_is_refused():
    with pytest.raises(ValueError, match=r"layers.0.weight and layers.1.weight .*Shared"):
        init(make_mesh(), eqxshard.replicate(), make_model=tied)


def tied_twice(key):
    return jax.lax.map(
        lambda key: eqx.filter(tied(key), eqx.is_array), jax.random.split(key)
    )


@pytest.mark.parametrize(
    "make",
    [eqx.filter_jit(tied), eqx.filter_checkpoint(eqx.filter_jit(tied)), tied_twice],
)
@pytest.mark.parametrize("precision", [None, eqxshard.Precision(params=jnp.bfloat16)])
def test_so_it_is_inside_of_jitted_functions_and_loops(make, precision):
    """There, JAX itself makes two arrays of one."""
    with pytest.raises(ValueError, match=r"layers.0.weight and layers.1.weight .*Shared"):
        eqxshard.init_state(
            make,
            lenient(optax.adam(1e-3)),
            key=KEY,
            mesh=make_mesh(),
            rule=eqxshard.replicate(),
            precision=precision,
        )


def test_arrays_of_one_jitted_function_are_not_tied():
    linear = eqx.filter_jit(lambda key: eqx.nn.Linear(8, 8, key=key))
    make = eqx.filter_jit(lambda key: [linear(key), linear(key), jax.jit(jnp.copy)(key)])
    assert len(init(make_mesh(), eqxshard.replicate(), make_model=make).model) == 3


def test_arrays_that_are_not_trained_may_be_in_several_places():
    """Each place has memory of its own, which a step donates."""

    def make(key):
        table, mask = jnp.arange(8), jnp.arange(8.0)
        linear = eqx.nn.Linear(8, 4, key=key)
        return {"a": [linear, table, mask], "b": [table, mask, linear.weight]}

    linear = eqx.filter_eval_shape(make, KEY)["a"][0]
    trainable = {"a": [jax.tree.map(lambda _: True, linear), True, False], "b": False}
    # It keeps the weights themselves in its state, beside an average of them.
    optim = lenient(optax.chain(optax.sgd(0.1), eqxshard.ema_weights(0.9)))
    placed: dict = {"mesh": make_mesh("fsdp=8"), "rule": RULES["fsdp"]}
    state = eqxshard.init_state(make, optim, key=KEY, trainable=trainable, **placed)

    def loss_fn(model, batch, key):
        one, other = model["a"], model["b"]
        scale = (one[1] * other[0]).astype(jnp.float32) * one[2] * other[1]
        return jax.vmap(lambda x: one[0](x * scale).sum())(batch["x"])

    train_step = eqxshard.make_train_step(loss_fn, optim)
    before = np.asarray(state.model["b"][2])
    for _ in range(2):
        state, _ = train_step(state, {"x": np.ones((8, 8), np.float32)})
    for part in ("a", "b"):
        tables = [x for x in state.model[part] if getattr(x, "shape", None) == (8,)]
        for table in tables:
            np.testing.assert_array_equal(table, np.arange(8))
    np.testing.assert_array_equal(state.model["b"][2], before)
    assert (np.asarray(state.model["a"][0].weight) != before).any()


class Labelled(eqx.Module):
    """A model whose array is in a node without keys."""

    w: Named

    def __init__(self, key):
        self.w = Named(jax.random.normal(key, (8, 8)))

    def __call__(self, x):
        return x @ self.w.array


def test_nodes_that_are_registered_without_keys_are_children(caplog):
    seen, mesh, optim = [], make_mesh("fsdp=8"), lenient(optax.adam(1e-2))

    def rule(path, leaf, mesh):
        seen.append(path)
        return jax.P("fsdp")

    state = eqxshard.init_state(Labelled, optim, key=KEY, mesh=mesh, rule=rule)
    assert {*seen} == {"w.0"} and state.model.w.axes == ("a", "b")
    np.testing.assert_array_equal(state.model.w.array, Labelled(KEY).w.array)

    def loss_fn(model, batch, key):
        return jnp.sum((model(batch["x"]) - 1) ** 2, -1)

    train_step = eqxshard.make_train_step(loss_fn, optim)
    for rows in (8, 16):
        state, _ = train_step(state, {"x": np.ones((rows, 8), np.float32)})
    (record,) = caplog.records
    assert "Changed: batch.x: float32[8,8] -> float32[16,8]." in record.getMessage()


class Normalized(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(x, state)


def test_a_model_whose_state_is_not_made_is_refused():
    says = r"^norm\.\w+ has state, .*; write init_state\(eqx\.nn\.make_with_state\("
    with pytest.raises(ValueError, match=says):
        init(make_mesh(), eqxshard.replicate(), make_model=Normalized)
    made = eqx.nn.make_with_state(Normalized)
    init(make_mesh(), eqxshard.replicate(), make_model=made)


@pytest.mark.parametrize("mistake", ["the pair is called", "the state is not given"])
def test_a_mistake_with_a_models_state_has_a_note_on_the_pair(mistake):
    made = eqx.nn.make_with_state(Normalized)
    state = init(make_mesh(), eqxshard.replicate(), make_model=made)
    batch = {"x": np.ones((8, 8), np.float32)}
    if mistake == "the pair is called":
        optim = lenient(optax.adam(1e-3))
        step = eqxshard.make_train_step(lambda m, b, k: m(b["x"]), optim)
        with pytest.raises((TypeError, AttributeError)) as caught:
            step(state, batch)
    else:
        eval_step = eqxshard.make_eval_step(lambda pair, b: {"x": pair[0](b["x"])})
        with pytest.raises((TypeError, AttributeError)) as caught:
            eval_step(state.model, batch)
    notes = "\n".join(caught.value.__notes__)
    assert "get the pair (model, state)" in notes and "state.model_state" in notes


# Models that cannot be made under jit


def branches(key):
    weight = jax.random.normal(key, (8,))
    return weight if weight[0] > 0 else -weight


@pytest.mark.parametrize(
    "make",
    [
        branches,
        lambda key: jnp.ones(int(jax.random.randint(key, (), 8, 9))),
        lambda key: (x := jax.random.normal(key, (8,)))[x > -9],
    ],
)
def test_a_model_that_needs_values_says_what_to_write(make):
    # JAX's error with the user's line, and a note.
    with pytest.raises((TypeError, IndexError)) as error:
        init(make_mesh(), eqxshard.replicate(), make_model=make)
    assert "write make_model=lambda key: model" in error.value.__notes__[0]
    assert __file__ in {str(frame.path) for frame in error.traceback}
    model = make(KEY)
    assert_equal(
        init(make_mesh(), eqxshard.replicate(), make_model=lambda _: model).model, model
    )


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


@pytest.mark.parametrize("model", [eqx.nn.MLP(2, 2, 2, 1, key=KEY), {"w": jnp.ones(2)}])
def test_a_model_in_the_place_of_a_function_is_refused(model, unannotated):
    with pytest.raises(TypeError, match=r"a function of a key; .* write lambda key: m"):
        init(make_mesh(), eqxshard.replicate(), make_model=model)
    made = init(make_mesh(), eqxshard.replicate(), make_model=lambda key: model)
    # The state has copies, which a step donates; the model itself stays.
    assert_equal(made.model, model)
    shared = {id(leaf) for leaf in jax.tree.leaves(made.model)}
    assert not shared & {id(leaf) for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)}
