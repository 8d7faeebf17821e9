"""The differences between two runs, or between two starts of one run."""

from collections.abc import Mapping
from typing import Any

from ..sharding._text import format_mesh

#: Settings that belong to one start of a run, not to the run.
_OF_A_START = ("resume", "overwrite", "output", "profile", "traceback")


def comparable(facts: Mapping[str, Any]) -> dict[str, str]:
    """The settings, versions, data, mesh and devices of a run, as text by name.

    **Arguments:**

    - `facts`: those of a run, or of one start of it, as `run.json` has them.
    """
    found = {**(facts.get("settings") or {}), **(facts.get("versions") or {})}
    # Below, facts replace settings of the same names: the options `mesh` and `devices`
    # may be unset.
    found |= {name: facts.get(name) for name in ("data", "parameters")}
    if devices := facts.get("devices"):
        found["mesh"] = format_mesh(facts.get("mesh") or {})
        found["devices"] = f"{devices['count']} x {devices['kind']}"
        if devices["per_process"] != devices["count"]:
            found["devices of a process"] = devices["per_process"]
    known = {name: value for name, value in found.items() if value is not None}
    return {name: str(value) for name, value in known.items() if name not in _OF_A_START}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two starts of a run, such as `seed 0 -> 1`.

    **Arguments:**

    - `before`, `now`: the facts of both starts, as for `comparable`.
    """
    old, new = comparable(before), comparable(now)
    if "steps" in {**old, **new}:
        # A run is given epochs or steps. Every start records its last step: compare these.
        for found, facts in ((old, before), (new, now)):
            found.pop("epochs", None)
            found["steps"] = str(facts.get("steps"))
    return [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
