"""What a plan said of a run, beside what was measured."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..pages._format import format_bytes, format_seconds
from ..sharding._text import format_mesh
from ._read_run import RecordedRun


def compare_with_plan(
    plan: Mapping[str, Any], run: RecordedRun
) -> Iterator[tuple[str, ...]]:
    """Rows of a table: a name, what was planned, what was measured, their ratio.

    **Arguments:**

    - `plan`: what [`eqxshard.Plan.to_json`][] makes.
    - `run`: a run of that step; where it is one of another step, the first rows differ.
    """
    record = run.record
    if devices := record.get("devices"):
        there = f"{plan['devices']} x {plan['target']['kind']}"
        yield "devices", there, f"{devices['count']} x {devices['kind']}", ""
        yield "mesh", format_mesh(plan["mesh"]), format_mesh(record.get("mesh") or {}), ""
    if "batch_size" in record:
        yield "batch size", str(plan["examples"]), str(record["batch_size"]), ""
    step = plan["time"]["step"] if plan["time"] else None
    yield _row("time of a step", step, run.step_seconds, format_seconds)
    speed = plan["examples_per_second"]
    yield _row("examples per second", speed, run.examples_per_second, "{:,.4g}".format)
    mfu = plan["mfu"]
    used = mfu * step / run.step_seconds if mfu and step and run.step_seconds else None
    yield _row("of the devices' peak", mfu, used, "{:.1%}".format)
    peak = (record.get("memory") or {}).get("peak")
    yield _row("memory of a device", plan["memory"]["peak"], peak, format_bytes)


def _row(
    name: str, planned: float | None, measured: float | None, text: Callable[[Any], str]
) -> tuple[str, ...]:
    shown = (text(value) if value else "unknown" for value in (planned, measured))
    ratio = f"{measured / planned:.3g}" if planned and measured else ""
    return (name, *shown, ratio)
