"""Explanations as pictures."""

import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inspect_helpers import RULE, Model, explained, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import eqxshard


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


def check_readable(figure):
    """Labels are inside their blocks, and nothing else overlaps."""
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
    """Arrays of all ranks, on all devices."""
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


@pytest.mark.thorough
def test_a_picture_of_many_devices_is_readable():
    """It uses no figure of pyplot, and Matplotlib is imported only when needed."""
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
        import test_diagram
        test_diagram.pictures()
    """
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
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


def test_a_pattern_that_matches_no_path_is_an_error():
    explanation = eqxshard.explain(Model(), make_mesh(), RULE)
    with pytest.raises(
        ValueError, match=r"'wieght' matches the path of no array; .* layers"
    ):
        explanation.draw(["weight", "wieght"])
    with pytest.raises(ValueError, match=r"'w\(' is not a regular expression"):
        explanation.draw("w(")
    empty = eqxshard.explain({}, make_mesh(), RULE)
    assert panels(empty.draw()) == {}
    with pytest.raises(ValueError, match="there are none"):
        empty.draw("weight")
