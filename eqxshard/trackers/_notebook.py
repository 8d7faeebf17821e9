"""A progress bar in the output of a notebook's cell."""

import importlib
import time
from datetime import timedelta
from html import escape
from typing import Any


class NotebookBar:
    """A bar that is redrawn in its place, below which the cell's other output appears.

    It needs nothing but IPython, which runs the notebook.

    **Arguments:**

    - `total`: the number of steps at the end.
    """

    def __init__(self, total: int):
        self._total = total
        self._start: tuple[int, float] | None = None
        self._handle: Any = None
        self._step, self._text = 0, ""

    def move(self, step: int, text: str) -> None:
        """Show a step, and text beside the bar."""
        now = time.monotonic()
        first, start = self._start = self._start or (step, now)
        self._step, self._text = step, text
        if first < step < self._total:
            seconds = (now - start) / (step - first) * (self._total - step)
            self._text += f"  {timedelta(seconds=round(seconds))} left"
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        return f"{self._step}/{self._total}  {self._text}"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self._step}" max="{self._total}"></progress>'
        return f'<div style="white-space:pre-wrap">{bar} {escape(repr(self))}</div>'
