"""Optional packages: which are installed, and what is only a folder of their name."""

import importlib.util


def is_installed(package: str) -> bool:
    """Whether a package can be imported.

    A folder of its name, such as a `wandb` that an earlier run wrote beside the script,
    could be imported as well, as a namespace package without anything in it.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.has_location
