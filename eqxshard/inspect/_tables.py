"""Tables as plain text."""

import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple


def render(renderable: Any) -> str:
    """Anything that rich can print, as plain text of at most 140 columns."""
    from rich.console import Console

    text = io.StringIO()
    # In a notebook, rich would show the table there instead.
    console = Console(file=text, width=140, color_system=None, force_jupyter=False)
    console.print(renderable)
    return text.getvalue().rstrip("\n")


class BreakablePath(NamedTuple):
    """A path that is broken at its dots if a line is too short for it."""

    path: str

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        return Measurement(max(map(len, self._parts())), len(self.path))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        lines = [""]
        for part in self._parts():
            if len(lines[-1] + part) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(filter(None, lines)), overflow="fold")

    def _parts(self) -> list[str]:
        return re.findall(r"[^.]*\.?", self.path)
