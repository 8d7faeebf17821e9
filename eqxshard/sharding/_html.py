"""Tables as HTML, for notebooks, in the colours of the page around them."""

from collections.abc import Sequence
from html import escape


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose rows begin with a name; all of its text is escaped.

    **Arguments:**

    - `head`: the names of the columns; empty for none.
    - `rows`: the cells of each row.
    """
    left = ' style="text-align:left"'
    lines = ["<table>"]
    if head:
        cells = (f'<th scope="col"{left}>{escape(name)}</th>' for name in head)
        lines.append(f"<thead><tr>{''.join(cells)}</tr></thead>")
    lines.append("<tbody>")
    for name, *rest in rows:
        cells = (f"<td{left}>{escape(text)}</td>" for text in rest)
        lines.append(f'<tr><th scope="row"{left}>{escape(name)}</th>{"".join(cells)}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])
