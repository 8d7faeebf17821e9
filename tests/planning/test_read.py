"""What is read of texts that are written by hand."""

import pytest

import eqxshard
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._costs import count_flops
from eqxshard.planning._read import find_operations
from eqxshard.planning._recomputed import find_recomputed, note_recomputed

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
    # What each device does alone is no communication.
    (operation,) = find_operations(module, 8, "cpu")
    assert (operation.kind, *map(str, operation.shapes)) == found
    (operation,) = find_operations(module, 8, "gpu")
    assert operation.kind == "all-reduce"


DOT = "f32[32,32] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
#: A product in a loop of five iterations, under the names that its copies have.
LOOP = """%body (p: f32[32,32]) -> f32[32,32] {{
  %p = f32[32,32]{{1,0}} parameter(0)
{products}
}}

ENTRY %main (p: f32[32,32]) -> f32[32,32] {{
  %p = f32[32,32]{{1,0}} parameter(0)
  %dot.1 = {dot}
  %w = f32[32,32] while(%p), body=%body, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
"""
PRODUCT, ARRAYS = 2 * 32**3, 3 * 4 * 32**2


@pytest.mark.parametrize(
    "names, more",
    [
        (["dot.1"], 0),
        (["dot.1", "dot.2"], 0),
        (["dot.1", "dot.1.remat", "dot.1.remat2"], 10),
        # All that used the first one use copies, and it is gone.
        (["dot.1.remat", "dot.1.remat3.1", "dot.2.remat2"], 5),
        # A layer that the model computes again is no doing of XLA's.
        (["remat_dot.1", "checkpoint_remat.2", "dot.remat_1"], 0),
    ],
)
def test_what_xla_computes_again_is_counted_and_noted(names, more):
    products = "\n".join(f"  %{name} = {DOT}" for name in names)
    module = parse_module(LOOP.format(products=products, dot=DOT))
    flops, size = find_recomputed(module)
    assert (flops.total(), size) == (more * PRODUCT, more * ARRAYS)
    total, h200 = count_flops(module), eqxshard.Target.named("h200")
    note = note_recomputed(module, total, 1.0, h200)
    if not more:
        assert note is None
    else:
        share = more / (1 + 5 * len(names) - more)
        assert note is not None and f"again ({share:.0%} more) and moves" in note
