import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.compiled._replica_groups import axes_of_groups, parse_groups
from eqxshard.testing import collectives

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}

GROUPS = {
    "{{0,1},{2,3},{4,5},{6,7}}": ("tensor",),
    "{{0,1,2,3,4,5,6,7}}": ("data", "fsdp", "tensor"),
    "{}": ("data", "fsdp", "tensor"),
    "[4,2]<=[8]": ("tensor",),
    "[4,2]<=[4,2]T(1,0)": ("fsdp",),
    "[4,2]<=[2,4]T(1,0)": ("data",),
    "[2,4]<=[2,2,2]T(1,0,2)": ("data", "tensor"),
    "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}": ("tensor",),
    "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": ("data",),
    "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}": ("data",),
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}": ("data", "tensor"),
    # Parts of an axis.
    "mesh['axis_0'=8] {'axis_0':(2)2}": ("fsdp",),
    "mesh['axis_0'=8] {'axis_0':(1)4}": ("data", "fsdp"),
    # The pairs of a permute.
    "{{0,4},{4,0}}": ("data",),
}


@pytest.mark.parametrize("text", GROUPS)
def test_every_form_gives_the_axes_of_the_mesh(text):
    groups = parse_groups(text, 8)
    assert groups is not None
    assert axes_of_groups(groups, SIZES) == GROUPS[text]


def test_each_device_is_in_one_group():
    for text in GROUPS.keys() - {"{{0,4},{4,0}}"}:
        groups = parse_groups(text, 8)
        assert groups is not None
        assert sorted(groups.ravel()) == list(range(8))


def test_other_texts_and_other_meshes_give_nothing():
    for text in ("mesh[", "[2", "{{0,1},{2}}", "what"):
        assert parse_groups(text, 8) is None
    assert axes_of_groups(np.array([[0, 9]]), SIZES) is None


@pytest.mark.parametrize("axes", [("data",), ("fsdp",), ("tensor",), ("data", "tensor")])
def test_what_jax_compiles_for_an_axis_is_found_to_be_along_it(axes):
    mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)
    split = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(axes)))
    whole = jax.jit(jnp.sin, out_shardings=NamedSharding(mesh, P()))
    (op,) = collectives(whole, split).ops
    assert (op.kind, op.axes) == ("all-gather", axes)
    total = jax.jit(lambda x: jnp.sum(x, 0), out_shardings=NamedSharding(mesh, P()))
    (op,) = collectives(total, split).ops
    assert (op.kind, op.axes) == ("all-reduce", axes)
