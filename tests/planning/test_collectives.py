from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._collectives import group_collectives, has_peers, join_axes

TEXT = """
HloModule jit_train_step

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %alone = f32[8]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %unknown = f32[8]{0} all-reduce(%alone), to_apply=%add
  ROOT %pairs = f32[8]{0} all-reduce(%unknown), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_what_each_device_does_alone_is_no_communication():
    found = {x.start.name: x for x in find_collectives(parse_module(TEXT), 4)}
    assert [name for name, x in found.items() if has_peers(x)] == ["unknown", "pairs"]


def test_groups_have_all_that_is_sent_and_the_largest_first(plan):
    groups = group_collectives(plan.collectives)
    assert len(groups) < len(plan.collectives)
    totals = [group.sent_in_all for group in groups]
    assert totals == sorted(totals, reverse=True)
    assert sum(totals) == sum(sum(kinds.values()) for kinds in plan.traffic.values())
    in_loop = [group for group in groups if group.in_loop]
    assert in_loop and all(group.sent_in_all == 2 * group.sent for group in in_loop)


def test_the_function_of_a_line_is_named(plan):
    functions = {x.line: x.function for x in plan.collectives if x.line is not None}
    assert {"MLP.__call__", "Transformer.__call__"} <= {*functions.values()}
    assert None not in functions.values()


def test_axes_as_one_word():
    assert (join_axes(("data", "fsdp")), join_axes(None)) == ("data,fsdp", "unknown")
