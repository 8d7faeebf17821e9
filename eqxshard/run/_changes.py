"""What differs between runs, or between the starts of one."""

from collections.abc import Mapping
from typing import Any

from ..sharding._text import format_mesh

#: Settings that are of one start of a run, and not of the run.
_OF_A_START = ("resume", "overwrite", "output", "profile", "traceback")


def comparable(facts: Mapping[str, Any]) -> dict[str, str]:
    """What runs, or the starts of one, may differ in, as text by name."""
    found = {**(facts.get("settings") or {}), **(facts.get("versions") or {})}
    # Options have such names, too, and may not say what they came to.
    found |= {name: facts.get(name) for name in ("data", "parameters")}
    if devices := facts.get("devices"):
        found["mesh"] = format_mesh(facts.get("mesh") or {})
        found["devices"] = f"{devices['count']} x {devices['kind']}"
        if devices["per_process"] != devices["count"]:
            found["devices of a process"] = devices["per_process"]
    known = {name: value for name, value in found.items() if value is not None}
    return {name: str(value) for name, value in known.items() if name not in _OF_A_START}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two starts of a run, such as `seed 0 -> 1`."""
    old, new = comparable(before), comparable(now)
    if "steps" in {**old, **new}:
        # Who gives these gives no epochs; both starts have a last step.
        for found, facts in ((old, before), (new, now)):
            found.pop("epochs", None)
            found["steps"] = str(facts.get("steps"))
    return [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
