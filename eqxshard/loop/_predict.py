"""`predict`: the outputs of a model for a whole dataset."""

import functools as ft
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from ..data._loader import Loader
from ..distributed import fetch_whole
from ..sharding._leaves import is_array, leaf_path
from ..sharding._mesh import batch_sharding
from ..training._donation import check_not_donated
from ..training._gradients import step_context
from ..training._in_flight import IN_FLIGHT
from ..training._inputs import ONE_BATCH, check_ready
from ..training._jit import call_jitted, jit_on
from ..training._precision import Precision
from ..training._signature import Signature, mesh_of
from ..training._state import refuse_state, with_state, without_state
from ._evaluate import one_epoch
from ._protocols import Batches

#: Compiled functions that are kept for the next call, such as after the next epoch.
_KEPT = 16


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

    What `fn` returns, as NumPy arrays of leading size dataset, without padding. (Of a
    loader that is not an [`eqxshard.Loader`][], all rows, in its order.)

    **Raises:**

    `ValueError` if the loader leaves out examples or repeats them, an output has another
    leading size, or the model was donated or is not on a mesh; `TypeError` if `model` is a
    [`eqxshard.TrainState`][].

    !!! Example

        ```python
        def classify(model, batch):
            return jnp.argmax(jax.vmap(model)(batch["image"]), axis=-1)


        labels = eqxshard.predict(state.model, classify, test_loader)
        ```
    """
    refuse_state(model, "predict")
    arrays, signature = Signature.of(model, "model")
    check_not_donated(arrays, "model")
    mesh = mesh_of(arrays, "model")
    compiled = _compile(fn, signature, mesh, precision)
    rows = _rows(loader)
    parts: list[PyTree[np.ndarray]] = []
    running: deque[PyTree[Array]] = deque()
    with closing(one_epoch(loader, "predict")) as batches:
        for batch in batches:
            ONE_BATCH.check(batch, mesh)
            check_ready(ONE_BATCH, batch, mesh, ONE_BATCH.sharding(mesh))
            running.append(call_jitted(compiled, arrays, batch))
            if len(running) >= IN_FLIGHT:
                parts.append(jax.tree.map(fetch_whole, running.popleft()))
    parts += [jax.tree.map(fetch_whole, outputs) for outputs in running]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return whole if rows is None else jax.tree.map(lambda x: x[_order(x, rows)], whole)


def _rows(loader: Batches) -> list[Int[np.ndarray, " _"]] | None:
    """The examples of each batch of an epoch, if the loader knows them."""
    if not isinstance(loader, Loader):
        return None
    rows = [loader.rows(step) for step in range(len(loader))]
    found = np.sort(np.concatenate(rows))
    length = loader.state()["fingerprint"]["length"]
    if not np.array_equal(found, np.arange(length)):
        raise ValueError(
            f"an epoch of this loader has {len(np.unique(found))} of {length} examples, in "
            f"{len(found)} rows; make one with remainder='pad' and without a sampler."
        )
    return rows


def _order(outputs: np.ndarray, rows: list[Int[np.ndarray, " _"]]) -> np.ndarray:
    """Where each example's row is in the outputs of all batches, which may be padded."""
    size = len(outputs) // len(rows)
    places = [batch * size + np.arange(len(each)) for batch, each in enumerate(rows)]
    return np.concatenate(places)[np.argsort(np.concatenate(rows))]


@ft.lru_cache(maxsize=_KEPT)
def _compile(
    fn: Callable[[Any, Any], PyTree],
    signature: Signature,
    mesh: Mesh,
    precision: Precision | None,
) -> Any:
    def predict(arrays: list[Array], batch: PyTree) -> PyTree[Array]:
        model, model_state = without_state(signature.static.combine(arrays))
        storage, _ = without_state(signature.storage())
        with step_context(model, storage, storage, batch, mesh, precision) as (
            model,
            batch,
        ):
            model = eqx.nn.inference_mode(model)
            outputs = fn(with_state(model, model_state), batch)
        _check_outputs(outputs, jax.tree.leaves(batch)[0].shape[0])
        return outputs

    by_rows = batch_sharding(mesh)
    places: dict[str, Any] = {"in_shardings": (None, by_rows), "out_shardings": by_rows}
    return jit_on(mesh, predict, "predict", **places)


def _check_outputs(outputs: PyTree, rows: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        name = leaf_path(path, "output")
        if not is_array(leaf):
            raise TypeError(
                f"{name} of fn is a {type(leaf).__name__}; return arrays with one row per "
                "example."
            )
        if leaf.shape[:1] != (rows,):
            raise ValueError(
                f"{name} of fn has shape {leaf.shape} for a batch of {rows}; return one "
                "row per example."
            )
