import dataclasses

import pytest

from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._schedule import Schedule
from eqxshard.planning._targets import Target

#: A gather of 100 s on the links, a copy of 50 s of memory.
TARGET = dataclasses.replace(
    Target.named("h200"), link=3072 / 100, network=1.0, bandwidth=2 * 4096 / 50
)
ARRAY = "f32[32,32]{1,0}"
GATHER = "(f32[8,32], f32[32,32]) all-gather-start(%p), replica_groups=[2,4]<=[8], a=1"
HEAD = f"  %p = f32[8,32]{{1,0}} parameter(0)\n  %x = {ARRAY} parameter(1)\n"


def loop(name, body, times):
    config = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    return f"  %{name} = f32[] while(%x), condition=%c, body=%{body}, {config}\n"


def spans(entry, **bodies):
    more = "".join(
        f"%{name} (t: f32[]) -> f32[] {{\n{HEAD}{body}}}\n" for name, body in bodies.items()
    )
    text = f"{more}ENTRY %main (p: f32[8,32], x: f32[32,32]) -> f32[] {{\n{HEAD}{entry}}}\n"
    module = parse_module(text)
    elapsed = Schedule(module, list(find_collectives(module, 8)), TARGET).elapsed("main")
    found = elapsed.timeline.spans
    device = [x for x in found if x.kind in ("compute", "memory", "waiting")]
    whole = sum((x.end - x.start) * x.times for x in device)
    assert whole == pytest.approx(elapsed.seconds)
    return [
        (x.kind, round(x.start, 6), round(x.end, 6), x.times, x.collective) for x in found
    ]


def test_collectives_run_beside_the_device_until_it_waits():
    found = spans(
        f"  %s = {GATHER}\n  %y = {ARRAY} copy(%x)\n"
        f"  %d = {ARRAY} all-gather-done(%s)\n  ROOT %z = {ARRAY} copy(%d)\n"
    )
    assert found == [
        ("collective", 0, 100, 1, 0),
        ("memory", 0, 50, 1, None),
        ("waiting", 50, 100, 1, 0),
        ("memory", 100, 150, 1, None),
    ]


def test_the_same_again_is_one_span():
    found = spans(f"  %y = {ARRAY} copy(%x)\n  ROOT %z = {ARRAY} copy(%y)\n")
    assert found == [("memory", 0, 100, 1, None)]


def test_a_loop_is_one_iteration_and_how_often_it_runs():
    found = spans(
        f"  %y = {ARRAY} copy(%x)\n{loop('w', 'body', 5)}  ROOT %z = {ARRAY} copy(%x)\n",
        body=f"  ROOT %y = {ARRAY} copy(%x)\n",
    )
    assert found == [
        ("memory", 0, 50, 1, None),
        ("loop", 50, 100, 5, None),
        ("memory", 50, 100, 5, None),
        ("memory", 100, 150, 1, None),
    ]


def test_loops_in_loops_multiply():
    found = spans(
        f"{loop('w', 'outer', 5)}  ROOT %z = {ARRAY} copy(%x)\n",
        outer=f"  %y = {ARRAY} copy(%x)\n{loop('v', 'inner', 3)}",
        inner=f"  ROOT %y = {ARRAY} copy(%x)\n",
    )
    assert found == [
        ("loop", 0, 100, 5, None),
        ("memory", 0, 50, 5, None),
        ("loop", 50, 100, 15, None),
        ("memory", 50, 100, 15, None),
        ("memory", 100, 150, 1, None),
    ]


def test_a_collective_beside_a_loop_is_as_long_as_what_is_shown_of_it():
    found = spans(
        f"  %s = {GATHER}\n{loop('w', 'body', 4)}  ROOT %d = {ARRAY} all-gather-done(%s)\n",
        body=f"  ROOT %y = {ARRAY} copy(%x)\n",
    )
    # Half of the loop's 200 s.
    assert ("collective", 0, 25, 1, 0) in found
    assert ("loop", 0, 50, 4, None) in found
