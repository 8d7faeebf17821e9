import sys
from dataclasses import dataclass
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from eqxshard.sharding._mesh import AXES, check_batch_size, make_mesh


@pytest.mark.versions
def test_all_six_axes_exist_and_are_auto():
    mesh = make_mesh()
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == dict(stage=1, data=8, fsdp=1, context=1, expert=1, tensor=1)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_one_axis_takes_what_is_left():
    mesh = make_mesh(data=2, fsdp=-1, tensor=2)
    assert (mesh.shape["data"], mesh.shape["fsdp"], mesh.shape["tensor"]) == (2, 2, 2)
    # Then it is not `data`, which takes it by default.
    mesh = make_mesh(fsdp=-1)
    assert (mesh.shape["data"], mesh.shape["fsdp"]) == (1, 8)


@pytest.mark.versions
def test_tensor_neighbours_are_device_neighbours():
    mesh = make_mesh(data=4, tensor=2)
    ids = [[d.id for d in row] for row in mesh.devices.reshape(4, 2)]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(data=3), "data=3 does not fit the 8 devices"),
        (dict(data=2, fsdp=2), "data=2 x fsdp=2 = 4 does not fit the 8 devices"),
        (dict(fsdp=3), "fsdp=3 does not fit the 8 devices"),
        (dict(data=-1, fsdp=-1), "data and fsdp are both -1"),
        (dict(tensor=0), "axis tensor=0 must be at least 1; give a size, or -1"),
        (dict(tensor=-2), "axis tensor=-2 must be at least 1; give a size, or -1"),
        (dict(dcn={"pipeline": 2}), "'pipeline': 2. does not divide an axis"),
        (dict(dcn={"data": 3}), "does not divide an axis of the mesh, .*data=8"),
        (dict(dcn={"data": 2}), "asks for 2 hosts or slices of equal size, but"),
    ],
)
def test_bad_sizes_are_one_sentence(sizes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_mesh(**sizes)


def test_one_device_is_no_devices():
    with pytest.raises(ValueError, match="data=3 does not fit the 1 device; choose"):
        make_mesh(data=3, devices=jax.devices()[:1])


def test_a_misspelt_axis():
    with pytest.raises(TypeError, match="no mesh axis 'fsdb'; did you mean 'fsdp'"):
        make_mesh(fsdb=8)


def test_a_size_that_is_no_number(unannotated):
    with pytest.raises(ValueError, match="axis tensor='2' must be at least 1; give"):
        make_mesh(tensor="2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"dcn=.*'2'. does not divide an axis"):
        make_mesh(dcn={"data": "2"})  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Chip:
    """A stand-in for a device, with the attributes that a mesh needs."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "made up"
    client: Any = None


@pytest.mark.parametrize(
    "hosts, slices, across",
    [
        ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1], 2),  # of two hosts each
        ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1], 4),
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 1, 1, 1, 1], 2),
        ([0, 0, 0, 0, 1, 1, 1, 1], [None] * 8, 2),
        ([0, 0, 0, 0, 1, 1, 1, 1], [0] * 8, 2),
    ],
)
def test_dcn_counts_slices_or_hosts(monkeypatch, unannotated, hosts, slices, across):
    module = sys.modules["eqxshard.sharding._mesh"]
    monkeypatch.setattr(module, "spans_processes", lambda devices: False)
    monkeypatch.setattr(module, "Mesh", lambda grid, *_, **__: grid)
    chips = [Chip(i, *each) for i, each in enumerate(zip(hosts, slices))]
    grid: Any = make_mesh(data=across, fsdp=-1, dcn={"data": across}, devices=chips)
    rows = grid.reshape(across, -1)
    parts = slices if len(set(slices)) == across else hosts
    assert [{parts[chip.id] for chip in row} for row in rows] == [
        {i} for i in range(across)
    ]


def test_batch_size_errors_show_the_arithmetic():
    mesh = make_mesh(data=2, fsdp=4)
    check_batch_size(16, mesh)
    with pytest.raises(
        ValueError, match=r"20 does not divide over data=2 x fsdp=4 = 8 .* 16 or 24"
    ):
        check_batch_size(20, mesh)
    with pytest.raises(ValueError, match="such as 8"):
        check_batch_size(5, mesh)
    with pytest.raises(ValueError, match="batch size 0 is not positive; use a mul"):
        check_batch_size(0, mesh)
