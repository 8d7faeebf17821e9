"""Functions and classes by import path, so that a crash dump contains no code.

Reading a dump imports only the modules it names. A reference leads only to functions
and classes; those of the standard library are refused, because a model has no use for
them and a forged dump might.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
import types
from contextvars import ContextVar
from pathlib import Path
from typing import Any

#: The name under which a script that was run as `__main__` is imported again.
_SCRIPT = "eqxshard_replayed_script"

_importing = ContextVar("eqxshard_importing", default=False)

_HARMLESS = ("math", "operator", "_operator")


def refer(item: Any, where: str) -> str:
    """The import path of a function or class: `package.module:Class.method`.

    **Raises:**

    `TypeError` if it cannot be imported, such as a lambda.
    """
    module = getattr(item, "__module__", None)
    name = getattr(item, "__qualname__", None) or getattr(item, "__name__", None)
    found = _lookup(sys.modules.get(str(module)), str(name))
    if found is item:
        return f"{module}:{name}"
    kind = "class" if isinstance(item, type) else type(item).__name__
    what = "lambda" if str(name).endswith("<lambda>") else f"{kind} {name}"
    raise TypeError(
        f"{where} is a {what} that cannot be imported; define it by name at the top level "
        "of a module."
    )


def resolve(reference: str, script: str | None) -> Any:
    """Import the object that a reference names.

    **Arguments:**

    - `reference`: from `refer`.
    - `script`: the path of the script that was `__main__`.

    **Raises:**

    `ValueError` if that is not possible, or not allowed.
    """
    module, _, name = reference.partition(":")
    _refuse_standard_library(module, reference)
    try:
        found = _lookup(_import(module, script), name)
    except (ImportError, OSError) as error:
        raise ValueError(
            f"{reference} cannot be imported ({error}); run this in the environment and "
            "the directory of the run."
        ) from error
    if not callable(found) or isinstance(found, types.ModuleType):
        raise ValueError(
            f"{reference} is no longer there; check out the code that the run used."
        )
    # Any module has some of the standard library among its attributes.
    _refuse_standard_library(getattr(found, "__module__", None) or "", reference)
    return found


def _refuse_standard_library(module: str, reference: str) -> None:
    if module.partition(".")[0] in sys.stdlib_module_names - {*_HARMLESS, "__main__"}:
        raise ValueError(
            f"the crash dump refers to {reference}, which no model needs; use only crash "
            "dumps of your own runs."
        )


def refer_to_script() -> str | None:
    """The path of the script that runs as `__main__`."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return None if file is None else str(Path(file).resolve())


def refuse_import(what: str) -> None:
    """Raise `ValueError` while a script is only imported for what it defines."""
    if _importing.get():
        raise ValueError(
            f"{what} is called when this script is imported, for a plan or a replay; put "
            "the call under `if __name__ == '__main__':`."
        )


def is_referable(item: Any) -> bool:
    """Whether something is a function or class, to be referred to."""
    if isinstance(item, functools.partial):
        return False
    return callable(item) and (
        isinstance(item, type)
        or inspect.isroutine(item)
        or hasattr(item, "__wrapped__")
        or type(item).__module__.partition(".")[0] in ("jax", "jaxlib", "numpy")
    )


def _lookup(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _import(module: str, script: str | None) -> Any:
    if module != "__main__":
        return importlib.import_module(module)
    if script is None:
        raise ImportError("the run had no script")
    if _SCRIPT not in sys.modules:
        spec = importlib.util.spec_from_file_location(_SCRIPT, script)
        if spec is None or spec.loader is None or not Path(script).is_file():
            raise ImportError(f"there is no script {script}")
        sys.modules[_SCRIPT] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(script).parent))
        token = _importing.set(True)
        try:
            spec.loader.exec_module(sys.modules[_SCRIPT])
        finally:
            _importing.reset(token)
    return sys.modules[_SCRIPT]
