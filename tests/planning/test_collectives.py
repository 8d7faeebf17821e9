from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._collectives import group_collectives, has_peers

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


def test_groups_send_what_their_collectives_do(plan):
    groups = group_collectives(plan.collectives)
    sent = [x.sent * (x.times or 1) for x in plan.collectives]
    assert sum(each.sent_in_all for each in groups) == sum(sent)
    assert len(groups) < len(plan.collectives)
    in_all = [each.sent_in_all for each in groups]
    assert in_all == sorted(in_all, reverse=True)
