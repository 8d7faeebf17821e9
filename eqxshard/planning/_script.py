"""The user's script: where it is, and its import without running it."""

import importlib.util
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from .._errors import UsageError

#: The name under which a script that was run as `__main__` is imported again.
_NAME = "eqxshard_imported_script"

_importing = ContextVar("eqxshard_importing", default=False)


def script_path() -> str | None:
    """The path of the script that runs as `__main__`; `None` in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return None if file is None else str(Path(file).resolve())


def import_script(path: str) -> ModuleType:
    """Import a script as a module, once, without what it does as `__main__`.

    **Raises:**

    `ValueError` if there is no such script.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UsageError(
            f"there is no Python script {path!r}; give the path of the one that ran."
        )
    module = sys.modules[_NAME] = importlib.util.module_from_spec(spec)
    # As for `__main__`, for the modules beside it.
    sys.path.insert(0, str(Path(path).resolve().parent))
    token = _importing.set(True)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    finally:
        _importing.reset(token)
    return module


def refuse_import(what: str) -> None:
    """Raise `ValueError` while a script is only imported for what it defines."""
    if _importing.get():
        raise UsageError(
            f"{what} is called when this script is imported, for a plan; put "
            "the call under `if __name__ == '__main__':`."
        )
