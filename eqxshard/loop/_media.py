"""Pictures and histograms, which are logged like numbers."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import ArrayLike


class Image:
    """A picture to log: `run.log({"samples": eqxshard.trackers.Image(pixels)})`.

    - `pixels`: a NumPy array of bytes, rows by columns by 1, 3 or 4 channels.

    **Arguments:**

    - `pixels`: an array of rows by columns (grey), or of rows by columns by channels: 1 for
        grey, 3 for red, green and blue, 4 with opacity. Of bytes, or of floating-point
        numbers from 0 to 1; numbers beyond are cut off.

    **Raises:**

    `ValueError` for arrays of other shapes or dtypes.

    !!! Example

        ```python
        image = eqxshard.trackers.Image(np.zeros((28, 28)))
        ```
    """

    def __init__(self, pixels: ArrayLike):
        found = np.asarray(pixels)
        shape = found.shape
        if found.ndim == 2:
            found = found[..., None]
        if found.ndim != 3 or found.shape[-1] not in (1, 3, 4) or not found.size:
            raise ValueError(
                f"an image cannot have the shape {shape}; give rows by columns, or rows by "
                "columns by 1, 3 or 4 channels."
            )
        # `issubdtype` of JAX knows bfloat16.
        if jnp.issubdtype(found.dtype, jnp.floating):
            cut = np.nan_to_num(np.clip(found.astype(np.float32), 0, 1))
            found = np.round(255 * cut).astype(np.uint8)
        if found.dtype != np.uint8:
            raise ValueError(
                f"an image cannot be of {found.dtype}; give bytes (uint8), or "
                "floating-point numbers from 0 to 1."
            )
        self.pixels = found


class Histogram:
    """The distribution of an array's values, to log: of weights, say, or activations.

    It is computed where the array is, on its devices; only the counts come to the host.

    - `counts`: how many values are in each bin, as a NumPy array.
    - `edges`: the bins' edges, one more than there are bins.

    **Arguments:**

    - `values`: an array of numbers. Those that are not finite are not counted. If it is
        split over several processes, all of them must make the histogram.
    - `bins`: how many bins of equal width there are, from the least value to the greatest.

    **Raises:**

    `ValueError` if the array is empty, or `bins` is not positive.

    !!! Example

        ```python
        weights = eqxshard.trackers.Histogram(jnp.linspace(-1.0, 1.0, 100))
        ```
    """

    def __init__(self, values: ArrayLike, bins: int = 64):
        if bins < 1:
            raise ValueError(f"bins={bins} must be at least 1.")
        array = jnp.asarray(values)
        if not array.size:
            raise ValueError(
                f"an array of shape {array.shape} has no histogram; give one with values."
            )
        whole = None
        if isinstance(array.sharding, NamedSharding):
            # Every process can read what each device has.
            whole = NamedSharding(array.sharding.mesh, PartitionSpec())
        counts, low, high = jax.device_get(_jitted(whole)(array, bins))
        self.counts = np.asarray(counts)
        # As Python's floats: in float32, neighbouring edges could be equal.
        self.edges = np.linspace(float(low), float(high), bins + 1)


@functools.cache
def _jitted(out_sharding: NamedSharding | None) -> Any:
    return jax.jit(_count, static_argnums=1, out_shardings=out_sharding)


def _count(array: jax.Array, bins: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The numbers of values in bins of equal width, and the bins' outer edges."""
    array = jnp.atleast_1d(array).astype(jnp.float32)
    finite = jnp.isfinite(array)
    low = jnp.min(array, initial=jnp.inf, where=finite)
    high = jnp.max(array, initial=-jnp.inf, where=finite)
    low, high = (jnp.where(finite.any(), edge, 0.0) for edge in (low, high))
    # Values that are all the same need room: more of it where float32 is coarser.
    room = jnp.where(high > low, 0.0, jnp.maximum(0.5, 1e-6 * jnp.abs(low)))
    low, high = low - room, high + room
    bin_of = jnp.clip(jnp.floor((array - low) / (high - low) * bins), 0, bins - 1)
    # Beyond the last bin, what is not finite is dropped.
    bin_of = jnp.where(finite, bin_of, bins).astype(jnp.int32)
    counts = jnp.zeros(bins, jnp.int32).at[bin_of].add(1, mode="drop")
    return counts, low, high


Media = Image | Histogram
#: What can be logged.
Value = float | Image | Histogram


def numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """The values that are numbers."""
    return {k: value for k, value in values.items() if not isinstance(value, Media)}
