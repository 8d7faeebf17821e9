"""Plots of the metrics."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..distributed import is_main_process
from ..pages._format import format_value
from ..sharding._files import local_path
from ._metrics import Value, is_evaluation, is_installed, metrics, numbers
from ._writing import Seldom, writing

_COLOURS = {"train": "#7a9cc6", "eval": "#c8442f"}


class Curves:
    """Plots the metrics over the epochs, as a PNG.

    Each metric has a panel, with its values in training and in evaluation. The plot is
    redrawn after evaluations, in at most a twentieth of the run's time, and at the end. It
    is replaced atomically, so it can be viewed at any time. With several processes, only
    process 0 draws it.

    **Arguments:**

    - `path`: the file to write, `*.png`. Its folder is created if necessary.
    - `title`: a title above the panels.

    **Raises:**

    `ImportError` if Matplotlib is not installed. `ValueError` if the file has another
    extension, or cannot be written.

    !!! Example

        ```python
        tracker = eqxshard.trackers.Curves("runs/curves.png", title="MLP, Adam 1e-3")
        ```
    """

    def __init__(self, path: str | os.PathLike[str], *, title: str = ""):
        if not is_installed("matplotlib"):
            raise ImportError("Curves needs Matplotlib: `pip install matplotlib`.")
        self._path = local_path(path, "the file")
        if self._path.suffix.lower() not in (".png", ""):
            raise UsageError(
                f"Curves writes a PNG, but {os.fspath(path)!r} has another extension; use "
                f"{self._path.with_suffix('.png').name!r}."
            )
        self._title = title
        # The x and y values, by metric, then by train or eval.
        self._series: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        self._x_label, self._x_last = "epoch", 0.0
        self._seldom = Seldom(20)
        if not is_main_process():
            return
        with writing(self._path):
            if self._path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            self._part.touch()
            self._part.unlink()

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Add the values; if they are an evaluation's, and it is time, redraw the plot."""
        if not is_main_process():
            return
        if "epoch" not in values:
            self._x_label = "step"
        x = float(numbers(values).get("epoch", step))
        self._x_last = max(self._x_last, x)
        for kind, name, value in metrics(values):
            xs, ys = self._series.setdefault(name, {}).setdefault(kind, ([], []))
            xs.append(x)
            ys.append(float(value))
        if is_evaluation(values):
            self._seldom.call(self._write)

    def close(self, error: BaseException | None = None) -> None:
        """Draw the final plot, if there are any values."""
        if self._series:
            self._write()

    @property
    def _part(self) -> Path:
        return self._path.with_name(f".{self._path.name}.part")

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._draw().savefig(self._part, format="png", dpi=150)
        os.replace(self._part, self._path)

    def _draw(self) -> Any:
        """A Matplotlib figure with a panel for each metric."""
        # Imported here, because the import takes longer than a first step.
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            # `fit` logs errors of this type, and goes on.
            raise OSError(f"Matplotlib cannot be imported: {error}") from error

        columns = min(len(self._series), 3)
        rows = math.ceil(len(self._series) / columns)
        size = max(4.2 * columns, 5.5), 3.3 * rows
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(self._title, fontsize=11)
        for place, (name, series) in enumerate(self._series.items(), 1):
            panel = figure.add_subplot(rows, columns, place)
            for kind, (xs, ys) in series.items():
                label = f"{kind or name} {format_value(ys[-1])}"
                # A long line is clearer without markers; a single point needs one.
                marker = "o" if kind == "eval" or len(xs) == 1 else ""
                colour = _COLOURS.get(kind, "#555555")
                panel.plot(xs, ys, color=colour, marker=marker, markersize=4, label=label)
            panel.set_title(name, fontsize=11, loc="left")
            panel.set_xlabel(self._x_label)
            panel.set_xlim(0, 1.03 * self._x_last or 1)
            panel.grid(color="#e6e6e6", linewidth=0.8)
            panel.legend(frameon=False, fontsize=9)
        return figure
