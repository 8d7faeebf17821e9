"""Meshes and arrays as SVG."""

from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from inspect_helpers import RULE, explained, make_mesh
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.inspect._pictures import _COLOURS, lay_out

MESH = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)


def array(shape, *spec, mesh=MESH):
    sharding = jax.NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


def panels(picture):
    """The panels of a picture, as XML."""
    return [x for x in ElementTree.fromstring(picture._repr_html_()) if "svg" in x.tag]


def texts(panel):
    return [x.text or "" for x in panel if x.tag.endswith("text")]


def bands(panel):
    """What is filled: by device or group, the (left, top) of each of its rectangles."""
    found = {}
    for rect in panel:
        fill = rect.attrib.get("fill", "none")
        if rect.tag.endswith("rect") and fill != "none":
            corner = float(rect.attrib["x"]), float(rect.attrib["y"])
            found.setdefault(_COLOURS.index(fill), []).append(corner)
    return found


def groups(picture):
    """The devices of a mesh by their colour."""
    found = {}
    (shapes,) = [x for x in panels(picture)[0] if x.tag.endswith("g")]
    numbers = [str(x.text) for x in shapes if x.get("class") == "number"]
    fills = [x.attrib["fill"] for x in shapes if x.tag.endswith("rect")]
    for fill, number in zip(fills, numbers, strict=True):
        found.setdefault(fill, []).append(int(number))
    return sorted(map(sorted, found.values()))


def test_a_mesh_has_all_devices_and_axes():
    picture = eqxshard.draw(MESH)
    (panel,) = panels(picture)
    assert texts(panel) == ["8 x cpu (data=2, fsdp=2, tensor=2)"]
    assert panel.attrib["aria-label"] == texts(panel)[0]
    assert groups(picture) == [[n] for n in range(8)]
    labels = [x.text for x in panel.iter() if x.get("transform") and x.text]
    assert labels == ["tensor = 2 →", "data = 2 →", "← fsdp = 2"]


@pytest.mark.parametrize(
    "along, wanted",
    [
        (["tensor"], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (["data", "tensor"], [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (["data", "fsdp", "tensor"], [[*range(8)]]),
    ],
)
def test_devices_that_communicate_have_one_colour(along, wanted):
    assert groups(eqxshard.draw(MESH, along=along)) == wanted


def test_a_block_has_the_colours_of_the_devices_that_hold_it():
    (panel,) = panels(eqxshard.draw(array((8, 6), "tensor", "fsdp")))
    assert texts(panel)[:2] == ["8 x 6, P('tensor', 'fsdp')", "dim 1 over fsdp=2"]
    assert texts(panel)[2] == "dim 0 over tensor=2"
    corners = {place: at for place, [at] in bands(panel).items()}
    # Device 0 is beside 4, which holds the same; 2 holds what is right of it, 1 below.
    assert corners[0][1] == corners[4][1] == corners[2][1] < corners[1][1]
    assert corners[0][0] == corners[1][0] < corners[4][0] < corners[2][0]
    assert sorted(texts(panel)[3:]) == [*"01234567"]


@pytest.mark.parametrize(
    "shape, spec, rows, column",
    [
        ((), P(), [], None),
        ((16,), P(("tensor", "fsdp", "data")), [], 0),
        ((8, 12), P(), [0], 1),
        ((8, 16), P(None, ("tensor", "data", "fsdp")), [0], 1),
        ((2, 8, 3, 4), P(None, "data", None, "tensor"), [1], 3),
        ((4, 6, 8), P("data", "fsdp", "tensor"), [0, 1], 2),
    ],
)
def test_blocks_are_where_the_shards_of_real_arrays_are(shape, spec, rows, column):
    sharding = jax.NamedSharding(MESH, spec)
    held = {}
    for shard in jax.device_put(np.zeros(shape, np.int8), sharding).addressable_shards:
        parts = [range(n)[part] for n, part in zip(shape, shard.index)]
        top, height = 0, 1
        for dim in rows:
            part = parts[dim]
            count = shape[dim] // len(part)
            top, height = top * count + part.start // len(part), height * len(part)
        across = range(1) if column is None else parts[column]
        block = (across.start, top * height, len(across), height)
        held.setdefault(block, set()).add(shard.device.id)
    layout = lay_out(shape, sharding)
    assert [*layout.rows, *layout.columns] == [*rows, *([] if column is None else [column])]
    assert {tuple(block[:4]): {*block.devices} for block in layout.blocks} == held


def test_pictures_are_saved_for_pages_and_as_images(tmp_path):
    picture = eqxshard.draw({"<b>": array((2,), "data"), "w": array((2,)), "x": array(())})
    picture.save(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == picture._repr_html_()
    picture.save(str(tmp_path / "x.svg"))
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    inner = [x for x in root if x.tag.endswith("svg")]
    assert [texts(x)[0] for x in inner] == ["<b>", "w", "x"]
    for side, start in (("width", "x"), ("height", "y")):
        ends = [float(x.attrib[start]) + float(x.attrib[side]) for x in inner]
        assert max(ends) <= float(root.attrib[side])


def test_an_explanation_draws_the_blocks_of_arrays_and_of_their_updates():
    mesh = eqxshard.make_mesh(data=4, tensor=2)
    rule = eqxshard.combine(
        eqxshard.by_path({"w": P(None, "tensor")}), eqxshard.zero1(min_size=16)
    )
    tree = {"w": jax.ShapeDtypeStruct((3, 8, 4), np.float32)}
    storage, update = panels(eqxshard.explain(tree, mesh, rule).draw())
    assert texts(storage)[:2] == ["w", "3 x 8 x 4, P(None, 'tensor')"]
    assert texts(update)[:2] == ["w (update)", "3 x 8 x 4, P(None, 'tensor', 'data')"]


def test_which_arrays_of_an_explanation_are_drawn():
    tree = {f"w{i:02}": jax.ShapeDtypeStruct((8, i), np.float32) for i in range(14)}
    tree["last"] = jax.ShapeDtypeStruct((8, 99), np.float32)
    explanation = eqxshard.explain(tree, make_mesh(), eqxshard.fsdp(min_size=1))

    def names(picture):
        return [texts(panel)[0] for panel in panels(picture)]

    # In their own order, and the smallest left out.
    default = explanation.draw()
    assert names(default) == ["last", *(f"w{i:02}" for i in range(3, 14))]
    assert "3 more arrays are not drawn" in default._repr_html_()
    assert names(explanation.draw("last|w.0|w11$")) == ["last", "w00", "w10", "w11"]
    assert len(names(explanation.draw("w|last"))) == 15


@pytest.mark.parametrize(
    "word, draw",
    [
        ("no array", lambda e: e.draw("wieght")),
        ("no arrays", lambda e: eqxshard.explain({}, MESH, RULE).draw()),
        ("no arrays", lambda e: eqxshard.draw({})),
        ("'fdsp'", lambda e: eqxshard.draw(MESH, along=["fdsp"])),
        ("for meshes", lambda e: eqxshard.draw(array((2,)), along=["fsdp"])),
        (r"'x\.png'", lambda e: e.draw().save("x.png")),
    ],
)
def test_what_cannot_be_drawn_is_refused(word, draw):
    explanation = explained((8,), P(), MESH)
    with pytest.raises(ValueError, match=word):
        draw(explanation)
    with pytest.raises(TypeError, match=r"w \(3,\) is not on a mesh"):
        eqxshard.draw({"w": jax.numpy.zeros(3)})
