"""Tables as plain text."""

import io
from collections.abc import Sequence
from typing import Any


def render(renderable: Any, columns: int = 140) -> str:
    """Anything that rich can print, as plain text at most `columns` characters wide."""
    from rich.console import Console

    text = io.StringIO()
    # In a notebook, rich would show the table there instead.
    console = Console(file=text, width=columns, color_system=None, force_jupyter=False)
    console.print(renderable)
    return text.getvalue().rstrip("\n")


def format_shape(shape: Sequence[int]) -> str:
    """A shape in a table: `4 x 256 x 64`."""
    return " x ".join(map(str, shape)) or "scalar"
