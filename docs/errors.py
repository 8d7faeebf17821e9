"""A hook of MkDocs: the page of all errors, from the lines that raise them."""

import ast
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).parent.parent / "eqxshard"

_HEAD = """# Errors

Errors of eqxshard say what is wrong, with names and sizes, and what to do. Search this page
for what you saw: it is made from the lines that raise them. *Words in italics* are what
differs from case to case. The most common ones are shown with examples in [Coming from
Equinox](guide/from-equinox.md#errors-and-what-they-mean). At a command line an error is one
line, and the exit status is 2.
"""

#: The rooms that raise them, as readers know them.
_ROOMS = {
    "sharding": "Meshes and rules",
    "training": "States and steps",
    "transforms": "Functions of arrays",
    "data": "Data",
    "loop": "The loop",
    "callbacks": "The loop",
    "checkpoint": "Checkpoints and weights",
    "run": "Scripts",
    "parallel": "Explicit parallelism",
    "nn": "Parts of language models",
    "inspect": "Tables, pictures and lint",
    "compiled": "Tables, pictures and lint",
    "planning": "Plans",
    "testing": "Testing",
    "debug": "Crash dumps",
    "trackers": "Trackers",
}
_OTHERS = "Processes and commands"


class Error(NamedTuple):
    """An error, as HTML."""

    room: str
    kind: str
    wrong: str
    remedy: str


def on_files(files: Any, config: Any) -> None:
    """Add the page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "errors.md", content=page()))


def page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD]
    found = list(errors())
    for room in dict.fromkeys([*_ROOMS.values(), _OTHERS]):
        here = sorted({error for error in found if error.room == room})
        if here:
            parts.append(f"\n## {room}\n\n<dl class='errors'>")
            for error in here:
                parts.append(f"<dt><code>{error.kind}</code> {error.wrong}</dt>")
                parts.append(f"<dd>{error.remedy}</dd>" if error.remedy else "")
            parts.append("</dl>")
    return "\n".join(parts) + "\n"


def errors() -> Iterator[Error]:
    """The errors whose words are where they are raised."""
    for file in sorted(_PACKAGE.rglob("*.py")):
        room = _ROOMS.get(file.relative_to(_PACKAGE).parts[0], _OTHERS)
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            kind = ast.unparse(node.exc.func)
            message = _words(node.exc.args[0]) if node.exc.args else ""
            # What ends without a full stop becomes a part of another message.
            if len(message.split()) > 3 and not re.search(r"[\w)]$", message):
                wrong, found, remedy = message.partition("; ")
                remedy = remedy[:1].upper() + remedy[1:]
                yield Error(room, kind, wrong + "." * bool(found), remedy)


def _words(node: ast.expr) -> str:
    """The text of an expression, with the names of what is filled in."""
    if isinstance(node, ast.Constant):
        return escape(str(node.value), quote=False)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_words, node.values))
    if isinstance(node, ast.BinOp):
        return _words(node.left) + _words(node.right)
    if isinstance(node, ast.IfExp):
        return _words(node.body)
    if isinstance(node, ast.FormattedValue):
        node = node.value
    names = [x for x in ast.walk(node) if isinstance(x, ast.Attribute | ast.Name)]
    last = names[0] if names else None
    name = last.attr if isinstance(last, ast.Attribute) else getattr(last, "id", "…")
    return f"<em>{escape(name.strip('_').replace('_', ' '))}</em>"
