"""Explanations as text and as dicts."""

import io
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from inspect_helpers import RULE, Model, explained, make_mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

import eqxshard


def rendered(explanation, width=140):
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(explanation)
    return text.getvalue()


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
    assert "fsdp(): replicated: no dim of (9,) divides by fsdp=4" in row
    assert "update spec" not in text
    totals = [line.split() for line in lines[lines.index("") :]]
    key = Model().key.dtype.itemsize
    assert ["parameters", "│", "88", "B", "│", "320", "B"] in totals
    assert ["other", "arrays", "│", f"{key + 18}", "B", "│", f"{key + 18}", "B"] in totals
    assert ["gradients", "│", "88", "B", "│", "320", "B"] in totals
    total = ["total", "without", "optimizer", "state", "│"]
    assert [*total, f"{194 + key}", "B", "│", f"{658 + key}", "B"] in totals


def test_axes_over_which_no_array_is_split_are_named():
    mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)
    assert "no array is split over tensor=2" in str(eqxshard.explain(Model(), mesh, RULE))
    assert "is split over" not in str(eqxshard.explain(Model(), make_mesh(), RULE))


def test_a_narrow_terminal_folds_and_loses_nothing():
    text = rendered(eqxshard.explain(Model(), make_mesh(), RULE), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "…" not in text


def test_a_column_shows_how_updates_are_split_if_they_differ():
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
    assert (table.update_spec, table.update_rule, table.note) == (None, "", "")
    assert explanation.parameters == (320, 96 + 32 + 96)
    assert explanation.gradients == explanation.optimizer_state == (320, 24 + 8 + 24)
    lines = str(explanation).splitlines()
    (head,) = [line for line in lines if "update spec" in line]
    assert head.index("┃ spec") < head.index("update spec") < head.index("bytes/device")
    (row,) = [line for line in lines if "layers.0.weight" in line]
    assert "P('tensor')" in row and "P(('tensor', 'data'))" in row
    assert r"by_path('0\\.weight') + zero1()" in row
    (row,) = [line for line in lines if " key " in line]
    assert row.count("P()") == 1
    # No column if all are split like their parameters.
    small = eqxshard.explain(Model(), mesh, eqxshard.zero1())
    assert "update spec" not in str(small)
    assert small.leaves[0].note == "size 48, below min_size=262,144"


def test_paths_are_broken_at_their_dots():
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32)
    tree = {"blocks": {"attention": {"output_projection": leaf}}}
    text = rendered(eqxshard.explain(tree, make_mesh(), eqxshard.fsdp()), width=90)
    words = re.findall(r"│ ([\w.]+) +│ [8 ]", text)
    assert words == ["blocks.attention.", "output_projection"]


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
    assert re.search(rf"other arrays +│ +{re.escape(text)} +│ +{re.escape(text)}", printed)


def test_as_a_dict():
    mesh = make_mesh()
    rule = eqxshard.combine(RULE, eqxshard.zero1(min_size=48))
    explanation = eqxshard.explain(Model(), mesh, rule, optim=optax.trace(0.9))
    plain = explanation.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["mesh"]["axes"] == dict(mesh.shape)
    assert (plain["mesh"]["devices"], plain["mesh"]["platform"]) == (8, "cpu")
    weight, _, last, key, _ = plain["leaves"]
    assert weight == {
        "path": "layers.0.weight",
        "shape": [8, 6],
        "dtype": "float32",
        "spec": ["fsdp"],
        "bytes_whole": 192,
        "bytes_per_device": 48,
        "rule": "fsdp()",
        "note": "",
        "update_spec": ["fsdp", "data"],
        "update_rule": "fsdp() + zero1()",
    }
    assert last["spec"] == [None, "fsdp"]
    assert (key["shape"], key["spec"], key["update_spec"]) == ([], [], None)
    totals = plain["totals"]
    assert totals["parameters"] == {"bytes_whole": 320, "bytes_per_device": 88}
    assert totals["gradients"] == {"bytes_whole": 320, "bytes_per_device": 64}
    assert totals["optimizer_state"] == totals["gradients"]
    for size in ("bytes_whole", "bytes_per_device"):
        kinds = ("parameters", "other", "gradients", "optimizer_state")
        assert totals["total"][size] == sum(totals[kind][size] for kind in kinds)
    (both,) = explained((8,), P(("fsdp", "data")), mesh).to_dict()["leaves"]
    assert both["spec"] == [["fsdp", "data"]]
    without = eqxshard.explain(Model(), mesh, rule).to_dict()
    assert without["totals"]["optimizer_state"] is None
