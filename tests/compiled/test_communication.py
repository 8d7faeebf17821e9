import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.compiled._communication import (
    axes_of_groups,
    find_collectives,
    parse_groups,
)
from eqxshard.compiled._hlo import parse_module
from eqxshard.testing import collectives

HEAD = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
#: The bytes that each device of a group of four sends.
SENT = {
    "all-gather": ("f32[64]", 64 * 3),
    "reduce-scatter": ("f32[64]", 256 * 3),
    "all-reduce": ("f32[64]", 2 * 64 * 3),
    "all-to-all": ("f32[64]", 64 * 3),
    "collective-permute": ("f32[64]", 256),
}


@pytest.mark.parametrize("kind", SENT)
def test_what_a_device_sends(kind):
    shape, sent = SENT[kind]
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    groups = pairs if "permute" in kind else "replica_groups=[2,4]<=[8]"
    line = (
        f"  ROOT %y = {shape}{{0}} {kind}(%x), channel_id=1, {groups}, dimensions={{0}}\n"
    )
    (op,) = find_collectives(parse_module(HEAD + line + "}\n"), 8)
    assert (op.kind, op.bytes, op.sent) == (kind, 256, sent)


def test_an_asynchronous_pair_has_the_groups_of_its_start():
    lines = (
        "  %s = (f32[8], f32[32]) all-gather-start(%x), replica_groups={{0,1},{2,3}}, a=1\n"
        "  ROOT %d = f32[32] all-gather-done(%s)\n}\n"
    )
    (op,) = find_collectives(parse_module(HEAD + lines), 4)
    assert op.groups is not None and op.groups.tolist() == [[0, 1], [2, 3]]
    assert (op.start.name, op.result.name, op.bytes) == ("s", "d", 128)


def test_an_all_reduce_in_a_fusion_of_tpus_is_a_reduce_scatter():
    text = """
%all-reduce-scatter.1 (input: bf16[64,8]) -> bf16[16,8] {
  %input = bf16[64,8]{1,0} parameter(0)
  %all-reduce.1 = bf16[64,8]{1,0} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}
  %at = u32[] constant(0)
  ROOT %part = bf16[16,8] dynamic-slice(%all-reduce.1, %at, %at)
}

ENTRY %main (x: bf16[64,8]) -> bf16[16,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  ROOT %fusion.1 = bf16[16,8] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    (op,) = find_collectives(parse_module(text), 8)
    assert (op.kind, op.bytes, op.sent) == ("reduce-scatter", 256, 3 * 256)
    assert op.start.name == op.result.name == "fusion.1"


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
    if "{4,0}" not in text:
        assert sorted(groups.ravel()) == list(range(8))


def test_other_texts_and_other_meshes_give_nothing():
    for text in ("mesh[", "[2", "{{0,1},{2}}", "what"):
        assert parse_groups(text, 8) is None
    assert axes_of_groups(np.array([[0, 9]]), SIZES) is None


@pytest.mark.parametrize("axes", [("fsdp",), ("data", "tensor")])
def test_what_jax_compiles_for_an_axis_is_found_to_be_along_it(axes):
    mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)
    split = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(axes)))
    whole = jax.jit(jnp.sin, out_shardings=NamedSharding(mesh, P()))
    (op,) = collectives(whole, split)
    assert (op.kind, op.axes) == ("all-gather", axes)
    total = jax.jit(lambda x: jnp.sum(x, 0), out_shardings=NamedSharding(mesh, P()))
    (op,) = collectives(total, split)
    assert (op.kind, op.axes) == ("all-reduce", axes)
