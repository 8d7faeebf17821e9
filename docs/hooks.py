"""Hooks of MkDocs: links to names of JAX, plots of the benchmarks, pictures of arrays."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).parent.parent
_PLOTS = "benchmarks/results"
#: A block of Python that ends with pictures, and the output after it.
_BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE
)
_PICTURE = re.compile(r"^eqxshard\.draw\(.*\)\.save\(\"([\w-]+\.html)\"\)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> None:
    """Add the plots of the benchmarks, which are not in the folder of the pages."""
    for plot in sorted((_ROOT / _PLOTS).glob("*.png")):
        uri = f"{_PLOTS}/{plot.name}"
        files.append(File.generated(config, uri, abs_src_path=str(plot)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link to these plots where they are now, and show what code draws below it."""
    markdown = markdown.replace(f"](../../{_PLOTS}/", f"]({_PLOTS}/")
    return _BLOCK.sub(_with_pictures, markdown)


def _with_pictures(block: re.Match[str]) -> str:
    """A block of Python, and the pictures that it saves, which a test holds to be these."""
    files = [_ROOT / "docs/pictures" / name for name in _PICTURE.findall(block[1])]
    pictures = "".join(file.read_text() for file in files)
    return f'{block[0]}\n<div class="figures">\n{pictures}</div>\n' if files else block[0]


def on_env(env: Any, config: Any, files: Any) -> None:
    """Register the URLs of JAX's names, without its inventory: no network is needed."""
    for file in (_ROOT / "eqxshard").rglob("*.py"):
        # [`name`][], or [words][name].
        links = r"\[`(jax\.[\w.]+)`\]\[\]|\]\[(jax\.[\w.]+)\]"
        for found in re.findall(links, file.read_text()):
            name = "".join(found)
            url = f"https://docs.jax.dev/en/latest/_autosummary/{name}.html"
            config.plugins["autorefs"].register_url(name, url)
