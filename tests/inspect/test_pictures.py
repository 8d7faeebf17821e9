"""Pictures of the devices that hold each block of an array: as text, and as an SVG."""

from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqxshard

MESH = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)


def table(picture):
    """The device numbers of each block, row by row."""
    lines = [line for line in str(picture).splitlines() if line.startswith("│")]
    rows = [[cell.split(",") for cell in line.strip("│").split("│")] for line in lines]
    return [[{*map(int, cell)} for cell in row] for row in rows]


def texts(panel):
    return [x.text for x in panel if x.tag.endswith("text") and x.text]


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
    array = jax.device_put(np.zeros(shape, np.int8), jax.NamedSharding(MESH, spec))
    held = {}
    for shard in array.addressable_shards:
        starts = [part.indices(n)[0] for n, part in zip(shape, shard.index)]
        place = tuple(starts[dim] for dim in rows), 0 if column is None else starts[column]
        held.setdefault(place, set()).add(shard.device.id)
    tops = sorted({top for top, _ in held})
    lefts = sorted({left for _, left in held})
    expected = [[held[top, left] for left in lefts] for top in tops]
    for picture in (eqxshard.draw(array), eqxshard.draw(shape, MESH, spec)):
        assert table(picture) == expected


def test_the_sides_say_which_axes_split_which_dims():
    shape = jax.ShapeDtypeStruct(
        (8, 6, 4), np.float32, sharding=jax.NamedSharding(MESH, P("tensor", None, "fsdp"))
    )
    assert str(eqxshard.draw(shape)).splitlines()[:3] == [
        "8 x 6 x 4, P('tensor', None, 'fsdp') on 8 x cpu (data=2, fsdp=2, tensor=2)",
        "rows: dim 0 over tensor=2",
        "columns: dim 2 over fsdp=2",
    ]


def test_notebooks_show_an_image_with_the_colours_of_the_devices():
    picture = eqxshard.draw((8, 6), MESH, P("tensor", "fsdp"))
    panel = ElementTree.fromstring(picture._repr_html_())
    assert panel.attrib["aria-label"] == "8 x 6, P('tensor', 'fsdp')"
    assert texts(panel) == [
        "8 x 6, P('tensor', 'fsdp')",
        "dim 1 over fsdp=2",
        "dim 0 over tensor=2",
        *("0,4", "2,6", "1,5", "3,7"),
    ]
    filled = [x for x in panel if x.get("fill", "none") != "none"]
    assert len({x.get("fill") for x in filled}) == len(filled) == 8
    corners = [(float(x.get("x", 0)), float(x.get("y", 0))) for x in filled]
    first, beside, right, _, below, *_ = corners
    # Device 0 is beside 4, which holds the same; 2 holds what is right of it, 1 below.
    assert first[1] == beside[1] == right[1] < below[1]
    assert first[0] == below[0] < beside[0] < right[0]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(TypeError, match="this dict is not an array on a mesh; place it"):
        eqxshard.draw({"w": np.zeros(3)})
    with pytest.raises(TypeError, match=r"place it with eqxshard\.filter_shard"):
        eqxshard.draw(jax.numpy.zeros(3))
    with pytest.raises(TypeError, match="give draw a shape, a mesh and a PartitionSpec"):
        eqxshard.draw((8, 6), MESH)
    with pytest.raises(ValueError, match="splits dim 1 of size 3 over data=2"):
        eqxshard.draw((8, 3), MESH, P(None, "data"))
