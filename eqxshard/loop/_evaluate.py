"""`evaluate`: measure a model over a whole dataset."""

import itertools
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from jaxtyping import PyTree

from ..training._metrics import Metrics
from ._chunks import closing_iterator, is_resident
from ._protocols import Batches
from ._schedule import steps_per_epoch


def evaluate(
    model: PyTree, eval_step: Callable[[PyTree, PyTree], Metrics], loader: Batches
) -> dict[str, Any]:
    """Measure a model over a whole dataset, each example counted exactly once.

    **Arguments:**

    - `model`: not donated.
    - `eval_step`: from [`eqxshard.make_eval_step`][].
    - `loader`: an [`eqxshard.Loader`][], which is read for one epoch from its start (so
        give another than the one that training reads).

    **Returns:**

    The mean of each metric over all examples.

    **Raises:**

    `ValueError` if the loader has no length.
    """
    if is_resident(loader, eval_step):
        resident: Any = loader
        step: Any = eval_step
        resident.seek(0)
        return step.many(model, resident.stacked(len(resident))).compute()
    with closing(one_epoch(loader, "evaluate")) as batches:
        parts = [eval_step(model, batch) for batch in batches]
    return Metrics.stack(parts).compute()


def one_epoch(loader: Batches, who: str) -> Generator[PyTree, None, None]:
    """The batches of a loader's first epoch; close it to end its thread early.

    **Raises:**

    `ValueError` if the loader has no length.
    """
    epoch = steps_per_epoch(loader)
    if epoch is None:
        raise ValueError(
            f"{who} needs a loader with a length, and this {type(loader).__name__} has "
            "none; make an eqxshard.Loader, or add __len__()."
        )
    loader.seek(0)
    with closing_iterator(loader) as batches:
        yield from itertools.islice(batches, epoch)
