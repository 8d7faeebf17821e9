import math

import pytest

from eqxshard.planning._meshes import mesh_shapes


def shapes(devices, axes, per_host=8):
    found = [*mesh_shapes(devices, axes, per_host)]
    assert {math.prod(each.values()) for each in found} == {devices}
    plain = [{axis: n for axis, n in each.items() if n > 1} for each in found]
    assert len({str(each) for each in plain}) == len(plain)
    return plain


def test_within_a_host_all_that_divide():
    assert shapes(4, ("data", "fsdp")) == [{"data": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 4}]
    assert shapes(6, ("fsdp", "tensor")) == [
        {"fsdp": 6},
        {"fsdp": 3, "tensor": 2},
        {"fsdp": 2, "tensor": 3},
        {"tensor": 6},
    ]
    assert len(shapes(8, ("data", "fsdp", "tensor"))) == 10
    assert shapes(1, ("data",)) == [{}]


def test_tensor_and_context_stay_within_a_host():
    found = shapes(64, ("data", "fsdp", "context", "tensor"))
    assert max(x.get("tensor", 1) * x.get("context", 1) for x in found) == 8
    found = shapes(64, ("data", "tensor"), per_host=4)
    assert max(each.get("tensor", 1) for each in found) == 4


def test_beyond_a_host_copies_are_on_whole_hosts_and_few():
    found = shapes(512, ("data", "fsdp"))
    assert [each.get("fsdp", 1) for each in found] == [1, 8, 32, 128, 512]
    assert len(shapes(512, ("data", "fsdp", "tensor"))) == 19
    # Six hosts, and twelve devices, which are not whole hosts.
    assert [each.get("fsdp", 1) for each in shapes(48, ("data", "fsdp"))] == [1, 8, 48]
    assert len(shapes(12, ("data", "fsdp"))) == 6


def test_what_cannot_be_searched_is_an_error():
    with pytest.raises(ValueError, match="did you mean 'tensor'"):
        shapes(8, ("data", "tensors"))
    with pytest.raises(ValueError, match="axes='stage' cannot be searched; use some of"):
        shapes(8, ("stage",))
    assert [*mesh_shapes(512, ("tensor",), 8)] == []
