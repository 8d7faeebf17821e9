"""Steps in time, by compiled modules that are written by hand."""

import dataclasses
import json

import pytest

from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning import Efficiency, PlannedSpan
from eqxshard.planning._efficiency import AT_PEAKS
from eqxshard.planning._links import link_seconds, seconds_by_link
from eqxshard.planning._targets import Target
from eqxshard.planning._timeline import Timeline

#: A gather of 100 s on the links, a product of 60 s, a copy of 50 s of memory.
TARGET = dataclasses.replace(
    Target.named("h200"),
    link=3072 / 100,
    network=1.0,
    bandwidth=2 * 4096 / 50,
    flops={"float32": 2 * 32**3 / 60},
)
ARRAY = "f32[32,32]{1,0}"
PRODUCT = f"{ARRAY} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
GATHER = "(f32[8,32], f32[32,32]) all-gather-start(%p), replica_groups=[2,4]<=[8], a=1"
HEAD = f"  %p = f32[8,32]{{1,0}} parameter(0)\n  %x = {ARRAY} parameter(1)\n"


def elapsed(entry, more="", target=TARGET, efficiency=AT_PEAKS, **bodies):
    more += "".join(
        f"%{name} (t: f32[]) -> f32[] {{\n{HEAD}{body}}}\n" for name, body in bodies.items()
    )
    text = f"{more}ENTRY %main (p: f32[8,32], x: f32[32,32]) -> f32[] {{\n{HEAD}{entry}}}\n"
    module = parse_module(text)
    return Timeline(module, list(find_collectives(module, 8)), target, efficiency)


def spans(entry, **bodies):
    """The timeline, whose times add up to those of the step."""
    found = elapsed(entry, **bodies)
    device = [x for x in found.spans if x.kind in ("compute", "memory", "waiting")]
    whole = sum((x.end - x.start) * x.times for x in device)
    assert whole == pytest.approx(found.length)
    return [
        (x.kind, round(x.start, 6), round(x.end, 6), x.times, x.collective)
        for x in found.spans
    ]


def loop(name, body, times):
    config = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    return f"  %{name} = f32[] while(%x), condition=%c, body=%{body}, {config}\n"


def test_instructions_wait_for_arithmetic_or_for_memory():
    # A product moves three arrays, in 75 s.
    found = spans(f"  %y = {PRODUCT}\n  ROOT %z = {ARRAY} copy(%y)\n")
    assert found == [("memory", 0, 75 + 50, 1, None)]


def test_collectives_run_beside_the_device_until_it_waits():
    entry = (
        f"  %s = {GATHER}\n  %y = {ARRAY} copy(%x)\n"
        f"  %d = {ARRAY} all-gather-done(%s)\n  ROOT %z = {ARRAY} copy(%d)\n"
    )
    found = elapsed(entry)
    assert found.seconds("collective", 0) == pytest.approx(100)
    assert found.seconds("waiting", 0) == pytest.approx(50)
    assert found.length == pytest.approx(50 + 50 + 50)
    assert spans(entry) == [
        ("collective", 0, 100, 1, 0),
        ("memory", 0, 50, 1, None),
        ("waiting", 50, 100, 1, 0),
        ("memory", 100, 150, 1, None),
    ]


def test_devices_wait_for_a_collective_in_a_fusion():
    more = (
        "%all-reduce-scatter (input: f32[32,32]) -> f32[8,32] {\n"
        "  %input = f32[32,32]{1,0} parameter(0)\n"
        "  %sum = f32[32,32] all-reduce(%input), replica_groups=[2,4]<=[8]\n"
        "  ROOT %part = f32[8,32] slice(%sum)\n}\n\n"
    )
    fusion = "f32[8,32] fusion(%x), kind=kCustom, calls=%all-reduce-scatter"
    found = elapsed(f"  ROOT %y = {fusion}\n", more)
    assert found.seconds("waiting", 0) == found.seconds("collective", 0)
    assert found.length == pytest.approx(100)


def test_loops_in_loops_multiply():
    found = spans(
        f"{loop('w', 'outer', 5)}  ROOT %z = {ARRAY} copy(%x)\n",
        outer=f"  %y = {ARRAY} copy(%x)\n{loop('v', 'inner', 3)}",
        inner=f"  ROOT %y = {ARRAY} copy(%x)\n",
    )
    assert found == [
        ("loop", 0, 1000, 5, None),
        ("memory", 0, 50, 5, None),
        ("loop", 50, 200, 15, None),
        ("memory", 50, 100, 15, None),
        ("memory", 1000, 1050, 1, None),
    ]


def test_a_loop_hides_a_collective_beside_it():
    found = spans(
        f"  %s = {GATHER}\n{loop('w', 'body', 4)}  ROOT %d = {ARRAY} all-gather-done(%s)\n",
        body=f"  ROOT %y = {ARRAY} copy(%x)\n",
    )
    assert ("collective", 0, 100, 1, 0) in found
    assert ("loop", 0, 200, 4, None) in found
    assert ("waiting", 0, 100, 1, 0) not in found


def start(name, groups):
    """A gather over four devices on two hosts of four: 30 of 40 bytes sent."""
    types, more = "(f32[8,32], f32[32,32])", f"replica_groups={groups}, a=1"
    return f"  %{name} = {types} all-gather-start(%p), {more}\n"


def done(*names):
    return "".join(f"  %d{x} = {ARRAY} all-gather-done(%{x})\n" for x in names)


def test_links_of_a_host_and_the_network_carry_collectives_at_once():
    # Inside each of two hosts; between them, in pairs; over both.
    inside, between, over_both = "[2,4]<=[8]", "[4,2]<=[2,4]T(1,0)", "[1,8]<=[8]"
    target = dataclasses.replace(TARGET, network=2048 / 80, per_host=4)

    def under_way(*groups):
        entry = "".join(start(f"s{n}", each) for n, each in enumerate(groups))
        entry += done(*(f"s{n}" for n in range(len(groups))))
        found = elapsed(f"{entry}  ROOT %z = f32[] constant(0)\n", target=target)
        sent = sorted(
            (x.collective, round(x.start, 6), round(x.end, 6))
            for x in found.spans
            if x.kind == "collective"
        )
        return sent, round(found.length, 6)

    assert under_way(inside, between) == ([(0, 0, 100), (1, 0, 80)], 100)
    assert under_way(inside, inside) == ([(0, 0, 100), (1, 100, 200)], 200)
    # Seven eighths of it go over NVLink, in 3584 / 3072 of 100 s.
    assert under_way(between, over_both, inside) == (
        [(0, 0, 80), (1, 80, 196.666667), (2, 196.666667, 296.666667)],
        296.666667,
    )


#: Hosts have four devices.
LINKS = dataclasses.replace(Target.named("h200"), link=100.0, network=10.0, per_host=4)
SIZE = 4 * 1024


def operation(kind, groups, devices=16):
    name = "source_target_pairs" if "permute" in kind else "replica_groups"
    text = (
        "ENTRY %main (x: f32[8]) -> f32[1024] {\n"
        f"  ROOT %y = f32[1024]{{0}} {kind}(%x), {name}={groups}, a=1\n}}\n"
    )
    (found,) = find_collectives(parse_module(text), devices)
    return found


def seconds(kind, groups, target=LINKS, devices=16):
    return link_seconds(operation(kind, groups, devices), target)


def test_inside_a_host_only_its_links_count_and_beyond_it_the_network():
    beyond = "[4,4]<=[4,4]T(1,0)"
    for groups, pairs, speed in (
        ("[4,4]<=[16]", "{{0,1},{1,0}}", 100),
        (beyond, "{{0,4},{4,0}}", 10),
    ):
        assert seconds("all-gather", groups) == SIZE * 3 / 4 / speed
        assert seconds("all-reduce", groups) == 2 * SIZE * 3 / 4 / speed
        assert seconds("reduce-scatter", groups) == SIZE * 3 / speed
        assert seconds("collective-permute", pairs) == SIZE / speed


def test_over_eight_hosts_a_gather_of_weights_and_the_all_reduce_of_a_hybrid():
    """Counted by hand, for H200s: ports of 50 GB/s, NVLink of 450 GB/s."""
    h200 = Target.named("h200")
    # Each device sends 63 of 64 parts over NVLink; eight ports share 7/8 of the whole.
    nvlink, ports = 63 / 64 / 450e9, 7 / 8 / 8 / 50e9
    assert nvlink == pytest.approx(ports)
    over_all = seconds("all-gather", "[1,64]<=[64]", h200, 64)
    assert over_all == pytest.approx(SIZE * ports)
    slow = dataclasses.replace(h200, network=25e9)
    halved = seconds("all-gather", "[1,64]<=[64]", slow, 64)
    assert halved == pytest.approx(2 * SIZE * ports)
    # In a hybrid, each device has a port for its own part, and sends it twice but for 1/8.
    across = seconds("all-reduce", "[8,8]<=[8,8]T(1,0)", h200, 64)
    assert across == pytest.approx(2 * SIZE * 7 / 8 / 50e9)
    # Nobody needs the network inside of a host; beyond it, it is not free.
    alone = dataclasses.replace(LINKS, network=None)
    assert seconds("all-gather", "[4,4]<=[16]", alone) == SIZE * 3 / 4 / 100
    assert seconds("all-gather", "[1,16]<=[16]", alone) is None


def test_a_ring_starts_once_and_passes_on_what_it_carries():
    reached = Efficiency(latency=1e6, step=1e4, hop=1e2)
    target = dataclasses.replace(LINKS, link=1e30, network=1e30)
    for kind, groups, latency in (
        ("all-gather", "[4,4]<=[16]", 1_030_000),
        ("all-reduce", "[4,4]<=[16]", 1_060_000),
        # Over four hosts, alone on each or all four of each.
        ("all-gather", "[4,4]<=[4,4]T(1,0)", 1_000_300),
        ("reduce-scatter", "[1,16]<=[16]", 1_120_300),
        # Between hosts along a tree, up and down.
        ("all-reduce", "[1,16]<=[16]", 1_240_400),
        ("all-to-all", "[4,4]<=[16]", 1_010_000),
    ):
        seconds = seconds_by_link(operation(kind, groups), target, reached)
        assert seconds is not None
        assert [*seconds.values()] == pytest.approx([latency] * len(seconds)), kind


@pytest.mark.parametrize("contention, length", [(0.0, 60 + 50), (0.5, 70 + 50)])
def test_kernels_beside_a_collective_take_longer(contention, length):
    entry = (
        f"  %s = {GATHER}\n  %y = {ARRAY} copy(%x)\n"
        f"  %d = {ARRAY} all-gather-done(%s)\n  ROOT %z = {ARRAY} copy(%d)\n"
    )
    # Beside a gather of 60 s, 40 s of a copy of 50 take half as long again.
    target = dataclasses.replace(TARGET, link=3072 / 60)
    found = elapsed(entry, target=target, efficiency=Efficiency(contention=contention))
    assert found.length == pytest.approx(length)


#: A gather of 0.5 s, half of it hidden, and a loop of two iterations of 1 s.
TIMELINE = (
    PlannedSpan("collective", 0.0, 0.5, collective=0),
    PlannedSpan("compute", 0.0, 0.25),
    PlannedSpan("waiting", 0.25, 0.5, collective=0),
    PlannedSpan("loop", 0.5, 2.5, 2),
    PlannedSpan("memory", 0.5, 1.5, 2),
)


def test_a_trace_has_a_row_for_the_device_for_loops_and_for_the_links(plan, tmp_path):
    first = plan.collectives[0]
    links = f"{','.join(first.axes)} links"
    dataclasses.replace(plan, timeline=TIMELINE).save(tmp_path / "plan.trace.json")
    events = json.loads((tmp_path / "plan.trace.json").read_text())["traceEvents"]
    rows = {x["tid"]: x["args"]["name"] for x in events if x["ph"] == "M"}
    shown = [
        (rows[x["tid"]], x["name"], x["ts"], x["dur"], x["args"]["times"])
        for x in events
        if x["ph"] == "X"
    ]
    assert shown == [
        (links, first.kind, 0, 5e5, 1),
        ("device", "compute", 0, 2.5e5, 1),
        ("device", f"wait for {links}", 2.5e5, 2.5e5, 1),
        ("loops", "2 iterations, with the first in detail", 5e5, 2e6, 2),
        ("device", "memory", 5e5, 1e6, 2),
    ]
    assert {x["pid"] for x in events} == {0}
    (sent,) = (x["args"] for x in events if x["name"] == first.kind)
    assert sent["bytes sent"] == first.sent and sent["line"] == first.line
    with pytest.raises(ValueError, match=r"no schedule of h200; install the compiler"):
        plan.to_trace()
