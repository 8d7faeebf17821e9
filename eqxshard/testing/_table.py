"""Tables as plain text, for messages and logs."""

import io

from rich.console import Console
from rich.table import Table


def rendered(table: Table) -> str:
    """A table as plain text."""
    text = io.StringIO()
    Console(file=text, width=140, color_system=None).print(table)
    return text.getvalue().rstrip("\n")
