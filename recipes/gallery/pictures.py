"""Pictures of results, for light and for dark pages."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import matplotlib
import matplotlib.image
import numpy as np
from matplotlib.figure import Figure

INK = "#7f868d"
COLORS = ("#3b8fc4", "#e08214", "#3fa66b")
_STYLE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "legend.frameon": False,
}


@contextmanager
def figure(
    path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6.4, 3)
) -> Iterator[np.ndarray]:
    """Axes to draw on; the first process saves them at the end."""
    with matplotlib.rc_context(_STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        yield drawn.subplots(rows, columns, squeeze=False)
        if jax.process_index() == 0:
            drawn.savefig(path)


def save_images(path: Path, images: np.ndarray) -> None:
    """Save bytes of shape (rows, columns, height, width), or with 3 colours, as a grid."""
    rows, columns, height, width, *colors = images.shape
    whole = np.moveaxis(images, 2, 1).reshape(rows * height, columns * width, *colors)
    if jax.process_index() == 0:
        matplotlib.image.imsave(path, whole, cmap="gray", vmin=0, vmax=255)


def save_guesses(path: Path, batch: Any, logits: Any, names: list[str]) -> None:
    """Save 24 images with the names that a model guesses: green if it is right."""
    guesses = np.asarray(logits).argmax(axis=-1)
    with figure(path, 3, 8, size=(7, 3.2)) as axes:
        examples = zip(axes.flat, batch["image"], batch["label"], guesses)
        for ax, image, label, guess in examples:
            ax.imshow(image, cmap="gray")
            ax.set_axis_off()
            color = COLORS[2] if guess == label else COLORS[1]
            ax.set_title(names[guess], color=color, fontsize=8)
