import gc

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from inspect_helpers import RULE, Model, make_mesh, user_rule
from jax.sharding import PartitionSpec as P

import eqxshard


def test_every_array_is_a_row():
    explanation = eqxshard.explain(Model(), make_mesh(), RULE)
    rows = {leaf.path: leaf for leaf in explanation.leaves}
    assert list(rows) == [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "key",
        "table",
    ]
    assert rows["layers.0.weight"] == eqxshard.Leaf(
        path="layers.0.weight",
        shape=(8, 6),
        dtype="float32",
        spec=P("fsdp"),
        bytes_whole=8 * 6 * 4,
        bytes_per_device=8 * 6,
        rule="fsdp()",
        note="",
        update_spec=P("fsdp"),
        update_rule="fsdp()",
    )
    bias = rows["layers.0.bias"]
    assert (bias.rule, bias.bytes_per_device, bias.note) == ("user_rule", 16, "")
    last = rows["layers.1.weight"]
    assert (last.rule, last.bytes_per_device) == (r"by_path('[a-z]+\\.1')", 24)
    assert rows["key"].shape == ()
    table = rows["table"]
    assert (table.dtype, table.bytes_whole, table.bytes_per_device) == ("int16", 18, 18)


def test_notes_say_why_a_leaf_is_whole():
    notes = {
        leaf.path: leaf.note for leaf in eqxshard.explain(Model(), make_mesh(), RULE).leaves
    }
    assert notes["key"] == "size 1, below min_size=2"
    assert notes["table"] == "replicated: no dim of (9,) divides by fsdp=4"
    assert notes["layers.0.weight"] == ""


def test_a_leaf_that_no_rule_claims_is_an_error():
    with pytest.raises(ValueError, match=r"^user_rule does not claim w \(8,\); name it in"):
        eqxshard.explain({"w": np.zeros(8)}, make_mesh(), user_rule)


def test_rules_that_match_nothing_are_errors():
    rule = eqxshard.first_match(eqxshard.by_path({"layer.0": P()}), eqxshard.fsdp())
    with pytest.raises(ValueError, match=r"'layer.0' matches no leaf; did you mean 'lay"):
        eqxshard.explain(Model(), make_mesh(), rule)
    with pytest.raises(ValueError, match="by_dim: no leaf has a dim 'mlp'"):
        eqxshard.explain(Model(), make_mesh(), eqxshard.by_dim({"mlp": "tensor"}))


def test_types_are_those_of_jax():
    tree = {"w": np.zeros(8), "i": np.arange(8), "h": np.zeros(8, np.float16)}
    explanation = eqxshard.explain(tree, make_mesh(), eqxshard.fsdp(min_size=1))
    placed = eqxshard.filter_shard(
        tree, eqxshard.shardings(tree, make_mesh(), eqxshard.fsdp(min_size=1))
    )
    for leaf in explanation.leaves:
        assert leaf.dtype == str(placed[leaf.path].dtype)
        assert leaf.bytes_whole == placed[leaf.path].nbytes


# Bytes


def on_first_device(tree):
    """The bytes that one device really holds."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(array.addressable_shards[0].data.nbytes for array in arrays)


def in_all(tree):
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(array.nbytes for array in arrays)


TENSOR = eqxshard.by_path({r"first\.": P("tensor"), r"last\.weight": P(None, "tensor")})
RULES = {
    "fsdp": eqxshard.fsdp(min_size=16),
    "zero1": eqxshard.zero1(min_size=16),
    "tensor and fsdp": eqxshard.combine(TENSOR, eqxshard.fsdp(min_size=16)),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_totals_are_what_devices_hold(rule):
    mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)
    optim = helpers.lenient(optax.adam(1e-3))
    key = jax.random.key(0)
    shapes = eqx.filter_eval_shape(helpers.Model, key)
    trainable = jax.tree.map(lambda _: eqx.is_array, shapes)
    trainable = eqx.tree_at(lambda model: model.first.bias, trainable, False)
    how = {"mesh": mesh, "rule": RULES[rule], "trainable": trainable}
    state = eqxshard.init_state(helpers.Model, optim, key=key, **how)
    for model in (state.model, shapes):
        explanation = eqxshard.explain(model, **how, optim=optim)
        params, rest = eqx.partition(state.model, eqx.is_inexact_array)
        assert explanation.parameters == (in_all(params), on_first_device(params))
        assert explanation.other == (in_all(rest), on_first_device(rest)) == (32, 32)
        held = (in_all(state.opt_state), on_first_device(state.opt_state))
        assert explanation.optimizer_state == held
        # Momenta are like the gradients that they are the means of.
        moments = state.opt_state[0].mu
        assert explanation.gradients == (in_all(moments), on_first_device(moments))
        assert explanation.bytes_whole == in_all(state.model)
        assert explanation.bytes_per_device == on_first_device(state.model)


@helpers.needs_new_jax
def test_what_is_in_the_memory_of_the_host_is_on_no_device():
    rule, optim = eqxshard.fsdp(min_size=16), optax.trace(0.9)
    here, there = (
        eqxshard.explain(Model(), make_mesh(), each, optim=optim)
        for each in (rule, eqxshard.offload(rule))
    )
    assert here.optimizer_state and there.optimizer_state
    assert (here.host, there.host) == (0, here.optimizer_state.per_device)
    assert there.optimizer_state == (here.optimizer_state.whole, 0)
    assert there.to_dict()["totals"]["host"] == there.host
    assert "the host's memory" in str(there) and "the host's" not in str(here)


def test_without_an_optimizer():
    explanation = eqxshard.explain(Model(), make_mesh(), RULE)
    key = Model().key.dtype.itemsize
    assert explanation.parameters == (192 + 32 + 96, 48 + 16 + 24)
    assert explanation.gradients == explanation.parameters
    assert explanation.other == (key + 18, key + 18)
    assert explanation.optimizer_state is None
    assert explanation.bytes_whole == 192 + 32 + 96 + key + 18
    assert explanation.bytes_per_device == 48 + 16 + 24 + key + 18
    empty = eqxshard.explain({"name": "x"}, make_mesh(), RULE, optim=optax.sgd(0.1))
    assert (empty.leaves, empty.bytes_whole, empty.bytes_per_device) == ((), 0, 0)
    assert empty.optimizer_state == (0, 0)


def test_what_is_frozen_has_no_gradient():
    explanation = eqxshard.explain(Model(), make_mesh(), RULE, trainable=False)
    assert explanation.gradients == (0, 0)
    assert explanation.parameters.whole == 192 + 32 + 96
    notes = {leaf.path: leaf.note for leaf in explanation.leaves}
    assert notes["layers.0.weight"] == "frozen"
    assert notes["table"] == "replicated: no dim of (9,) divides by fsdp=4"
    assert {leaf.update_spec for leaf in explanation.leaves} == {None}


def test_a_model_with_state():
    model, state = eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(8, "b", mode="ema"))()
    split = eqxshard.by_path({"^weight": P("fsdp"), "^bias": P("fsdp")})
    rule = eqxshard.first_match(split, eqxshard.replicate())
    explanation = eqxshard.explain((model, state), make_mesh(), rule)
    specs = {leaf.path: (leaf.spec, leaf.rule, leaf.note) for leaf in explanation.leaves}
    assert specs.pop("weight")[0] == specs.pop("bias")[0] == P("fsdp")
    whole = (P(), "model state", "whole under every rule")
    assert len(specs) == 3
    assert set(specs.values()) == {whole}
    assert all(path.startswith("model_state.") for path in specs)
    assert explanation.parameters == (64, 16)
    assert explanation.other == (in_all(state), in_all(state))


# Arguments


def test_a_whole_state_is_refused(unannotated):
    state = eqxshard.TrainState(jnp.int32(0), Model(), (), jax.random.key(0))
    with pytest.raises(TypeError, match=r"explain takes a model; give it state\.model"):
        eqxshard.explain(state, make_mesh(), RULE)


def test_nothing_is_placed():
    # A petabyte.
    tree = {"w": jax.ShapeDtypeStruct((2**24, 2**24), jnp.float32), "f": jax.nn.relu}
    gc.collect()  # Of arrays of earlier tests, which would be missing afterwards.
    before = len(jax.live_arrays())
    explanation = eqxshard.explain(tree, make_mesh(), eqxshard.fsdp())
    assert explanation.bytes_per_device == 2**48
    assert len(jax.live_arrays()) == before
    model = Model()
    devices = model.layers[0].weight.devices()
    eqxshard.explain(model, make_mesh(), RULE)
    assert model.layers[0].weight.devices() == devices
    assert isinstance(model.table, np.ndarray)


def test_shapes_explain_like_arrays():
    shapes = eqx.filter_eval_shape(Model)
    mesh = make_mesh()
    assert eqxshard.explain(shapes, mesh, RULE) == eqxshard.explain(Model(), mesh, RULE)


def test_a_spec_that_does_not_fit_is_an_error():
    rule = eqxshard.by_path({"table": P("fsdp")})
    with pytest.raises(ValueError, match=r"table \(9,\).* splits dim 0 of size 9"):
        eqxshard.explain(Model(), make_mesh(), rule)
