"""Plans in files, as JSON: reading one, whoever wrote it, runs no code."""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..compiled._collective import Collective
from ..compiled._findings import Finding
from ..inspect._lint import Findings
from ..sharding._files import read_bytes
from ._leaves import PlannedLeaf
from ._plan import Plan, PlannedMemory, PlannedTime
from ._targets import Target
from ._timeline import PlannedSpan

_LOG = logging.getLogger(__name__)

_CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(Plan, Collective, PlannedLeaf, PlannedMemory, PlannedSpan),
        *(PlannedTime, Target, Finding),
    )
}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "Findings": Findings}


def keep_plan(plan: Plan, file: Path) -> None:
    """Write a plan, in one move, unless the file cannot be written."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    # It is only a cache.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(_encode(plan)), encoding="utf-8")
        part.replace(file)


def read_plan(file: Path) -> Plan | None:
    """Read a plan that `keep_plan` wrote; `None`, with a warning, if it is damaged."""
    try:
        plan = json.loads(read_bytes(file), object_hook=_decode)
    except OSError:
        return None
    # Another version may have written it.
    except (ValueError, TypeError, LookupError, RecursionError):
        plan = None
    if isinstance(plan, Plan):
        return plan
    _LOG.warning("%s is not a plan of this version; it is compiled again.", file)
    return None


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        pairs = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return {type(value).__name__: [[k, _encode(part)] for k, part in pairs.items()]}
    if isinstance(value, Mapping):
        return {"dict": [[name, _encode(part)] for name, part in value.items()]}
    if isinstance(value, tuple):
        return {type(value).__name__: [*map(_encode, value)]}
    return value


def _decode(node: dict[str, Any]) -> Any:
    """The value of an object in JSON, whose parts are decoded already."""
    ((kind, parts),) = node.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](parts)
    return dict(parts) if kind == "dict" else _CLASSES[kind](**dict(parts))
