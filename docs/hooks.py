"""Hooks of MkDocs: links to names of JAX, and the plots of the benchmarks."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).parent.parent
_PLOTS = "benchmarks/results"


def on_files(files: Any, config: Any) -> None:
    """Add the plots of the benchmarks, which are not in the folder of the pages."""
    for plot in sorted((_ROOT / _PLOTS).glob("*.png")):
        uri = f"{_PLOTS}/{plot.name}"
        files.append(File.generated(config, uri, abs_src_path=str(plot)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link to these plots, which the pages link to where the repository has them."""
    return markdown.replace(f"](../../{_PLOTS}/", f"]({_PLOTS}/")


def on_env(env: Any, config: Any, files: Any) -> None:
    """Register the URLs of JAX's names, without its inventory: no network is needed."""
    for file in (_ROOT / "eqxshard").rglob("*.py"):
        # [`name`][], or [words][name].
        links = r"\[`(jax\.[\w.]+)`\]\[\]|\]\[(jax\.[\w.]+)\]"
        for found in re.findall(links, file.read_text()):
            name = "".join(found)
            url = f"https://docs.jax.dev/en/latest/_autosummary/{name}.html"
            config.plugins["autorefs"].register_url(name, url)
