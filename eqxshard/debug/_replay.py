"""Replay a step one operation at a time, to find the first that is not finite."""

import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..distributed import fetch_whole
from ..sharding._leaves import array_leaves, is_inexact, leaf_path
from ..training._precision import Precision
from ..training._state import split_model, with_state
from ._crash_dump import CrashDump


def replay(dump: CrashDump, loss_fn: Callable[..., Any]) -> str:
    """Find the first value that was not finite.

    **Arguments:**

    - `dump`: a step's model, batch and key.
    - `loss_fn`: as for [`eqxshard.make_train_step`][].

    **Returns:**

    A sentence that names it: an entry of the batch and its rows, a parameter, a layer
    and the line of code in it, or the parameters whose gradients are not finite.
    """
    if (found := describe_batch(dump.batch, dump.rows)) is not None:
        return f"{found}."
    for path, leaf in _inexact_leaves(dump.model):
        # A mask of -inf is fine.
        if bool(jnp.any(jnp.isnan(leaf))):
            return f"the parameter {path} contains NaN."
    model, batch = dump.model, dump.batch
    if dump.compute is not None:
        precision = Precision(dump.compute, compute_except=dump.compute_except)
        model, batch = precision.cast(model, "model"), precision.cast(batch, "batch")

    def loss(model: PyTree) -> Any:
        out = loss_fn(with_state(model, dump.model_state), batch, dump.key)
        return out[0] if isinstance(out, tuple) else out

    losses = np.asarray(loss(model), np.float64)
    if not np.isfinite(losses).all():
        rows = _name_rows(_nonfinite_rows(losses), dump.rows)
        return f"{_first_layer(loss, model)}; the loss is not finite in {rows}."
    params, frozen = split_model(model, dump.trainable)
    grads = jax.grad(lambda params: jnp.mean(loss(eqx.combine(params, frozen))))(params)
    bad = [p for p, leaf in _inexact_leaves(grads) if not bool(jnp.isfinite(leaf).all())]
    if bad:
        return (
            "the loss is finite and its gradient is not; the first parameter whose "
            f"gradient is not finite is {bad[0]} (of {len(bad)}: {', '.join(bad[:8])})."
        )
    return (
        "nothing: on one device, the loss and its gradients are finite; the cause may have "
        "been the optimizer's update (look at its eps), rounding, or a faulty device."
    )


def describe_batch(batch: PyTree, rows: list[int] | None) -> str | None:
    """The first entry of a batch that is not finite, and its rows; `None` if all are.

    **Arguments:**

    - `batch`: arrays, of which every process has a part.
    - `rows`: the indices in the source of the batch's examples, if known.
    """
    for path, leaf in _inexact_leaves(batch):
        bad = _nonfinite_rows(leaf)
        if bad.size:
            return f"batch entry {path} is not finite in {_name_rows(bad, rows)}"
    return None


def _first_layer(loss: Any, model: PyTree) -> str:
    """The first operation that returns NaN or, if none does, infinity."""
    for check, what in ((jax.debug_nans, "NaN"), (jax.debug_infs, "infinity")):
        try:
            with jax.disable_jit(), check(True):
                jax.block_until_ready(loss(model))
        except FloatingPointError as error:
            layer, line = _locate(error.__traceback__, model)
            return f"the first {what} appears in {layer}, {line}"
    return "no single operation produces it"


def _locate(trace: TracebackType | None, model: PyTree) -> tuple[str, str]:
    """The innermost module of a model on a stack, by its path, and the line of code."""
    paths, layer = _module_paths(model), "the loss function"
    lines: list[str] = []
    for frame, number in traceback.walk_tb(trace):
        owner = frame.f_locals.get("self")
        if isinstance(owner, eqx.Module):
            name = type(owner).__name__
            layer = f"{paths[id(owner)]} ({name})" if id(owner) in paths else name
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("jax", "equinox", "eqxshard", "contextlib"):
            lines.append(f"{frame.f_code.co_filename}:{number}")
    return layer, lines[-1] if lines else "in a library"


def _module_paths(model: PyTree) -> dict[int, str]:
    paths: dict[int, str] = {}

    def note(path: tuple[Any, ...], node: Any) -> bool:
        if isinstance(node, eqx.Module):
            paths[id(node)] = leaf_path(path) or "the model"
        return False

    jax.tree.flatten_with_path(model, is_leaf=note, is_leaf_takes_path=True)
    return paths


def _inexact_leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    return ((path, leaf) for path, leaf in array_leaves(tree) if is_inexact(leaf))


def _nonfinite_rows(values: Any) -> np.ndarray:
    """The rows of an array that are not finite."""
    finite = fetch_whole(jnp.isfinite(values))
    return np.flatnonzero(~finite.reshape(finite.shape[0] if finite.ndim else 1, -1).all(1))


def _name_rows(bad: np.ndarray, rows: list[int] | None) -> str:
    """Rows of a batch, and their examples in the source."""
    some = [int(row) for row in bad[:8]]
    more = f" and {bad.size - 8} more" if bad.size > 8 else ""
    named = f"rows {some}{more} of the batch"
    if rows is None:
        return named
    # Rows beyond these are padding.
    examples = [rows[row] for row in some if row < len(rows)]
    return f"{named} (examples {examples} of the source)"
