"""Optional packages: which are installed, how to install one, and what its errors say."""

import importlib
import importlib.util
from typing import Any


def is_installed(package: str) -> bool:
    """Whether a package can be imported.

    A folder of its name, such as a `wandb` that an earlier run wrote beside the script,
    could be imported as well, as a namespace package without anything in it.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.has_location


def load(module: str, tracker: str, install: str) -> Any:
    """Import a module that a tracker needs.

    **Arguments:**

    - `module`: its name, with that of its package.
    - `tracker`: what needs it.
    - `install`: what `pip install` is to install.

    **Raises:**

    `ImportError` that says how to install it.
    """
    package = module.partition(".")[0]
    missing = ImportError(
        f"{tracker} needs {package}; install it with `pip install {install}`."
    )
    if not is_installed(package):
        raise missing
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing from error


def one_line(error: Exception) -> str:
    """What an error says, as a sentence on one line."""
    return f"{' '.join(str(error).split()).rstrip('.')}."
