"""Random numbers for each example, the same wherever and whenever it is read.

The keys are those of `jax.random`, and so is the generator, threefry2x32 with 20 rounds
([Salmon et al., 2011](https://doi.org/10.1145/2063384.2063405)): a number is a hash of a
key and a counter, so those of all examples are computed at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int64, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

#: One number, or an array of them.
Number = float | int | np.ndarray


class ExampleRandom:
    """Draws random numbers for each example of a batch.

    An [`eqxshard.data.RandomTransform`][] gets one for each batch.

    Row `i` of every result belongs to example `i`, and does not depend on the others.
    Each call draws new numbers. They are a function of the key and of the number of calls
    before, whatever the shapes that were drawn.

    **Arguments:**

    - `keys`: a key for each example, as of `jax.random.key_data`. The attribute `keys`
        holds them: put them into the batch to draw on the devices, with
        `jax.random.wrap_key_data`.

    !!! Example

        ```python
        keys = jax.random.key_data(jax.random.split(jax.random.key(0), 8))
        augment(batch, eqxshard.data.ExampleRandom(np.asarray(keys)))
        ```
    """

    def __init__(self, keys: UInt32[np.ndarray, "rows 2"]):
        self.keys = keys
        self._calls = 0

    def uniform(
        self, low: Number = 0.0, high: Number = 1.0, shape: tuple[int, ...] = ()
    ) -> Float32[np.ndarray, "rows ..."]:
        """Numbers between `low` (included) and `high`.

        **Arguments:**

        - `low`, `high`: numbers, or arrays that broadcast to the result, such as one
            number per example.
        - `shape`: what to draw for each example, one number by default.

        **Returns:**

        An array of one row of `shape` per example.
        """
        unit = (self._bits(shape) >> 8).astype(np.float32) * np.float32(2**-24)
        start = np.asarray(low, np.float32)
        return start + (np.asarray(high, np.float32) - start) * unit

    def integers(
        self, low: Number, high: Number, shape: tuple[int, ...] = ()
    ) -> Int64[np.ndarray, "rows ..."]:
        """Integers from `low` to `high - 1`.

        **Arguments:**

        - `low`, `high`: integers, or arrays that broadcast to the result, such as one
            integer per example.
        - `shape`: what to draw for each example, one number by default.

        **Returns:**

        An array of one row of `shape` per example.

        **Raises:**

        `ValueError` if `high` is not greater than `low`, or greater by more than 2**32.
        """
        start = np.asarray(low, np.int64)
        span = np.asarray(high, np.int64) - start
        if span.min() < 1 or span.max() > 2**32:
            raise ValueError(
                f"integers({low}, {high}) has no numbers, or more than 2**32; give a high "
                "that is greater than low."
            )
        scaled = self._bits(shape).astype(np.uint64) * span.astype(np.uint64)
        return start + (scaled >> 32).astype(np.int64)

    def normal(self, shape: tuple[int, ...] = ()) -> Float32[np.ndarray, "rows ..."]:
        """Numbers of the standard normal distribution.

        On another kind of processor they may differ in the last bit.

        **Arguments:**

        - `shape`: what to draw for each example, one number by default.

        **Returns:**

        An array of one row of `shape` per example.
        """
        first, second = self._blocks(shape)
        # Box and Muller's method. In float64, so that float32 rounds differences away.
        radius = np.sqrt(-2 * np.log((first + 1.0) * 2.0**-32))
        angle = second * (2 * np.pi * 2.0**-32)
        return _to_shape(radius * np.cos(angle), radius * np.sin(angle), shape).astype(
            np.float32
        )

    def generators(self) -> list[np.random.Generator]:
        """A NumPy generator for each example, for code that treats one at a time.

        Each takes several microseconds to make. NumPy does not promise that their numbers
        stay the same in its next version.

        **Returns:**

        As many generators as examples.
        """
        keys = self._bits((4,)).view(np.uint64)
        return [np.random.Generator(np.random.Philox(key=key)) for key in keys]

    def _bits(self, shape: tuple[int, ...]) -> UInt32[np.ndarray, "rows ..."]:
        return _to_shape(*self._blocks(shape), shape)

    def _blocks(
        self, shape: tuple[int, ...]
    ) -> tuple[UInt32[np.ndarray, "rows n"], UInt32[np.ndarray, "rows n"]]:
        """A pair of hashes for each two numbers of a shape."""
        # From 1, as folding and splitting a key in JAX take the counters from 0 on.
        self._calls += 1
        second = np.arange(-(-math.prod(shape) // 2), dtype=np.uint32)
        return _threefry(self.keys[:, None], np.full_like(second, self._calls), second)


@dataclass(frozen=True)
class RandomTransform:
    """A transform that draws random numbers, for the `transform` of [`eqxshard.Loader`][].

    An example's draws are a function of the loader's seed, the epoch and the example's row
    in the source. So they are the same on any number of processes and workers, for any
    batch size, and in a run that was resumed. (If a sampler repeats a row in an epoch,
    each repetition draws anew.) The key of a row is
    `jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), epoch), row)`.

    **Arguments:**

    - `fn`: called with a dict of NumPy arrays, as any transform, and with an
        [`eqxshard.data.ExampleRandom`][]; returns a dict of arrays.

    !!! Example

        ```python
        def flip(batch, random):
            image = batch["image"]
            flips = random.uniform() < 0.5
            flipped = np.where(flips[:, None, None], image[:, :, ::-1], image)
            return {**batch, "image": flipped}


        loader = eqxshard.Loader(
            source,
            batch_size=256,
            mesh=mesh,
            transform=eqxshard.data.RandomTransform(flip),
        )
        ```
    """

    fn: Callable[[dict[str, Any], ExampleRandom], dict[str, Any]]


def example_keys(
    seed: int,
    epoch: int,
    rows: Int[np.ndarray, " rows"],
    repeats: Int[np.ndarray, " rows"],
) -> UInt32[np.ndarray, "rows 2"]:
    """The keys of some rows in an epoch, where each came `repeats` times before."""
    root = np.array([[0, seed]], np.uint32)
    keys = _fold_in(_fold_in(root, np.array([epoch])), rows)
    return np.where(repeats[:, None] > 0, _fold_in(keys, repeats), keys)


def _fold_in(
    keys: UInt32[np.ndarray, "#rows 2"], data: Int[np.ndarray, " rows"]
) -> UInt32[np.ndarray, "rows 2"]:
    """As `jax.random.fold_in`, for many keys."""
    low = data.astype(np.uint32)
    return np.stack(_threefry(keys, np.zeros_like(low), low), axis=-1)


def _threefry(
    keys: UInt32[np.ndarray, "*#shape 2"],
    first: UInt32[np.ndarray, "*#shape"],
    second: UInt32[np.ndarray, "*#shape"],
) -> tuple[UInt32[np.ndarray, "*shape"], UInt32[np.ndarray, "*shape"]]:
    """Threefry2x32: hashes of pairs of counters under keys."""
    a, b = keys[..., 0], keys[..., 1]
    schedule = (a, b, a ^ b ^ _PARITY)
    x, y = first + a, second + b
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x += y
            y = (y << distance) | (y >> (32 - distance))
            y ^= x
        x += schedule[(group + 1) % 3]
        y += schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def _to_shape(first: np.ndarray, second: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of each example from its pairs, without the last if it is too many."""
    pairs = np.stack([first, second], axis=-1).reshape(len(first), -1)
    return np.ascontiguousarray(pairs[:, : math.prod(shape)]).reshape(-1, *shape)
