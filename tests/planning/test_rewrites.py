from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._rewrites import rewrite_collectives

ADD = "%add (x: f32[], y: f32[]) -> f32[] {\n  %x = f32[] parameter(0)\n"
ADD += "  %y = f32[] parameter(1)\n  ROOT %z = f32[] add(%x, %y)\n}\n\n"
HEAD = ADD + ADD.replace("%add", "%again") + ADD.replace("add", "maximum")
HEAD += "ENTRY %main (p: f32[32,32], i: s32[]) -> f32[] {\n"
HEAD += "  %p = f32[32,32]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
REDUCE = "f32[32,32]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add"
PART = "dynamic-slice(%{}, %i, %i), dynamic_slice_sizes={{8,32}}"


def joined(y, z, *more, by="add"):
    """A result of two collectives."""
    lines = ["%q = f32[32,32]{1,0} tanh(%p)", f"%y = {y}", f"%z = {z}"]
    last = f"%s = f32[32,32]{{1,0}} {by}(%y, %z)"
    return rewritten(*lines, last if more else f"ROOT {last}", *more)


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


def test_other_all_reduces_stay():
    for use in (
        "ROOT %z = f32[32,32]{1,0} tanh(%y)",
        "ROOT %z = f32[16,32]{1,0} dynamic-slice(%y, %i, %i), dynamic_slice_sizes={16,32}",
    ):
        ((kind, _, sent),) = rewritten(f"%y = {REDUCE}", use)
        assert (kind, sent) == ("all-reduce", 2 * 3 * 1024)


def test_sums_of_reductions_are_reductions_of_sums():
    other = REDUCE.replace("%p", "%q")
    assert len(joined(REDUCE, other)) == 1
    assert len(joined(REDUCE, other, by="multiply")) == 2


def test_reductions_along_other_axes_or_of_another_kind_are_not_one():
    for ways in (
        ("replica_groups=[2,4]<=[8]", "replica_groups=[2,4]<=[4,2]T(1,0)"),
        ("to_apply=%add", "to_apply=%maximum"),
    ):
        other = REDUCE.replace(*ways)
        assert len(joined(REDUCE, other)) == 2
        assert len(joined(REDUCE, other.replace("%p", "%q"))) == 2


def test_the_sum_of_maxima_is_not_the_maximum_of_sums():
    largest = REDUCE.replace("%add", "%maximum")
    assert len(joined(largest, largest.replace("%p", "%q"))) == 2


def test_a_reduction_that_something_else_needs_stays():
    both = "ROOT %t = (f32[32,32]{1,0}, f32[32,32]{1,0}) tuple(%s, %y)"
    assert len(joined(REDUCE, REDUCE.replace("%p", "%q"), both)) == 2


def test_equal_collectives_are_one_and_unused_ones_none():
    twice = "ROOT %z = f32[32,32]{1,0} multiply(%a, %b)"
    again = REDUCE.replace("%add", "%again")
    assert len(rewritten(f"%a = {REDUCE}", f"%b = {again}", twice)) == 1
    moved = "f32[32,32]{1,0} all-to-all(%p), replica_groups=[2,4]<=[8], dimensions={0}"
    other = moved.replace("{0}", "{1}")
    assert len(rewritten(f"%a = {moved}", f"%b = {moved}", twice)) == 1
    assert len(rewritten(f"%a = {moved}", f"%b = {other}", twice)) == 2
    assert rewritten(f"%a = {REDUCE}", "ROOT %z = f32[32,32]{1,0} tanh(%p)") == []
