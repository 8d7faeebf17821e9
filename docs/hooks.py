"""Links to names of JAX, without its inventory: the build needs no network."""

import re
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent.parent / "eqxshard"


def on_env(env: Any, config: Any, files: Any) -> None:
    """Say where the names of JAX are that our docstrings refer to."""
    for file in _PACKAGE.rglob("*.py"):
        # [`name`][], or [words][name].
        links = r"\[`(jax\.[\w.]+)`\]\[\]|\]\[(jax\.[\w.]+)\]"
        for found in re.findall(links, file.read_text()):
            name = "".join(found)
            url = f"https://docs.jax.dev/en/latest/_autosummary/{name}.html"
            config.plugins["autorefs"].register_url(name, url)
