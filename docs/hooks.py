"""Hooks of MkDocs: what the sources, which read well on a forge, become on the site.

- Names of the API in the text, such as `eqxshard.fit`, become links.
- Links to files outside of the folder of the pages lead to what the site has of them.
- Pictures that the library draws are part of the page, to whose width they shrink.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).parent.parent
_PAGES = "docs/pages"
_PLOTS = "benchmarks/results"
#: Files of this repository, and where the site has them.
_PLACES = {
    r"recipes/gallery/(\w+)\.py": r"gallery/\1.md",
    r"docs/notebooks/(\w+)\.ipynb": r"notebooks/\1.md",
    rf"({_PLOTS}/\w+\.png)": r"\1",
    r"\.github/CONTRIBUTING\.md": "contributing.md",
}
_OUTSIDE = re.compile(r"(?<=\]\()(?:\.\./)+[\w./-]+(?=[)#])")
#: A picture, with a caption for readers who cannot see it.
_PICTURE = re.compile(
    r"^!\[[^\]]*\]\((?:\.\./)+pictures/([\w-]+\.svg)\)$", re.MULTILINE
)
#: Code in a line of text, not in a link; the ends of the links that a dot separates.
_CODE = re.compile(r"(?<![\[`])`(eqxshard(?:\.\w+)+)((?:\([^`\n]*)?)`(?!\])")
_BUTTON = re.compile(r"(?<=\))(?: ·(?=\s\[)|$(?=\n\n</div>))", re.MULTILINE)
_FENCE = re.compile(r"^( *)```.*?^\1```$|^#.*?$", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> None:
    """Add what is not in the folder of the pages: plots, recipes, a page for GitHub."""
    for plot in sorted((_ROOT / _PLOTS).glob("*.png")):
        uri = f"{_PLOTS}/{plot.name}"
        files.append(File.generated(config, uri, abs_src_path=str(plot)))
    text = (_ROOT / ".github" / "CONTRIBUTING.md").read_text()
    text = text.replace(f"](../{_PAGES}/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    for file in sorted((_ROOT / "recipes/gallery").glob("*.py")):
        text = f"# {file.name}\n\n```python\n{file.read_text()}```\n"
        files.append(File.generated(config, f"gallery/{file.stem}.md", content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The source of a page, for the site."""
    folder = os.path.dirname(page.file.src_uri)

    def find(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(_PAGES, folder, link[0]))
        for pattern, place in _PLACES.items():
            if found := re.fullmatch(pattern, path):
                return os.path.relpath(found.expand(place), folder or ".")
        return link[0]

    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        markdown = _BUTTON.sub("{ .md-button }", markdown)
    markdown = _PICTURE.sub(_show, markdown)
    markdown = _OUTSIDE.sub(find, markdown)
    kept = [match[0] for match in _FENCE.finditer(markdown)]
    texts = _FENCE.sub("\0", markdown).split("\0")
    names = _names()
    texts = [_CODE.sub(lambda code: _link(code, names), text) for text in texts]
    return "".join(map("".join, zip(texts, [*kept, ""], strict=True)))


def _show(picture: re.Match[str]) -> str:
    """A picture as a part of the page."""
    svg = (_ROOT / "docs/pictures" / picture[1]).read_text()
    return f"<div>\n{svg}\n</div>"


def _names() -> set[str]:
    """The names that the pages of the API have."""
    names = set[str]()
    for page in (_ROOT / _PAGES / "api").glob("*.md"):
        shown = re.findall(
            r"^::: (\S+)(?:\n +options: {members: \[(.*)\]})?",
            page.read_text(),
            re.MULTILINE,
        )
        for name, members in shown:
            names |= {name, *(f"{name}.{x}" for x in members.split(", ") if x)}
    return names


def _link(code: re.Match[str], names: set[str]) -> str:
    return f"[{code[0]}][{code[1]}]" if code[1] in names else code[0]


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
    """List this one version, unless mike does: browsers report a missing list."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        version = {"version": ".", "title": "this checkout", "aliases": []}
        Path(config.site_dir, "versions.json").write_text(json.dumps([version]))
