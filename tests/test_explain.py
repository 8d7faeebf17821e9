import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
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
    assert notes["table"] == "whole: no dim of (9,) divides by fsdp=4"
    assert notes["layers.0.weight"] == ""


def test_a_leaf_that_no_rule_claims():
    (leaf,) = eqxshard.explain({"w": np.zeros(8)}, make_mesh(), user_rule).leaves
    assert (leaf.rule, leaf.spec) == ("no rule", P())
    assert leaf.note == "claimed by no rule: replicated"


def test_rules_that_name_nothing_are_errors():
    rule = eqxshard.first_match(eqxshard.by_path({"layer.0": P()}), eqxshard.fsdp())
    with pytest.raises(ValueError, match=r"'layer.0' matches no leaf; did you mean 'lay"):
        eqxshard.explain(Model(), make_mesh(), rule)
    with pytest.raises(ValueError, match="by_dim: no leaf has a dim 'mlp'"):
        eqxshard.explain(Model(), make_mesh(), eqxshard.by_dim({"mlp": "tensor"}))


def test_types_are_those_that_jax_will_have():
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
    assert notes["table"] == "whole: no dim of (9,) divides by fsdp=4"
    assert {leaf.update_spec for leaf in explanation.leaves} == {None}


def test_a_model_with_state():
    model, state = eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(8, "b", mode="ema"))()
    rule = eqxshard.by_path({"^weight": P("fsdp"), "^bias": P("fsdp")})
    explanation = eqxshard.explain((model, state), make_mesh(), rule)
    specs = {leaf.path: (leaf.spec, leaf.rule, leaf.note) for leaf in explanation.leaves}
    assert specs.pop("weight")[0] == specs.pop("bias")[0] == P("fsdp")
    whole = (P(), "model state", "whole, whatever the rule")
    assert len(specs) == 3
    assert set(specs.values()) == {whole}
    assert all(path.startswith("model_state.") for path in specs)
    assert explanation.parameters == (64, 16)
    assert explanation.other == (in_all(state), in_all(state))


def test_a_whole_state_is_refused(unannotated):
    state = eqxshard.TrainState(jnp.int32(0), Model(), (), jax.random.key(0))
    with pytest.raises(TypeError, match=r"explain takes a model; give it state\.model"):
        eqxshard.explain(state, make_mesh(), RULE)


# As text


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
    assert "update spec" not in text
    totals = [line.split() for line in lines[lines.index("") :]]
    key = Model().key.dtype.itemsize
    assert ["parameters", "│", "88", "B", "│", "320", "B"] in totals
    assert ["other", "arrays", "│", f"{key + 18}", "B", "│", f"{key + 18}", "B"] in totals
    assert ["gradients", "│", "88", "B", "│", "320", "B"] in totals
    total = ["total", "without", "optimizer", "state", "│"]
    assert [*total, f"{194 + key}", "B", "│", f"{658 + key}", "B"] in totals


def test_a_narrow_terminal_folds_and_loses_nothing():
    text = rendered(eqxshard.explain(Model(), make_mesh(), RULE), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "…" not in text


def test_where_updates_lie_is_shown_if_it_is_elsewhere():
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
    # Where all lie with their parameters there is nothing to show.
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


# As a dict


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


# As a picture


def numbers(label):
    """The devices that a label names, each once."""
    found = []
    for word in label.replace("\n", "").split(","):
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert len(found) == len({*found})
    return {*found}


def drawn(axes):
    """What a panel shows: by (left, top, width, height), the devices."""
    blocks = {}
    for block, text in zip(axes.patches, axes.texts):
        assert block.contains_point(axes.transData.transform(text.get_position()))
        assert block.get_bbox().bounds not in blocks
        blocks[block.get_bbox().bounds] = numbers(text.get_text())
    return blocks


def panels(figure):
    """By title, without line breaks."""
    return {
        axes.get_title(loc="left").replace("\n", " "): axes
        for axes in figure.axes
        if axes.patches
    }


def explained(shape, spec, mesh):
    tree = {"w": jax.ShapeDtypeStruct(shape, jnp.int8)}
    return eqxshard.explain(tree, mesh, lambda *_: spec)


@pytest.mark.parametrize(
    "shape, spec, row, column",
    [
        ((), P(), None, None),
        ((16,), P(), None, 0),
        ((16,), P("tensor"), None, 0),
        ((16,), P(("tensor", "fsdp", "data")), None, 0),
        ((8, 12), P(), 0, 1),
        ((8, 12), P("stage", "data"), 0, 1),
        ((8, 12), P("fsdp", "tensor"), 0, 1),
        ((8, 12), P("tensor", "fsdp"), 0, 1),
        ((8, 12), P(("fsdp", "tensor")), 0, 1),
        ((8, 16), P(None, ("tensor", "data", "fsdp")), 0, 1),
        ((8, 12), P("data", ("tensor", "fsdp")), 0, 1),
        ((3, 8, 4), P(None, "tensor", "fsdp"), 1, 2),
        ((8, 3, 4), P("data"), 0, 2),
        ((2, 8, 3, 4), P(None, "data", None, "tensor"), 1, 3),
    ],
)
def test_blocks_are_labelled_with_the_devices_that_hold_them(shape, spec, row, column):
    mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)
    (axes,) = panels(explained(shape, spec, mesh).draw()).values()
    array = jax.device_put(np.zeros(shape, np.int8), NamedSharding(mesh, spec))
    held = {}
    for shard in array.addressable_shards:
        parts = [range(n)[part] for n, part in zip(shape, shard.index)]
        left = range(1) if column is None else parts[column]
        top = range(1) if row is None else parts[row]
        block = (left.start, top.start, len(left), len(top))
        held.setdefault(block, set()).add(shard.device.id)
    assert drawn(axes) == held
    assert axes.get_xlim() == (0, 1 if column is None else shape[column])
    assert axes.get_ylim() == (1 if row is None else shape[row], 0)


def test_more_than_two_split_dims_are_drawn_one_in_the_other():
    mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)
    shape, spec = (4, 6, 8), P("data", "fsdp", "tensor")
    (axes,) = panels(explained(shape, spec, mesh).draw()).values()
    array = jax.device_put(np.zeros(shape, np.int8), NamedSharding(mesh, spec))
    held = {}
    for shard in array.addressable_shards:
        i, j, k = (part.start // size for part, size in zip(shard.index, (2, 3, 4)))
        held[4.0 * k, 6.0 * (2 * i + j), 4.0, 6.0] = {shard.device.id}
    assert drawn(axes) == held
    assert axes.get_ylabel().replace("\n", " ") == "dim 0 over data=2, dim 1 over fsdp=2"
    assert axes.get_xlabel() == "dim 2 over tensor=2"


def test_an_array_without_elements_is_drawn_too():
    (axes,) = panels(explained((0, 4), P(None, "fsdp"), make_mesh()).draw()).values()
    assert [*drawn(axes).values()] == [{n, n + 4} for n in range(4)]


def test_labels_are_short():
    mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)

    def labels(spec):
        (axes,) = panels(explained((8, 8), spec, mesh).draw()).values()
        return [text.get_text() for text, _ in zip(axes.texts, axes.patches)]

    assert labels(P()) == ["0-7"]
    assert labels(P("data")) == ["0-3", "4-7"]
    assert labels(P("tensor")) == ["0,2,4,6", "1,3,5,7"]
    assert labels(P("fsdp")) == ["0,1,4,5", "2,3,6,7"]


def test_titles_say_what_is_drawn():
    mesh = eqxshard.make_mesh(data=4, tensor=2)
    rule = eqxshard.combine(
        eqxshard.by_path({"w": P(None, "tensor")}), eqxshard.zero1(min_size=16)
    )
    tree = {"w": jax.ShapeDtypeStruct((3, 8, 4), jnp.float32)}
    figure = eqxshard.explain(tree, mesh, rule).draw()
    storage, update = panels(figure).values()
    assert [*panels(figure)] == ["w", "w (update)"]
    assert storage.texts[-1].get_text() == "3 x 8 x 4, P(None, 'tensor')\ndim 0 is whole"
    assert update.texts[-1].get_text().startswith("3 x 8 x 4, P(None, 'tensor', 'data')")
    assert [*drawn(storage).values()] == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert {*map(tuple, drawn(update).values())} == {(n,) for n in range(8)}
    assert "8 x cpu (data=4, tensor=2)" in figure.get_suptitle()
    assert figure.get_supxlabel() == ""


def test_which_arrays_are_drawn():
    tree = {f"w{i:02}": jax.ShapeDtypeStruct((8, i), jnp.float32) for i in range(14)}
    tree["last"] = jax.ShapeDtypeStruct((8, 99), jnp.float32)
    explanation = eqxshard.explain(tree, make_mesh(), eqxshard.fsdp(min_size=1))
    # In their own order, and the smallest left out.
    default = explanation.draw()
    assert [*panels(default)] == ["last", *(f"w{i:02}" for i in range(3, 14))]
    assert default.get_supxlabel() == "3 more arrays are not drawn"
    assert [*panels(explanation.draw("w0[12]"))] == ["w01", "w02"]
    some = explanation.draw(["last", "w.0", "w11$"])
    assert [*panels(some)] == ["last", "w00", "w10", "w11"]
    assert some.get_supxlabel() == "11 more arrays are not drawn"
    everything = explanation.draw("")
    assert (len(panels(everything)), everything.get_supxlabel()) == (15, "")


def test_a_pattern_that_is_in_no_path():
    explanation = eqxshard.explain(Model(), make_mesh(), RULE)
    with pytest.raises(ValueError, match=r"'wieght' is in no path.* are layers\.0\.weight"):
        explanation.draw(["weight", "wieght"])
    with pytest.raises(ValueError, match=r"'w\(' is not a regular expression"):
        explanation.draw("w(")
    empty = eqxshard.explain({}, make_mesh(), RULE)
    assert panels(empty.draw()) == {}
    with pytest.raises(ValueError, match="there are none"):
        empty.draw("weight")


def check_readable(figure):
    """Labels are inside their blocks; nothing else is written over anything."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    apart = [text for text in figure.texts if text.get_text()]
    apart += panels(figure).values()
    boxes = [item.get_tightbbox(renderer) for item in apart]
    for axes in panels(figure).values():
        *labels, subtitle = axes.texts
        for label, block in zip(labels, axes.patches, strict=True):
            inner, outer = label.get_window_extent(), block.get_window_extent()
            assert outer.x0 <= inner.x0 < inner.x1 <= outer.x1, label
            assert outer.y0 <= inner.y0 < inner.y1 <= outer.y1, label
            assert label.get_fontsize() >= 5
        (title,) = (
            child.get_window_extent()
            for child in axes.get_children()
            if isinstance(child, Text) and child.get_text() == axes.get_title(loc="left")
        )
        subtitle = subtitle.get_window_extent()
        assert title.y0 >= subtitle.y1 >= subtitle.y0 >= axes.bbox.y1
    for box, other in itertools.combinations(boxes, 2):
        assert not box.overlaps(other)
    page = figure.bbox
    for box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1
        assert page.y0 <= box.y0 and box.y1 <= page.y1


def pictures():
    """Of arrays of all ranks, on all devices that there are."""
    count = jax.device_count() // 4
    mesh = eqxshard.make_mesh(data=2, fsdp=count, tensor=2)
    names = ("blocks", "self_attention", "output_projection", "weight_of_the_layer")
    specs = {
        "0": P(),
        "1": P(("data", "tensor")),
        "2": P(("tensor", "data"), "fsdp"),
        "3": P(None, "fsdp"),
        "4": P("data", None, "fsdp", "tensor"),
        "2.5": P(("data", "fsdp", "tensor")),
        "1.5": P(("data", "fsdp", "tensor")),
    }
    tree = {
        number: {".".join(names): jax.ShapeDtypeStruct((512,) * int(number[0]), jnp.int8)}
        for number in specs
    }
    rule = eqxshard.by_path({f"^{re.escape(n)}.blocks": spec for n, spec in specs.items()})
    explanation = eqxshard.explain(tree, mesh, rule)
    check_readable(explanation.draw())
    return explanation


def test_a_picture_is_readable():
    explanation = pictures()
    figure = explanation.draw()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_a_picture_of_many_devices_is_readable():
    """And it is on no figure of pyplot's; nor is Matplotlib there before it."""
    code = """if True:
        import sys
        import jax
        jax.config.update("jax_num_cpu_devices", 128)
        import eqxshard
        shape = jax.ShapeDtypeStruct((2,), "float32")
        mesh = eqxshard.make_mesh(tensor=2)
        tensor = eqxshard.explain(shape, mesh, lambda *_: jax.P("tensor"))
        assert "matplotlib" not in sys.modules
        labels = [text.get_text() for text in tensor.draw().axes[0].texts]
        assert labels[0].replace("\\n", " ") == "0,2,4,...,126 (64 devices)", labels
        assert "matplotlib.pyplot" not in sys.modules
        import test_explain
        test_explain.pictures()
    """
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = r"draw needs Matplotlib; install it with `pip install 'eqxshard\[recipes\]'`"
    with pytest.raises(ImportError, match=message):
        explained((8,), P(), make_mesh()).draw()


# All three


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
