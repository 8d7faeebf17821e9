"""What a plan said of a run, beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..pages._format import format_bytes, format_seconds
from ..sharding._text import format_mesh
from ._read_run import RecordedRun


@dataclass(frozen=True)
class VersusPlan:
    """A plan against a run.

    - `rows`: of a table: a name, what was planned, what was measured, their ratio.
    - `differences`: sentences on why they are not the same step.
    - `notes`: sentences on how to read this.
    """

    rows: tuple[tuple[str, str, str, str], ...]
    differences: tuple[str, ...]
    notes: tuple[str, ...]


def compare_with_plan(plan: Mapping[str, Any], run: RecordedRun) -> VersusPlan:
    """Compare what [`eqxshard.Plan.to_json`][] makes with a run of that step."""
    rows, notes = [], []
    time, seconds = plan["time"], run.step_seconds
    if time and time["step"]:
        planned = time["step"]
        measured = "" if seconds is None else format_seconds(seconds)
        ratio = "" if seconds is None else f"{seconds / planned:.3g}"
        rows.append(("time of a step", format_seconds(planned), measured, ratio))
        speed, seen = plan["examples_per_second"], run.examples_per_second
        measured = "" if seen is None else f"{seen:,.4g}"
        ratio = "" if seen is None else f"{seen / speed:.3g}"
        rows.append(("examples per second", f"{speed:,.4g}", measured, ratio))
        if plan["mfu"] is not None:
            used = plan["mfu"]
            measured = "" if seconds is None else f"{used * planned / seconds:.1%}"
            ratio = "" if seconds is None else f"{planned / seconds:.3g}"
            rows.append(("of the devices' peak", f"{used:.1%}", measured, ratio))
        notes.append(
            f"The plan is a roofline, bound by {time['bound']}, so real steps take longer. "
            "Plan.calibrate makes a measured time a target for plans of other meshes."
        )
    else:
        notes.append("The plan has no time, because the speed of its target is not known.")
    peak, memory = plan["memory"]["peak"], run.record.get("memory")
    measured = format_bytes(memory["peak"]) if memory else "not told by these devices"
    ratio = f"{memory['peak'] / peak:.3g}" if memory else ""
    rows.append(("memory of a device", format_bytes(peak), measured, ratio))
    return VersusPlan(tuple(rows), tuple(_differences(plan, run)), tuple(notes))


def _differences(plan: Mapping[str, Any], run: RecordedRun) -> list[str]:
    """Sentences on what the plan is of, and the run was not."""
    record = run.record
    devices, found = record.get("devices") or {}, list[tuple[str, object, object]]()
    if "kind" in devices:
        found.append(("kind of device", plan["target"]["kind"], devices["kind"]))
        found.append(("number of devices", plan["devices"], devices["count"]))
        found.append(
            ("mesh", format_mesh(plan["mesh"]), format_mesh(record.get("mesh") or {}))
        )
    if "batch_size" in record:
        found.append(("batch size", plan["examples"], record["batch_size"]))
    return [
        f"The {name} of the plan is {planned}, and that of the run {actual}."
        for name, planned, actual in found
        if str(planned).lower() != str(actual).lower()
    ]
