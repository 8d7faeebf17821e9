"""Explanations: their numbers, as text and as dicts."""

import gc

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from inspect_helpers import RULE, Model, make_mesh
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.inspect import Leaf
from eqxshard.planning import Plan


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
    assert rows["layers.0.weight"] == Leaf(
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
        gradient=8 * 6,
        optimizer=0,
    )
    bias, table = rows["layers.0.bias"], rows["table"]
    assert (bias.rule, bias.bytes_per_device, bias.note) == ("user_rule", 16, "")
    assert (table.dtype, table.bytes_whole, table.bytes_per_device) == ("int16", 18, 18)
    assert "no dim of (9,) is divisible by fsdp=4" in table.note
    assert rows["key"].note == "size 1, below min_size=2"


def held_by(tree):
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
        assert explanation.parameters == (in_all(params), held_by(params))
        assert explanation.other == (in_all(rest), held_by(rest)) == (32, 32)
        held = (in_all(state.opt_state), held_by(state.opt_state))
        assert explanation.optimizer_state == held
        # Momenta are like the gradients that they are the means of.
        moments = state.opt_state[0].mu
        assert explanation.gradients == (in_all(moments), held_by(moments))
        # All of it but the optimizer's count belongs to some array of the model.
        assert sum(leaf.gradient for leaf in explanation.leaves) == held_by(moments)
        count = held_by(state.opt_state) - sum(x.optimizer for x in explanation.leaves)
        assert 0 <= count <= 8
        assert explanation.bytes_whole == in_all(state.model)
        assert explanation.bytes_per_device == held_by(state.model)


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
    assert "the host's memory" in str(there) and "the host's" not in str(here)


def test_what_is_frozen_has_no_gradient():
    explanation = eqxshard.explain(
        Model(), make_mesh(), RULE, trainable=False, optim=optax.trace(0.9)
    )
    assert explanation.gradients == explanation.optimizer_state == (0, 0)
    assert explanation.parameters.whole == 192 + 32 + 96
    weight = explanation.leaves[0]
    assert (weight.note, weight.update_spec) == ("frozen", None)
    assert (weight.gradient, weight.optimizer, weight.total) == (0, 0, 48)


def test_a_model_with_state():
    model, state = eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(8, "b", mode="ema"))()
    split = eqxshard.by_path({"^weight": P("fsdp"), "^bias": P("fsdp")})
    rule = eqxshard.first_match(split, eqxshard.replicate())
    explanation = eqxshard.explain((model, state), make_mesh(), rule)
    specs = {leaf.path: (leaf.spec, leaf.rule, leaf.note) for leaf in explanation.leaves}
    assert specs.pop("weight")[0] == specs.pop("bias")[0] == P("fsdp")
    whole = (P(), "model state", "always replicated")
    assert len(specs) == 3
    assert set(specs.values()) == {whole}
    assert all(path.startswith("model_state.") for path in specs)
    assert explanation.parameters == (64, 16)
    assert explanation.other == (in_all(state), in_all(state))


def test_a_whole_state_is_refused(unannotated):
    state = eqxshard.TrainState(jnp.int32(0), Model(), (), jax.random.key(0))
    with pytest.raises(TypeError, match=r"explain takes a model; give it state\.model"):
        eqxshard.explain(state, make_mesh(), RULE)


def test_a_placed_model_needs_no_mesh_and_rule(unannotated):
    specs = eqxshard.shardings(Model(), make_mesh(), RULE)
    model = eqxshard.filter_shard(Model(), specs)
    placed, wanted = eqxshard.explain(model), eqxshard.explain(model, make_mesh(), RULE)
    assert [leaf.spec for leaf in placed.leaves] == [leaf.spec for leaf in wanted.leaves]
    assert placed.parameters == wanted.parameters
    with pytest.raises(ValueError, match=r"not on a mesh; .* or give explain mesh="):
        eqxshard.explain(Model())


def test_nothing_is_placed():
    # A petabyte.
    tree = {"w": jax.ShapeDtypeStruct((2**24, 2**24), jnp.float32), "f": jax.nn.relu}
    gc.collect()  # Arrays of earlier tests would be missing afterwards.
    before = len(jax.live_arrays())
    explanation = eqxshard.explain(tree, make_mesh(), eqxshard.fsdp())
    assert explanation.bytes_per_device == 2**48
    assert len(jax.live_arrays()) == before


def test_it_prints_as_a_table():
    explanation = eqxshard.explain(Model(), make_mesh(), RULE)
    lines = str(explanation).splitlines()
    text = "\n".join(lines)
    assert "on 8 x cpu (data=2, fsdp=4)" in text and "update" not in text
    (row,) = [line for line in lines if "layers.0.weight" in line]
    for cell in ("f32[8@fsdp,6]", "48 B", "fsdp()"):
        assert cell in row
    # rich would read these brackets as markup.
    (row,) = [line for line in lines if "layers.1.weight" in line]
    assert r"by_path('[a-z]+\\.1')" in row
    totals = [line.split() for line in lines[lines.index("") :]]
    key = Model().key.dtype.itemsize
    assert ["parameters", "│", "88", "B", "│", "320", "B"] in totals
    assert ["other", "arrays", "│", f"{key + 18}", "B", "│", f"{key + 18}", "B"] in totals
    assert ["gradients", "│", "88", "B", "│", "320", "B"] in totals
    total = ["total", "without", "optimizer", "state", "│"]
    assert [*total, f"{194 + key}", "B", "│", f"{658 + key}", "B"] in totals


def test_what_is_made_to_be_printed_is_shown_as_it_prints():
    """Notebooks and Python show it as text, not as a dataclass."""
    explanation = eqxshard.explain(Model(), make_mesh(), RULE)
    assert repr(explanation) == str(explanation)
    for kind in (
        Plan,
        eqxshard.testing.Collectives,
        eqxshard.testing.MeshReport,
        type(eqxshard.lint(jax.jit(lambda x: x), 1.0)),
    ):
        assert kind.__repr__ is kind.__str__


def test_equal_layers_are_one_row():
    def make_model(key):
        deep = eqx.nn.MLP(8, 8, width_size=8, depth=11, key=key)
        return {"wide": eqx.nn.Linear(8, 16, key=key), "deep": deep}

    model = eqx.filter_eval_shape(make_model, jax.random.key(0))
    text = str(eqxshard.explain(model, make_mesh(), eqxshard.fsdp(min_size=16)))
    rows = [
        line.split() for line in text.splitlines() if line.startswith((" deep", " wide"))
    ]
    assert [row[:6] for row in rows if row[0].startswith("deep")] == [
        ["deep.layers.0-11.weight", "f32[8@fsdp,8]", "12", "x", "64", "B"],
        ["deep.layers.0-11.bias", "f32[8]", "12", "x", "32", "B"],
    ]
    assert [row[0] for row in rows][2:] == ["wide.weight", "wide.bias"]
    assert max(map(len, text.splitlines())) <= 80


def test_a_line_shows_how_updates_are_split_if_they_differ():
    rule = eqxshard.combine(
        eqxshard.by_path({r"0\.weight": P("tensor")}), eqxshard.zero1(min_size=8)
    )
    mesh = eqxshard.make_mesh(data=4, tensor=2)
    explanation = eqxshard.explain(Model(), mesh, rule, optim=optax.trace(0.9))
    weight, bias, last, _, table = explanation.leaves
    assert (weight.spec, weight.update_spec) == (P("tensor"), P(("tensor", "data")))
    assert weight.rule == r"by_path('0\\.weight')"
    assert weight.update_rule == r"by_path('0\\.weight') + zero1()"
    assert (bias.spec, bias.update_spec) == (P(), P("data"))
    assert (last.spec, last.update_spec) == (P(), P(None, "data"))
    assert (table.update_spec, table.update_rule) == (None, "")
    assert (weight.gradient, weight.optimizer) == (24, 24)
    assert explanation.parameters == (320, 96 + 32 + 96)
    assert explanation.gradients == explanation.optimizer_state == (320, 24 + 8 + 24)
    lines = str(explanation).splitlines()
    (at,) = [i for i, line in enumerate(lines) if "layers.0.weight" in line]
    assert "f32[8@tensor,6]" in lines[at]
    assert any("its update" in x and "f32[8@(tensor,data),6" in x for x in lines[at:][:3])
    # No line if all are split like their parameters.
    assert "update" not in str(eqxshard.explain(Model(), mesh, eqxshard.zero1()))
