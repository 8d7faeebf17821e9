"""The settings of a run by name: the options, and the script's own arguments."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .._errors import UsageError, UsageTypeError
from ._config import RunConfig, option_names


def name_settings(settings: Any, config: RunConfig) -> dict[str, Any]:
    """The settings of a script by path, such as `encoder.width`, and the options of a run.

    A setting that has the name of an option gets a prefix, as in `settings.seed`. Values
    are those of JSON; others, such as a path, become text.

    **Arguments:**

    - `settings`: a dataclass or a dict, or `None` for the arguments of the script that
        `config` has, if any. A `RunConfig` in it is left out.
    - `config`: the options.

    **Raises:**

    `TypeError` if `settings` is something else; `ValueError` if two of them have one name.
    """
    options = {name: getattr(config, name) for name in option_names()}
    named: dict[str, Any] = {}
    settings = config.arguments if settings is None else settings
    if settings is not None and not _is_group(settings):
        raise UsageTypeError(
            f"settings= is a {type(settings).__name__}; give a dataclass or a dict, such "
            "as vars(it)."
        )
    for path, value in _flatten(settings or {}):
        name = f"settings.{path}" if path in options else path
        if name in named:
            raise UsageError(f"two settings are called {name!r}; rename one of them.")
        named[name] = value
    return {name: _as_json(value) for name, value in {**named, **options}.items()}


def _is_group(value: Any) -> bool:
    is_class = isinstance(value, type)
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not is_class)


def _entries(group: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(group, Mapping):
        yield from ((str(name), value) for name, value in group.items())
    else:
        names = (field.name for field in dataclasses.fields(group))
        yield from ((name, getattr(group, name)) for name in names)


def _flatten(group: Any) -> Iterator[tuple[str, Any]]:
    """The settings in a group, and in the groups in it, by path."""
    for name, value in _entries(group):
        if isinstance(value, RunConfig):
            continue
        if _is_group(value):
            yield from ((f"{name}.{path}", inner) for path, inner in _flatten(value))
        else:
            yield name, value


def _as_json(value: Any) -> Any:
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError):  # Keys that JSON does not have, or a cycle.
        return str(value)
    return json.loads(text, parse_constant=str)  # Such as NaN.
