"""`evaluate` and `predict`: a model's metrics or outputs for a whole dataset."""

import functools as ft
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Generator, Sized
from contextlib import closing
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from .._errors import UsageError, UsageTypeError
from ..data._loader import Loader
from ..distributed import fetch_whole
from ..sharding._leaves import is_array, leaf_path
from ..sharding._mesh import batch_sharding
from ..sharding._text import comma_list
from ..training._advice import short_traceback
from ..training._donation import check_not_donated
from ..training._eval_step import EvalStep
from ..training._examples import Metrics
from ..training._inputs import ONE_BATCH, Signature, mesh_of, placed
from ..training._jit import call_jitted, jit_on
from ..training._precision import Precision
from ..training._state import refuse_state, with_state, without_state
from ..training._step import IN_FLIGHT
from ..training._use import call_as_used
from ._position import Batches, is_resident, read_from_start


def evaluate(
    model: PyTree, eval_step: Callable[[PyTree, PyTree], Metrics], loader: Batches
) -> dict[str, Any]:
    """Measure a model over a whole dataset, each example counted exactly once.

    **Arguments:**

    - `model`: as `eval_step` takes it; not donated.
    - `eval_step`: from [`eqxshard.make_eval_step`][].
    - `loader`: an [`eqxshard.Loader`][], which is read for one epoch from its start; give
        another one than training reads.

    **Returns:**

    The mean of each metric over all examples.

    **Raises:**

    `ValueError` if the loader has no end; `TypeError` if `eval_step` is a metric function,
    not an eval step made of one, or the arguments are in another order.
    """
    _check_arguments("evaluate(model, eval_step, loader)", model, eval_step, loader)
    if is_resident(loader, eval_step):
        resident: Any = loader
        step: Any = eval_step
        with read_from_start(resident):
            batches = resident.stacked(len(resident))
        return step.many(model, batches).compute()
    with closing(one_epoch(loader, "evaluate")) as batches:
        parts = [_measure(eval_step, model, batch) for batch in batches]
    return Metrics.stack(parts).compute()


def _check_arguments(call: str, model: Any, fn: Any, loader: Any) -> None:
    swapped = isinstance(model, EvalStep | Batches) or isinstance(fn, Batches)
    if swapped or not (callable(fn) and isinstance(loader, Batches)):
        given = comma_list(type(each).__name__ for each in (model, fn, loader))
        raise UsageTypeError(
            f"the arguments are of types {given}; write {call}, with a Loader."
        )


def _measure(eval_step: Callable[[PyTree, PyTree], Any], model: Any, batch: Any) -> Metrics:
    metrics = eval_step(model, batch)
    if not isinstance(metrics, Metrics):
        name = getattr(eval_step, "__name__", type(eval_step).__name__)
        raise UsageTypeError(
            f"{name} returned a {type(metrics).__name__}, not the Metrics of an eval step; "
            f"use eval_step = eqxshard.make_eval_step({name})."
        )
    return metrics


def check_evaluate(evaluate: Any) -> None:
    """Refuse an `evaluate` that cannot be called with a model alone, like an eval step."""
    if evaluate is None:
        return
    try:
        inspect.signature(evaluate).bind("model")
    except TypeError:
        name = getattr(evaluate, "__name__", type(evaluate).__name__)
        raise UsageTypeError(
            f"evaluate={name} is not a function of a model; use evaluate=lambda model: "
            "eqxshard.evaluate(model, eval_step, test_loader)."
        ) from None
    except ValueError:
        # Some built-in functions have no signature.
        return


def predict(
    model: PyTree,
    fn: Callable[[Any, Any], PyTree],
    loader: Batches,
    *,
    precision: Precision | None = None,
) -> PyTree[np.ndarray]:
    """The outputs of a model for a whole dataset, in the order of the source.

    The model is put in inference mode (`equinox.nn.inference_mode`) and is not donated.
    Each batch is computed where its rows are, as in an eval step, and its outputs are
    fetched while the next batch is computed. With several processes, every process gets
    the outputs of all.

    **Arguments:**

    - `model`: with its arrays on a mesh, such as `state.model`; if it has a state, the
        pair `(state.model, state.model_state)`.
    - `fn`: `fn(model, batch)` returns a PyTree of arrays of leading size batch. For a
        model with state, `model` is the pair `(model, state)`. It is compiled once, and
        calls with the same function and model structure share what is compiled.
    - `loader`: an [`eqxshard.Loader`][] on the same mesh, which is read for one epoch from
        its start. If it shuffles, the outputs are put back in the order of the source.
    - `precision`: as for [`eqxshard.make_train_step`][].

    **Returns:**

    The outputs of `fn` as NumPy arrays of leading size dataset, without padding. (If the
    loader's examples have no indices, all rows in the order of the loader.)

    **Raises:**

    `ValueError` if the loader has no end, leaves out examples or repeats them, an output
    has another leading size, or the model was donated or is not on a mesh; `TypeError` if
    `model` is an [`eqxshard.TrainState`][], or the arguments are in another order.

    !!! Example

        ```python
        def classify(model, batch):
            return jnp.argmax(jax.vmap(model)(batch["image"]), axis=-1)


        labels = eqxshard.predict(state.model, classify, test_loader)
        ```
    """
    _check_arguments("predict(model, fn, loader)", model, fn, loader)
    refuse_state(model, "predict")
    arrays, signature = Signature.of(model, "model")
    check_not_donated(arrays, "model")
    mesh = mesh_of(arrays, "model")
    compiled = _compile(fn, signature, mesh, precision)
    rows = None
    if isinstance(loader, Loader) and loader.has_rows:
        with loader.from_start():
            rows = _rows(loader)
    parts: list[PyTree[np.ndarray]] = []
    running: deque[PyTree[Array]] = deque()

    def fetch() -> None:
        """Wait for the oldest outputs, and drop those of padding, which come last."""
        count = None if rows is None else len(rows[len(parts)])
        outputs = running.popleft()
        parts.append(jax.tree.map(lambda leaf: fetch_whole(leaf)[:count], outputs))

    with short_traceback(), closing(one_epoch(loader, "predict")) as batches:
        for batch in batches:
            ONE_BATCH.check(batch, mesh)
            batch = placed(ONE_BATCH, batch, mesh, ONE_BATCH.sharding(mesh))
            running.append(call_jitted(compiled, arrays, batch))
            if len(running) == IN_FLIGHT:
                fetch()
    while running:
        fetch()
    in_order = slice(None) if rows is None else np.argsort(np.concatenate(rows))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[in_order], *parts)


def _rows(loader: Loader) -> list[np.ndarray]:
    """The examples of each batch of an epoch, which must have each example once."""
    rows = [loader.rows(step) for step in range(len(loader))]
    found = np.sort(np.concatenate(rows))
    length = loader.state()["fingerprint"]["length"]
    if not np.array_equal(found, np.arange(length)):
        raise UsageError(
            f"an epoch of this loader has {len(np.unique(found))} of {length} examples, in "
            f"{len(found)} rows; make one with remainder='pad' and without a sampler."
        )
    return rows


# Cached for the next call, such as that after the next epoch.
@ft.lru_cache(maxsize=16)
def _compile(
    fn: Callable[[Any, Any], PyTree],
    signature: Signature,
    mesh: Mesh,
    precision: Precision | None,
) -> Any:
    def predict(arrays: list[Array], batch: PyTree) -> PyTree[Array]:
        model, model_state = without_state(signature.static.combine(arrays))
        stored, _ = without_state(signature.storage())
        storage = {"model": stored}

        def call(given: Any, batch: PyTree, model_state: PyTree) -> PyTree:
            model = eqx.nn.inference_mode(given["model"])
            return fn(with_state(model, model_state), batch)

        given, others = {"model": model}, (model_state,)
        outputs = call_as_used(
            call, given, storage, storage, batch, others, mesh, precision
        )
        _check_outputs(outputs, jax.tree.leaves(batch)[0].shape[0])
        return outputs

    by_rows = batch_sharding(mesh)
    places: dict[str, Any] = {"in_shardings": (None, by_rows), "out_shardings": by_rows}
    return jit_on(mesh, predict, "predict", **places)


def _check_outputs(outputs: PyTree, rows: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if not is_array(leaf) or leaf.shape[:1] != (rows,):
            kind = f"a {type(leaf).__name__}"
            found = f"of shape {leaf.shape}" if is_array(leaf) else kind
            raise UsageError(
                f"{leaf_path(path, 'output')} of fn is {found} for a batch of {rows}; "
                "return arrays with one row per example."
            )


def one_epoch(loader: Batches, who: str) -> Generator[PyTree, None, None]:
    """The batches of a loader's first epoch; close it to end its thread early.

    A loader without a length is read until its dataset ends.

    **Raises:**

    `ValueError` if the loader is endless, or is not ours and has no length.
    """
    if isinstance(loader, Loader):
        has_end, has_length = loader.has_end, loader.steps is not None
    else:
        has_end = has_length = isinstance(loader, Sized)
    if not has_end:
        raise UsageError(
            f"{who} needs a loader with an end, and this {type(loader).__name__} has none; "
            "make an eqxshard.Loader of a dataset without .repeat(), or add __len__()."
        )
    sized: Any = loader
    with read_from_start(loader):
        yield from itertools.islice(loader, len(sized) if has_length else None)
