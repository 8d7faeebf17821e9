"""Checks of the loader's options: in range, and meant for its kind of source."""

from collections.abc import Mapping
from typing import Any

from .._errors import UsageError, UsageTypeError
from ._order import Sampler
from ._sources import Source, is_iter_dataset, is_map_dataset


def check_numbers(seed: int, epochs: int | None, prefetch: int, workers: int) -> None:
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} must be between 0 and 2**32 - 1.")
    least = {"epochs": (epochs, 1), "prefetch": (prefetch, 0), "workers": (workers, 0)}
    for name, (value, smallest) in least.items():
        if value is not None and value < smallest:
            raise UsageError(f"{name}={value} must be at least {smallest}.")


def check_order(
    source: Any,
    batch_size: int | None,
    seed: int,
    shuffle: bool,
    sampler: Any,
    remainder: str,
) -> None:
    """Refuse options on the order of examples that are not for this kind of source."""
    if batch_size is None and remainder != "pad":
        raise UsageError(
            f"remainder={remainder!r} is for a loader that makes the batches itself; leave "
            "it out, and call .batch(n, drop_remainder=True) on a dataset of Grain's."
        )
    if not isinstance(sampler, Sampler | None):
        raise UsageTypeError(
            f"a {type(sampler).__name__} is not a sampler; give something with "
            "__len__() and rows(examples, seed, epoch)."
        )
    if sampler is not None and not shuffle:
        raise UsageError(
            "shuffle=False has no meaning with a sampler, which decides the order; "
            "leave it out."
        )
    if batch_size is None or is_map_dataset(source) or is_iter_dataset(source):
        for name, value in {"seed": seed or None, "sampler": sampler}.items():
            if value is not None:
                raise UsageError(
                    f"{name}= is for arrays, and a {type(source).__name__} has an order of "
                    "its own; leave it out, and call .seed(...) and .shuffle() on a "
                    "dataset of Grain's."
                )


def check_reading(source: Any, read_options: Any, workers: int) -> None:
    """Refuse options for Grain, for iterables that Grain does not read."""
    is_grain = is_map_dataset(source) or is_iter_dataset(source)
    is_iterable = not is_grain and not isinstance(source, Source | Mapping)
    if read_options is not None and not is_map_dataset(source):
        raise UsageError(
            f"read_options= is for a grain.MapDataset, and this is a "
            f"{type(source).__name__}; give prefetch=, or give them to "
            ".to_iter_dataset(...)."
        )
    if workers and is_iterable:
        raise UsageError(
            f"workers= cannot divide the work of a {type(source).__name__}; leave it out, "
            "and use the workers that it has itself."
        )


def check_placement(placement: str, is_arrays: bool, transform: Any, workers: int) -> None:
    if placement not in ("host", "device"):
        raise UsageError(f"placement={placement!r} is not 'host' or 'device'.")
    if placement == "device" and not is_arrays:
        raise UsageError(
            "placement='device' is for arrays, all of which are on each device; read the "
            "dataset into arrays, or use placement='host'."
        )
    if placement == "device" and (transform is not None or workers):
        raise UsageError(
            "placement='device' cannot run transform= or workers=, which need the host; do "
            "their work in the loss function or in the source, or use placement='host'."
        )
