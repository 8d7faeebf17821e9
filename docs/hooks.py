"""Hooks of MkDocs: links to names of JAX, and what the pages show from other folders."""

import json
import os
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
_NAMED = re.compile(r"^<!-- picture: ([\w-]+\.html) -->$", re.MULTILINE)
_PICTURE = re.compile(r"^eqxshard\.draw\(.*\)\.save\(\"([\w-]+\.html)\"\)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> None:
    """Add what is not in the folder of the pages: plots, recipes, a page for GitHub."""
    for plot in sorted((_ROOT / _PLOTS).glob("*.png")):
        uri = f"{_PLOTS}/{plot.name}"
        files.append(File.generated(config, uri, abs_src_path=str(plot)))
    text = (_ROOT / ".github" / "CONTRIBUTING.md").read_text()
    text = text.replace("](../docs/pages/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    for file in sorted((_ROOT / "recipes/gallery").glob("*.py")):
        text = f"# {file.name}\n\n```python\n{file.read_text()}```\n"
        files.append(File.generated(config, f"gallery/{file.stem}.md", content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link to these plots where they are now, and show what code draws below it."""
    markdown = markdown.replace(f"](../../{_PLOTS}/", f"]({_PLOTS}/")
    markdown = _NAMED.sub(lambda name: _show([name[1]]), markdown)
    return _BLOCK.sub(lambda block: block[0] + _show(_PICTURE.findall(block[1])), markdown)


def _show(names: list[str]) -> str:
    """Pictures, which a test holds to be what programs of the pages draw."""
    pictures = [(_ROOT / "docs/pictures" / name).read_text() for name in names]
    return f'\n<div class="figures">\n{"".join(pictures)}</div>\n' if names else ""


def on_env(env: Any, config: Any, files: Any) -> None:
    """Register the URLs of JAX's names, without its inventory: no network is needed."""
    for file in (_ROOT / "eqxshard").rglob("*.py"):
        # [`name`][], or [words][name].
        links = r"\[`(jax\.[\w.]+)`\]\[\]|\]\[(jax\.[\w.]+)\]"
        for found in re.findall(links, file.read_text()):
            name = "".join(found)
            url = f"https://docs.jax.dev/en/latest/_autosummary/{name}.html"
            config.plugins["autorefs"].register_url(name, url)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Load plots when they come into view."""
    return html.replace("<img ", '<img loading="lazy" ')


def on_post_build(config: Any) -> None:
    """List this one version, unless mike does: browsers report a list that is not there."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        version = {"version": ".", "title": "this checkout", "aliases": []}
        Path(config.site_dir, "versions.json").write_text(json.dumps([version]))
