import dataclasses
import json

import pytest

import eqxshard

#: A gather of 0.5 s, half of it hidden, and a loop of two iterations of 1 s.
TIMELINE = (
    eqxshard.PlannedSpan("collective", 0.0, 0.5, collective=0),
    eqxshard.PlannedSpan("compute", 0.0, 0.25),
    eqxshard.PlannedSpan("waiting", 0.25, 0.5, collective=0),
    eqxshard.PlannedSpan("loop", 0.5, 1.5, 2),
    eqxshard.PlannedSpan("memory", 0.5, 1.5, 2),
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
        ("loops", "loop 1: one of 2 iterations", 5e5, 1e6, 2),
        ("device", "memory", 5e5, 1e6, 2),
    ]
    assert {x["pid"] for x in events} == {0}
    (sent,) = (x["args"] for x in events if x["name"] == first.kind)
    assert sent["bytes sent"] == first.sent and sent["line"] == first.line


def test_without_a_schedule_there_is_no_trace(plan):
    with pytest.raises(ValueError, match=r"no schedule of h200, .*; install the compiler"):
        plan.to_trace()
