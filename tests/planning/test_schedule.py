import dataclasses

import pytest

from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._schedule import Schedule
from eqxshard.planning._targets import Target

#: A gather of 100 s on the links, a product of 60 s, a copy of 50 s of memory.
TARGET = dataclasses.replace(
    Target.named("h200"),
    link=3072 / 100,
    network=1.0,
    bandwidth=2 * 4096 / 50,
    flops={"float32": 2 * 32**3 / 60},
)
PRODUCT = "f32[32,32]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GATHER = "(f32[8,32], f32[32,32]) all-gather-start(%p), replica_groups=[2,4]<=[8], a=1"
HEAD = "  %p = f32[8,32]{1,0} parameter(0)\n  %x = f32[32,32]{1,0} parameter(1)\n"


def elapsed(body, more=""):
    text = f"{more}ENTRY %main (p: f32[8,32], x: f32[32,32]) -> f32[] {{\n{HEAD}{body}}}\n"
    module = parse_module(text)
    operations = list(find_collectives(module, 8))
    return Schedule(module, operations, TARGET).elapsed("main")


def test_instructions_wait_for_arithmetic_or_for_memory():
    found = elapsed(f"  %y = {PRODUCT}\n  ROOT %z = f32[32,32]{{1,0}} copy(%y)\n")
    # A product moves three arrays, in 75 s.
    assert found.memory == pytest.approx(75 + 50) and found.compute == 0


def test_what_is_computed_meanwhile_hides_communication():
    found = elapsed(
        f"  %s = {GATHER}\n"
        "  %y = f32[32,32]{1,0} copy(%x)\n"
        "  %d = f32[32,32]{1,0} all-gather-done(%s)\n"
        "  ROOT %z = f32[32,32]{1,0} copy(%d)\n"
    )
    assert found.sending == {("main", "s"): pytest.approx(100)}
    assert found.waiting == {("main", "s"): pytest.approx(50)}
    assert found.seconds == pytest.approx(50 + 50 + 50)


def test_one_collective_at_a_time():
    found = elapsed(
        f"  %a = {GATHER}\n  %b = {GATHER}\n"
        "  %c = f32[32,32]{1,0} all-gather-done(%a)\n"
        "  ROOT %d = f32[32,32]{1,0} all-gather-done(%b)\n"
    )
    assert found.seconds == pytest.approx(200)


def test_a_synchronous_collective_hides_nothing():
    line = GATHER.replace("(f32[8,32], f32[32,32])", "f32[32,32]").replace("-start", "")
    found = elapsed(f"  ROOT %y = {line}\n")
    assert found.waiting == {("main", "y"): pytest.approx(100)}


def test_loops_repeat_their_body():
    body = (
        f"%body (t: f32[]) -> f32[] {{\n{HEAD}  ROOT %y = f32[32,32]{{1,0}} copy(%x)\n}}\n"
    )
    loop = '  ROOT %w = f32[] while(%x), condition=%c, body=%body, backend_config={"known'
    found = elapsed(loop + '_trip_count":{"n":"5"}}\n', body)
    assert found.seconds == pytest.approx(5 * 50)


def test_devices_wait_for_a_collective_in_a_fusion():
    more = (
        "%all-reduce-scatter (input: f32[32,32]) -> f32[8,32] {\n"
        "  %input = f32[32,32]{1,0} parameter(0)\n"
        "  %sum = f32[32,32] all-reduce(%input), replica_groups=[2,4]<=[8]\n"
        "  ROOT %part = f32[8,32] slice(%sum)\n}\n\n"
    )
    fusion = "f32[8,32] fusion(%x), kind=kCustom, calls=%all-reduce-scatter"
    found = elapsed(f"  ROOT %y = {fusion}\n", more)
    assert found.waiting["main", "y"] == found.sending["main", "y"] == pytest.approx(100)
    assert found.seconds == pytest.approx(100)
