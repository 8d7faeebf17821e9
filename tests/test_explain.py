import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

import eqxshard


class Model(eqx.Module):
    layers: list[eqx.nn.Linear]
    key: jax.Array
    table: np.ndarray
    activation: object = jax.nn.relu

    def __init__(self):
        self.layers = [
            eqx.nn.Linear(6, 8, key=jax.random.key(0)),
            eqx.nn.Linear(8, 3, use_bias=False, key=jax.random.key(1)),
        ]
        self.key = jax.random.key(2)
        self.table = np.arange(9, dtype=np.int16)


def user_rule(path, leaf, mesh):
    return P("data") if path == "layers.0.bias" else None


RULE = eqxshard.first_match(
    eqxshard.by_path({r"[a-z]+\.1": P(None, "fsdp")}), user_rule, eqxshard.fsdp(min_size=2)
)


def make_mesh():
    return eqxshard.make_mesh(data=2, fsdp=4)


def rendered(explanation, width=140):
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(explanation)
    return text.getvalue()


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
    assert notes["key"] == "1 elements, below min_size=2"
    assert notes["table"] == "whole: no dim of (9,) divides by fsdp=4"
    assert notes["layers.0.weight"] == ""


def test_a_leaf_that_no_rule_claims():
    (leaf,) = eqxshard.explain({"w": np.zeros(8)}, make_mesh(), user_rule).leaves
    assert (leaf.rule, leaf.spec) == ("no rule", P())
    assert leaf.note == "claimed by no rule: replicated"


def test_totals():
    explanation = eqxshard.explain(Model(), make_mesh(), RULE)
    key = Model().key.dtype.itemsize
    assert explanation.bytes_whole == 192 + 32 + 96 + key + 18
    assert explanation.bytes_per_device == 48 + 16 + 24 + key + 18
    empty = eqxshard.explain({"name": "x"}, make_mesh(), RULE)
    assert (empty.leaves, empty.bytes_whole, empty.bytes_per_device) == ((), 0, 0)


@pytest.mark.parametrize("show", [str, rendered])
def test_it_prints_as_a_table(show):
    lines = show(eqxshard.explain(Model(), make_mesh(), RULE)).splitlines()
    text = "\n".join(lines)
    assert "on 8 x cpu (data=2, fsdp=4)" in text
    for column in ("path", "shape", "dtype", "spec", "bytes/device", "rule"):
        assert column in text
    (row,) = [line for line in lines if "layers.0.weight" in line]
    for cell in ("8 x 6", "float32", "P('fsdp')", "48 B", "fsdp()"):
        assert cell in row
    # rich would read these brackets as markup.
    (row,) = [line for line in lines if "layers.1.weight" in line]
    assert "P(None, 'fsdp')" in row
    assert r"by_path('[a-z]+\\.1')" in row
    (row,) = [line for line in lines if " key " in line]
    assert "scalar" in row
    (row,) = [line for line in lines if " table " in line]
    assert "fsdp(): whole: no dim of (9,) divides by fsdp=4" in row
    assert "114 B on each device, of 346 B" in text


def test_a_narrow_terminal_folds_and_loses_nothing():
    text = rendered(eqxshard.explain(Model(), make_mesh(), RULE), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "…" not in text


@pytest.mark.parametrize(
    "count, text",
    [
        (999, "999 B"),
        (1_000, "1 kB"),
        (1_540, "1.54 kB"),
        (123_456, "123 kB"),
        (70_000_000, "70 MB"),
        (2 * 10**9, "2 GB"),
        (3 * 10**12, "3 TB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_sizes_are_for_people(count, text):
    tree = jax.ShapeDtypeStruct((count,), jnp.int8)
    printed = str(eqxshard.explain(tree, make_mesh(), eqxshard.replicate()))
    assert f"{text} on each device, of {text}" in printed


def test_nothing_is_placed():
    # A petabyte, in shapes and types alone.
    tree = {"w": jax.ShapeDtypeStruct((2**24, 2**24), jnp.float32), "f": jax.nn.relu}
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
