"""A hook of MkDocs: the page of all errors, from the lines and the tests that raise them.

`nox -s errors` records what the tests raise, and has this keep an example of each error in
`errors.json`:

    python docs/errors.py recorded.txt
"""

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).parent.parent / "eqxshard"
_EXAMPLES = Path(__file__).with_suffix(".json")

_HEAD = """# Errors

Errors of eqxshard say what is wrong, with names and sizes, and what to do. Search this page
for what you saw: it is made from the lines that raise them. *Words in italics* are what
differs from case to case; below is what a test of the error saw. The most common ones are
shown with the code that raises them in [Coming from
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
_NO_STOP = r"[\w),] ?(<em>[^<]*</em>)?$"


class Error(NamedTuple):
    """An error, as HTML, and the pattern of its messages."""

    room: str
    kind: str
    wrong: str
    remedy: str
    pattern: str


def on_files(files: Any, config: Any) -> None:
    """Add the page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "errors.md", content=page()))


def page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD]
    found, seen = list(errors()), examples()
    for room in dict.fromkeys([*_ROOMS.values(), _OTHERS]):
        here = sorted({error for error in found if error.room == room})
        if here:
            parts.append(f"\n## {room}\n\n<dl class='errors'>")
            for error in here:
                parts.append(f"<dt><code>{error.kind}</code> {error.wrong}</dt>")
                parts.append(f"<dd>{error.remedy}</dd>" if error.remedy else "")
                example = example_of(error, seen)
                if example and "<em>" in error.wrong + error.remedy:
                    parts.append(f"<dd class='example'>{escape(example)}</dd>")
            parts.append("</dl>")
    return "\n".join(parts) + "\n"


def errors() -> Iterator[Error]:
    """The errors whose words are where they are raised."""
    for file in sorted(_PACKAGE.rglob("*.py")):
        room = _ROOMS.get(file.relative_to(_PACKAGE).parts[0], _OTHERS)
        for node in ast.walk(ast.parse(file.read_text())):
            exc = node.exc if isinstance(node, ast.Raise) else None
            # A few are returned, for others to raise.
            if isinstance(node, ast.Return) and _is_error(node.value):
                exc = node.value
            if not isinstance(exc, ast.Call):
                continue
            kind = ast.unparse(exc.func)
            message = _words(exc.args[0]) if exc.args else ""
            # Private ones, and what ends without a full stop, become a part of another
            # message.
            part = kind.startswith("_") or re.search(_NO_STOP, message)
            if len(message.split()) > 3 and not part:
                wrong, found, remedy = message.partition("; ")
                remedy = remedy[:1].upper() + remedy[1:]
                pattern = _pattern(exc.args[0])
                yield Error(room, kind, wrong + "." * bool(found), remedy, pattern)


def _is_error(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error")


def examples() -> list[str]:
    """The messages that are kept, an example of each error that a test raises."""
    return json.loads(_EXAMPLES.read_text())


def example_of(error: Error, messages: Iterable[str]) -> str | None:
    """The shortest of some messages that are of an error."""
    fitting = [text for text in messages if re.fullmatch(error.pattern, text, re.DOTALL)]
    return min(fitting, key=lambda text: (len(text), text), default=None)


def _pattern(node: ast.expr) -> str:
    """A regular expression for what an expression may be."""
    parts = _parts(node)
    return "".join(re.escape(x) if isinstance(x, str) else ".*" for x in parts)


def _words(node: ast.expr) -> str:
    """The text of an expression, with the names of what is filled in."""
    parts = _parts(node)
    return "".join(
        escape(x, quote=False) if isinstance(x, str) else _name(x) for x in parts
    )


def _parts(node: ast.expr) -> Iterator[str | ast.expr]:
    """The texts of an expression, and between them the expressions that fill it in."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _parts(value)
    elif isinstance(node, ast.BinOp):
        yield from _parts(node.left)
        yield from _parts(node.right)
    else:
        yield node


def _name(node: ast.expr) -> str:
    """What is filled in, in words."""
    if isinstance(node, ast.IfExp):
        return _words(node.body)
    if isinstance(node, ast.FormattedValue):
        node = node.value
    names = [x for x in ast.walk(node) if isinstance(x, ast.Attribute | ast.Name)]
    last = names[0] if names else None
    name = last.attr if isinstance(last, ast.Attribute) else getattr(last, "id", "…")
    return f"<em>{escape(name.strip('_').replace('_', ' '))}</em>"


def main() -> None:
    """Keep an example of each error, of those before and of those recorded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recorded", type=Path, help="messages, as JSON, one in each line")
    lines = parser.parse_args().recorded.read_text().splitlines()
    old, new = examples(), sorted({json.loads(line) for line in lines})
    # What was kept stays, if it is still what an error says: so little changes at a time.
    found = [example_of(error, old) or example_of(error, new) for error in errors()]
    text = json.dumps(sorted({*filter(None, found)}), indent=1, ensure_ascii=False)
    _EXAMPLES.write_text(text + "\n")


if __name__ == "__main__":
    main()
