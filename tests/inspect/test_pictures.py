"""Meshes and arrays as SVG."""

import re
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from inspect_helpers import Model
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.inspect._pictures import _COLOURS, _block

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


def test_a_mesh_is_a_grid_of_its_last_two_axes():
    (panel,) = panels(eqxshard.draw(eqxshard.make_mesh(data=2, fsdp=4)))
    assert texts(panel)[0] == "8 x cpu (data=2, fsdp=4)"
    assert texts(panel)[1:] == ["fsdp →", "data →", *"01234567"]
    rows = {place: {corner[1] for corner in at} for place, at in bands(panel).items()}
    assert rows[0] == rows[3] != rows[4] == rows[7]
    assert panel.attrib["aria-label"] == "8 x cpu (data=2, fsdp=4)"


def test_a_mesh_of_three_axes_has_a_grid_for_each_index_of_the_first():
    first, second = panels(eqxshard.draw(MESH))
    assert texts(first) == ["data=0", "tensor →", "fsdp →", *"0123"]
    assert texts(second) == ["data=1", "tensor →", "fsdp →", *"4567"]


@pytest.mark.parametrize(
    "along, groups",
    [
        (["tensor"], [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (["fsdp"], [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
        (["data", "tensor"], [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (["data", "fsdp", "tensor"], [{*range(8)}]),
    ],
)
def test_devices_that_communicate_have_one_colour(along, groups):
    found = {}
    for panel in panels(eqxshard.draw(MESH, along=along)):
        fills = [x.attrib["fill"] for x in panel if x.get("fill") in _COLOURS]
        for fill, number in zip(fills, texts(panel)[3:], strict=True):
            found.setdefault(fill, set()).add(int(number))
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, groups))


def test_a_block_has_the_colours_of_the_devices_that_hold_it():
    (panel,) = panels(eqxshard.draw(array((8, 6), "tensor", "fsdp")))
    assert texts(panel)[:2] == ["8 x 6, P('tensor', 'fsdp')", "dim 1 over fsdp=2"]
    assert texts(panel)[2] == "dim 0 over tensor=2"
    corners = {place: at for place, [at] in bands(panel).items()}
    # Device 0 is beside 4, which holds the same; 2 holds what is right of it, 1 below.
    assert corners[0][1] == corners[4][1] == corners[2][1] < corners[1][1]
    assert corners[0][0] == corners[1][0] < corners[4][0] < corners[2][0]
    assert sorted(texts(panel)[3:]) == [*"01234567"]


def test_many_devices_share_a_block_without_bands():
    rect, frame, label = _block((0, 0, 99, 20), range(9), range(9))
    assert f'fill="{_COLOURS[-1]}"' in rect and 'fill="none"' in frame and ">0-8<" in label


def test_the_largest_arrays_are_drawn():
    tree = [array((2, 2 * i + 2), "data") for i in range(14)]
    picture = eqxshard.draw(tree)
    assert [texts(panel)[0] for panel in panels(picture)] == [*map(str, range(2, 14))]
    assert "2 more arrays are not drawn" in picture._repr_html_()


def test_real_arrays_are_drawn_as_they_are():
    x = jax.device_put(np.zeros((8, 4)), eqxshard.batch_sharding(MESH))
    (panel,) = panels(eqxshard.draw({"x": x}))
    assert texts(panel)[:3] == ["x", "8 x 4, P(('data', 'fsdp'))", "dim 1"]


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
    with pytest.raises(ValueError, match=r"as 'x\.png'; give a name that ends with \.svg"):
        picture.save("x.png")


def test_colours_can_be_read_under_black_labels():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    assert len({*_COLOURS}) == len(_COLOURS)
    assert min(map(luminance, _COLOURS)) + 0.05 > 7 * (luminance("#111111") + 0.05)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(TypeError, match=r"w \(3,\) is not on a mesh; place it with"):
        eqxshard.draw({"w": jax.numpy.zeros(3)})
    with pytest.raises(ValueError, match="there are no arrays"):
        eqxshard.draw({})
    with pytest.raises(ValueError, match="along names the axis 'fdsp', which the mesh"):
        eqxshard.draw(MESH, along=["fdsp"])
    with pytest.raises(ValueError, match="along is for meshes"):
        eqxshard.draw(array((2,)), along=["fsdp"])


def test_a_notebook_shows_an_explanation_with_its_pictures():
    text = eqxshard.explain(Model(), MESH, eqxshard.replicate())._repr_html_()
    assert text.startswith("<pre") and "bytes/device" in text
    paths = re.findall(r'aria-label="([\w.]+) ', text)
    assert paths[:2] == ["layers.0.weight", "layers.0.bias"]
