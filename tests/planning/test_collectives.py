from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._compile import has_peers

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


def test_the_function_of_a_line_is_named(plan):
    functions = {x.line: x.function for x in plan.collectives if x.line is not None}
    assert {"MLP.__call__", "Transformer.__call__"} <= {*functions.values()}
    assert None not in functions.values()


def test_forward_and_backward_gathers_of_a_weight_are_two(plan):
    (up,) = (leaf for leaf in plan.leaves if leaf.path == "blocks.mlp.up")
    gathers = [
        (each.bytes, each.times)
        for each in plan.collectives
        if each.kind == "all-gather" and each.leaves == (up.path,)
    ]
    # One layer of the two, all of it.
    layer = 4 * up.bytes // 2
    assert gathers == [(layer, 2), (layer, 2)]
