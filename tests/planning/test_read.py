"""Reading of compiled texts that are written by hand."""

import pytest

from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._read import find_operations

HEAD = """ENTRY %main (p: f32[32,32], i: s32[]) -> f32[] {
  %p = f32[32,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %alone = f32[32,32]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3}}, to_apply=%add
  %y = f32[32,32]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
"""
SCATTER, SUM = ("reduce-scatter", "f32[8,32]"), ("all-reduce", "f32[32,32]")


@pytest.mark.parametrize(
    "found, lines",
    [
        (SCATTER, ["f32[8,32]{1,0} dynamic-slice(%y, %i, %i)"]),
        # Through a view, in another dtype.
        (SCATTER, ["bf16[32,32] convert(%y)", "bf16[8,32] dynamic-slice(%v0, %i, %i)"]),
        (SUM, ["f32[16,32]{1,0} dynamic-slice(%y, %i, %i)"]),
        # Something else needs all of it.
        (SUM, ["f32[32,32]{1,0} tanh(%y)", "f32[8,32] dynamic-slice(%y, %i, %i)"]),
    ],
)
def test_a_sum_of_which_each_device_keeps_a_part_is_scattered_but_on_cpus(found, lines):
    named = "".join(f"  %v{number} = {line}\n" for number, line in enumerate(lines))
    module = parse_module(f"{HEAD}{named}}}\n")
    # A device that reduces alone does not communicate.
    (operation,) = find_operations(module, 8, "cpu")
    assert (operation.kind, *map(str, operation.shapes)) == found
    (operation,) = find_operations(module, 8, "gpu")
    assert operation.kind == "all-reduce"
