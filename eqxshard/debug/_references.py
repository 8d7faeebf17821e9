"""Functions and classes by import path, so that a crash dump contains no code.

Reading a dump imports only the modules it names, and none that came with it. A reference
leads only to functions and classes of one's own code or of packages that are made for
JAX. Others, such as the standard library's, are refused, because a model has no use for
them and a forged dump might: replaying it calls them.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

#: The name under which a script that was run as `__main__` is imported again.
_SCRIPT = "eqxshard_replayed_script"

_importing = ContextVar("eqxshard_importing", default=False)

_HARMLESS = ("math", "operator", "_operator")
_JAX = ("jax", "jaxlib", "equinox", "optax", "numpy")
#: What other packages for JAX require.
_FOR_JAX = re.compile(r"(jax|equinox|eqxshard)\b")
#: Of JAX, what reads and writes files, by pickle if asked to.
_FILES = (jnp.load, jnp.save, jnp.savez, jnp.fromfile)
#: Of eqxshard, what starts processes and scripts.
_ENTRIES = re.compile(r"eqxshard\.(debug|launch|planning|run|__main__)\b")


def refer(item: Any, where: str) -> str:
    """The import path of a function or class: `package.module:Class.method`.

    **Raises:**

    `TypeError` if it cannot be imported, such as a lambda, or anything of a notebook.
    """
    module = getattr(item, "__module__", None)
    name = getattr(item, "__qualname__", None) or getattr(item, "__name__", None)
    found = _lookup(sys.modules.get(str(module)), str(name))
    kind = "class" if isinstance(item, type) else type(item).__name__
    if found is item:
        if module == "__main__" and refer_to_script() is None:
            raise TypeError(
                f"{where} is the {kind} {name} of a notebook or a prompt, which cannot be "
                "imported; define it in a module."
            )
        return f"{module}:{name}"
    what = "lambda" if str(name).endswith("<lambda>") else f"{kind} {name}"
    raise TypeError(
        f"{where} is a {what} that cannot be imported; define it by name at the top level "
        "of a module."
    )


def resolve(reference: str, script: str | None, untrusted: Path | None = None) -> Any:
    """Import the object that a reference names.

    **Arguments:**

    - `reference`: from `refer`.
    - `script`: the path of the script that was `__main__`.
    - `untrusted`: a folder from which nothing is imported.

    **Raises:**

    `ValueError` if that is not possible, or not allowed.
    """
    module, _, name = reference.partition(":")
    if module != "__main__":
        _refuse(not _is_for_models(module), reference)
        _refuse_inside(module, untrusted)
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
    home = getattr(found, "__module__", None) or ""
    _refuse(not _is_for_models(home) or found in _FILES, reference)
    # NumPy's other functions may read files, too.
    _refuse(home.startswith("numpy") and not _is_elementwise(found), reference)
    return found


def _refuse(wrong: bool, reference: str) -> None:
    if wrong:
        raise ValueError(
            f"the crash dump refers to {reference}, which no model needs; use only crash "
            "dumps of your own runs."
        )


def _is_elementwise(found: Any) -> bool:
    is_class = isinstance(found, type)
    return isinstance(found, np.ufunc) or (is_class and issubclass(found, np.generic))


def _is_for_models(module: str) -> bool:
    """Whether models may have functions of a module, by the package that it is in."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return package in _HARMLESS or package == "__main__"
    if _ENTRIES.match(module):
        return False
    # One's own code is often not installed.
    owners = _owners().get(package, ())
    return package in _JAX or not owners or any(map(_is_for_jax, owners))


@functools.cache
def _owners() -> Mapping[str, list[str]]:
    """By package, the installed distributions that it is of."""
    return importlib.metadata.packages_distributions()


def _is_for_jax(distribution: str) -> bool:
    requires = importlib.metadata.requires(distribution) or ()
    return any(map(_FOR_JAX.match, requires))


def _refuse_inside(module: str, untrusted: Path | None) -> None:
    """Raise `ValueError` if a module would be imported from a folder."""
    names = module.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        if untrusted is None or name in sys.modules:
            continue
        try:
            # Imports the packages around it, which have been looked at.
            spec = importlib.util.find_spec(name)
        except ImportError:
            spec = None
        places = (spec.origin, *(spec.submodule_search_locations or ())) if spec else ()
        for place in filter(None, places):
            if Path(place).resolve().is_relative_to(untrusted):
                raise ValueError(
                    f"the crash dump refers to {module}, which came with it in {place}; "
                    "move it out of the run's folder to use it."
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
