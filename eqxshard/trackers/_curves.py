"""Plots of the metrics."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ._files import writing
from ._values import is_evaluation, metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"train": "#7a9cc6", "eval": "#c8442f"}


class Curves:
    """Plots the metrics over the epochs, as a PNG.

    Each metric has a panel, with its values in training and in evaluation. The plot is
    redrawn after each evaluation and at the end, and replaced atomically, so it can be
    viewed at any time.

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
        try:
            import matplotlib.figure
        except ImportError as error:
            raise ImportError(
                "Curves needs Matplotlib; install it with `pip install "
                "'eqxshard[recipes]'`."
            ) from error
        self._new_figure = matplotlib.figure.Figure
        self._path = Path(path)
        if self._path.suffix.lower() not in (".png", ""):
            raise ValueError(
                f"Curves writes a PNG, but {os.fspath(path)!r} has another extension; use "
                f"{self._path.with_suffix('.png').name!r}."
            )
        self._title = title
        # The x and y values, by metric, then by train or eval.
        self._series: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        self._x_label, self._x_last = "epoch", 0.0
        with writing(self._path):
            if self._path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            self._part.touch()
            self._part.unlink()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values; redraw the plot if they are an evaluation's."""
        if "epoch" not in values:
            self._x_label = "step"
        x = float(values.get("epoch", step))
        self._x_last = max(self._x_last, x)
        for kind, name, value in metrics(values):
            xs, ys = self._series.setdefault(name, {}).setdefault(kind, ([], []))
            xs.append(x)
            ys.append(float(value))
        if is_evaluation(values):
            self._write()

    def close(self) -> None:
        """Draw the final plot, if there are any values."""
        if self._series:
            self._write()

    @property
    def _part(self) -> Path:
        return self._path.with_name(f".{self._path.name}.part")

    def _write(self) -> None:
        with writing(self._path):
            self._draw().savefig(self._part, format="png", dpi=150)
            os.replace(self._part, self._path)

    def _draw(self) -> "Figure":
        columns = min(len(self._series), 3)
        rows = math.ceil(len(self._series) / columns)
        figure = self._new_figure(
            figsize=(max(4.2 * columns, 5.5), 3.3 * rows), layout="constrained"
        )
        figure.suptitle(self._title, fontsize=11)
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for panel, (name, series) in zip(panels, self._series.items()):
            _draw_metric(panel, name, series)
            panel.set_xlabel(self._x_label)
            panel.set_xlim(0, 1.03 * self._x_last or 1)
        for panel in list(panels)[len(self._series) :]:
            panel.set_axis_off()
        return figure


def _draw_metric(
    panel: "Axes", name: str, series: Mapping[str, tuple[list[float], list[float]]]
) -> None:
    for kind, (xs, ys) in series.items():
        panel.plot(
            xs,
            ys,
            color=_COLOURS.get(kind, "#555555"),
            linewidth=1.2 if kind == "train" else 1.8,
            # A long line is clearer without markers; a single point needs one.
            marker="o" if kind == "eval" or len(xs) == 1 else "",
            markersize=4,
            label=f"{kind or name} {ys[-1]:#.4g}",
        )
    panel.set_title(name, fontsize=11, loc="left")
    panel.locator_params(axis="x", integer=True)
    panel.grid(color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)
