"""The report of the doctor: facts, then what is wrong and what mends it."""

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from ._checks import CHECKS, Finding
from ._facts import Facts, gather


def doctor() -> int:
    """Print the report of this machine; return 1 if something is wrong, else 0."""
    facts = gather()
    findings = find(facts)
    print(describe(facts, findings))
    return int(any(finding.is_wrong for finding in findings))


def find(facts: Facts) -> list[Finding]:
    """What all checks find."""
    return [finding for check in CHECKS for finding in check(facts)]


def describe(facts: Facts, findings: Sequence[Finding]) -> str:
    """The report, as text that can be pasted into an issue."""
    wrong = [finding for finding in findings if finding.is_wrong]
    others = [finding for finding in findings if not finding.is_wrong]
    parts = ["\n".join(_lines(facts))]
    parts += [_listed("What is wrong", wrong) if wrong else "Nothing is wrong."]
    parts += [_listed("Worth knowing", others)] if others else []
    # A home folder has somebody's name in it.
    home = str(Path.home())
    text = "\n\n".join(parts)
    return text.replace(home + os.sep, "~" + os.sep) if len(home) > 1 else text


def _listed(title: str, findings: Sequence[Finding]) -> str:
    lines = [f"{title}:"]
    for number, finding in enumerate(findings, 1):
        lines += [f"{number}. {finding.sentence}", f"     {finding.command}"]
    return "\n".join(lines)


def _lines(facts: Facts) -> Iterator[str]:
    tables = {
        "versions": {"python": platform.python_version(), **facts.packages},
        "devices": _device_lines(facts),
        "machine": _machine_lines(facts),
        "environment": facts.environment,
    }
    for title, rows in tables.items():
        yield title
        width = max(map(len, rows), default=0)
        yield from (f"  {name:<{width}}  {value}" for name, value in rows.items())


def _device_lines(facts: Facts) -> dict[str, str]:
    found = {"jax": "nothing: " + (facts.failure or "it hangs")}
    if facts.devices is not None:
        kinds = ", ".join(f"{n} x {kind}" for kind, n in facts.devices.kinds.items())
        found = {"jax": f"{kinds} ({facts.devices.platform})"}
    found["nvidia driver"] = facts.driver or "none"
    if facts.gpus:
        found["nvidia-smi"] = ", ".join(facts.gpus)
    return found


def _machine_lines(facts: Facts) -> dict[str, str]:
    found = {"system": platform.platform(), "cores": str(os.cpu_count())}
    for disk in facts.disks:
        found[disk.name] = f"{_gb(disk.free)} free of {_gb(disk.total)} ({disk.path})"
    if facts.cache is not None:
        found["compilation cache"] = facts.cache
    found["host"] = facts.hostname + ("" if facts.resolves else " (has no address)")
    return found


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
