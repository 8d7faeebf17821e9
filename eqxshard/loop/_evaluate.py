"""`evaluate`: measure a model over a whole dataset."""

import itertools
from collections.abc import Callable
from contextlib import closing
from typing import Any

from jaxtyping import PyTree

from ..training._metrics import Metrics
from ._chunks import is_resident
from ._protocols import Batches


def evaluate(
    model: PyTree, eval_step: Callable[[PyTree, PyTree], Metrics], loader: Batches
) -> dict[str, float]:
    """Measure a model over a whole dataset, each example counted exactly once.

    **Arguments:**

    - `model`: not donated.
    - `eval_step`: from [`eqxshard.make_eval_step`][].
    - `loader`: an [`eqxshard.Loader`][], which is read for one epoch from its start (so
        give another than the one that training reads).

    **Returns:**

    The mean of each metric over all examples.
    """
    loader.seek(0)
    if is_resident(loader, eval_step):
        resident: Any = loader
        step: Any = eval_step
        return step.many(model, resident.stacked(len(resident))).compute()
    with closing(iter(loader)) as batches:
        parts = [
            eval_step(model, batch) for batch in itertools.islice(batches, len(loader))
        ]
    return Metrics.stack(parts).compute()
