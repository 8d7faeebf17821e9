import pytest

from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._rewrites import rewrite_collectives

HEAD = "ENTRY %main (p: f32[32,32], i: s32[]) -> f32[] {\n"
HEAD += "  %p = f32[32,32]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
REDUCE = "f32[32,32]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add"
PART = "dynamic-slice(%{}, %i, %i), dynamic_slice_sizes={{8,32}}"


def rewritten(*lines):
    module = parse_module(HEAD + "".join(f"  {line}\n" for line in lines) + "}\n")
    found = rewrite_collectives(module, find_collectives(module, 8))
    return [(op.kind, [str(shape) for shape in op.shapes], op.sent) for op in found]


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
    part = f"ROOT %z = f32[8,32]{{1,0}} {PART.format('y')}"
    scatter = ("reduce-scatter", ["f32[8,32]"], 3 * 1024)
    assert rewritten(f"%y = {REDUCE}", part) == [scatter]
    # Through a view, and in another dtype.
    cast = "%v = bf16[32,32]{1,0} convert(%y)"
    part = f"ROOT %z = bf16[8,32]{{1,0}} {PART.format('v')}"
    assert rewritten(f"%y = {REDUCE}", cast, part) == [scatter]


@pytest.mark.parametrize(
    "use",
    [
        "ROOT %z = f32[32,32]{1,0} tanh(%y)",
        "ROOT %z = f32[16,32]{1,0} dynamic-slice(%y, %i, %i), dynamic_slice_sizes={16,32}",
    ],
)
def test_other_all_reduces_stay(use):
    ((kind, _, sent),) = rewritten(f"%y = {REDUCE}", use)
    assert (kind, sent) == ("all-reduce", 2 * 3 * 1024)


def test_sums_of_reductions_are_reductions_of_sums():
    other = REDUCE.replace("%p", "%q")
    lines = [
        "%q = f32[32,32]{1,0} tanh(%p)",
        f"%y = {REDUCE}",
        f"%z = {other}",
        "ROOT %s = f32[32,32]{1,0} add(%y, %z)",
    ]
    assert len(rewritten(*lines)) == 1
    lines[-1] = "ROOT %s = f32[32,32]{1,0} multiply(%y, %z)"
    assert len(rewritten(*lines)) == 2


def test_equal_collectives_are_one_and_unused_ones_none():
    twice = "ROOT %z = f32[32,32]{1,0} multiply(%a, %b)"
    assert len(rewritten(f"%a = {REDUCE}", f"%b = {REDUCE}", twice)) == 1
    assert rewritten(f"%a = {REDUCE}", "ROOT %z = f32[32,32]{1,0} tanh(%p)") == []
