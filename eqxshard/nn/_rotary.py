"""`rotary`: positions as rotations of queries and keys."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._errors import UsageError
from ..transforms._dtypes import accumulation_dtype


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's change of frequencies, for texts longer than those of the training.

    A pair of features whose wavelength is longer than `original_length /
    low_frequency_factor` positions turns `factor` times slower; one whose wavelength is
    shorter than `original_length / high_frequency_factor` turns as before; between these
    wavelengths, the speed is interpolated. The values are those of `rope_scaling` in the
    configuration files of Hugging Face where its `rope_type` is `"llama3"`.

    **Arguments:**

    - `factor`: how many times slower the slow pairs turn.
    - `low_frequency_factor`, `high_frequency_factor`: the factors of the two wavelengths.
    - `original_length`: the length of the texts that the model was first trained on, in
        tokens.

    **Raises:**

    `ValueError` if a number is not positive, or `low_frequency_factor` is not less than
    `high_frequency_factor`.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int

    def __post_init__(self) -> None:
        ordered = 0 < self.low_frequency_factor < self.high_frequency_factor
        if not ordered or self.factor <= 0 or self.original_length <= 0:
            raise UsageError(
                f"{self} has a number that is not positive, or a low_frequency_factor that "
                "is not below high_frequency_factor; Llama 3.1 has 8, 1, 4 and 8192."
            )


def rotary(
    x: Float[Array, "*batch seq heads head_dim"],
    positions: Int[Array, "*batch seq"],
    *,
    theta: float = 10_000.0,
    scaling: RotaryScaling | None = None,
) -> Float[Array, "*batch seq heads head_dim"]:
    """Rotate queries or keys by their positions (Su et al. 2021, RoFormer,
    https://arxiv.org/abs/2104.09864).

    The features of a head are rotated in pairs, those of the first half with those of the
    second, as in Hugging Face's Llama. Frequencies are computed in float32, and angles in
    float32 or better, from the positions themselves. There is no cache, so this works on
    any mesh, for packed documents (positions that begin again) and for decoding (positions
    that begin late).

    **Arguments:**

    - `x`: queries or keys. Under `jax.vmap`, those of one example.
    - `positions`: the position of each token, such as `jnp.arange(seq)`.
    - `theta`: the base of the wavelengths, which are `2 * pi` to `2 * pi * theta`.
    - `scaling`: Llama 3.1's change of the frequencies; none by default.

    **Returns:**

    An array of the shape and dtype of `x`.

    **Raises:**

    `ValueError` if the number of features is odd.

    !!! Example

        ```python
        query = eqxshard.nn.rotary(query, positions)
        key = eqxshard.nn.rotary(key, positions)
        out = eqxshard.nn.attention(query, key, value, causal=True)
        ```
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise UsageError(
            f"rotary rotates features in pairs, but x {x.shape} has {head_dim} of them; "
            "use an even head_dim."
        )
    dtype = accumulation_dtype(x.dtype)
    frequencies = _frequencies(head_dim, theta, scaling).astype(dtype)
    angles = jnp.expand_dims(positions, (-2, -1)).astype(dtype) * jnp.expand_dims(
        frequencies, tuple(range(positions.ndim + 1))
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return rotated.astype(x.dtype)


def _frequencies(
    head_dim: int, theta: float, scaling: RotaryScaling | None
) -> Float[Array, " pairs"]:
    """The angle of each pair of features from one position to the next."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / jnp.float32(theta) ** exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
