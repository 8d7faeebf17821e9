"""`Tracker`, the protocol of what `fit` reports to, and `Image`, a picture to log."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from .._errors import UsageError, UsageTypeError


class Image:
    """A picture to log: `loop.log({"samples": eqxshard.trackers.Image(pixels)})`.

    - `pixels`: a NumPy array of bytes, rows by columns by 1, 3 or 4 channels.

    **Arguments:**

    - `pixels`: an array of rows by columns (grey), or of rows by columns by channels: 1 for
        grey, 3 for red, green and blue, 4 with opacity. Its values are bytes (`uint8`), or
        floating-point numbers from 0 to 1; those outside are clipped.

    **Raises:**

    `ValueError` for arrays of other shapes or dtypes.

    !!! Example

        ```python
        image = eqxshard.trackers.Image(np.zeros((28, 28)))
        ```
    """

    def __init__(self, pixels: ArrayLike):
        given = found = np.asarray(pixels)
        if found.ndim == 2:
            found = found[..., None]
        # `issubdtype` of JAX knows bfloat16.
        if jnp.issubdtype(found.dtype, jnp.floating):
            cut = np.nan_to_num(np.clip(found.astype(np.float32), 0, 1))
            found = np.round(255 * cut).astype(np.uint8)
        is_image = found.ndim == 3 and found.shape[-1] in (1, 3, 4) and found.size
        if found.dtype != np.uint8 or not is_image:
            raise UsageError(
                f"an array of {given.dtype} and shape {given.shape} is not an image; give "
                "rows by columns, or rows by columns by 1, 3 or 4 channels, of bytes "
                "(uint8) or of floating-point numbers from 0 to 1."
            )
        self.pixels = found


#: A value that can be logged.
Value = float | Image


def numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """The values that are numbers."""
    return {k: value for k, value in values.items() if not isinstance(value, Image)}


@runtime_checkable
class Tracker(Protocol):
    """Receives what [`eqxshard.fit`][] reports, and shows or stores it."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Receive values by name, after a number of finished steps.

        They are numbers; and, if a callback or an evaluation of the run logs them,
        [`eqxshard.trackers.Image`][]s.
        """
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Called once, when the run ends.

        If it did not finish, `error` is what ended it: a `KeyboardInterrupt` or a
        `SystemExit` if somebody stopped it.
        """
        ...


def check_trackers(trackers: Sequence[Any]) -> None:
    """Refuse trackers without the methods that `fit` calls, before it calls them."""
    if not isinstance(trackers, Collection):
        what = type(trackers).__name__
        raise UsageTypeError(f"trackers= is a {what}; give a list of trackers.")
    for tracker in trackers:
        try:
            inspect.signature(tracker.log).bind(0, {})
            inspect.signature(tracker.close).bind(None)
        except (AttributeError, TypeError):
            raise UsageTypeError(
                f"a {type(tracker).__name__} is not a tracker; give an object with "
                "log(step, values) and close(error=None)."
            ) from None
