"""`python -m eqxshard.replay DIR`: what in a step was the first that was not finite.

Takes the black box that [`eqxshard.fit`][] left behind, and goes through the step on one
device, an operation at a time: the batch, the parameters, the loss, the gradients.
"""

import argparse
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ._black_box import BlackBox, read_black_box
from ._checkpoint_folder import folder_path
from .precision import cast
from .sharding import leaf_path
from .state import split_model, with_state, without_state


def replay(box: BlackBox) -> str:
    """Find what was not finite first.

    **Arguments:**

    - `box`: a step's model, batch, key and loss function.

    **Returns:**

    A sentence that names it: an entry of the batch and its rows, a parameter, a layer
    and the line of code in it, or the parameters whose gradients are not finite.
    """
    for path, leaf in _floats(box.batch):
        bad = _rows(leaf)
        if bad.size:
            return f"batch entry {path} is not finite in {_name_rows(bad, box.rows)}."
    for path, leaf in _floats(without_state(box.model)[0]):
        # A mask of -inf is fine.
        if bool(jnp.any(jnp.isnan(leaf))):
            return f"the parameter {path} has NaN in it."
    model, batch = box.model, box.batch
    if box.precision is not None:
        made, state = without_state(model)
        model = with_state(cast(made, box.precision.compute), state)
        batch = cast(batch, box.precision.compute)

    def loss(model: PyTree) -> Any:
        out = box.loss_fn(model, batch, box.key)
        return out[0] if isinstance(out, tuple) else out

    losses = np.asarray(loss(model), np.float64)
    if not np.isfinite(losses).all():
        where = _first_layer(loss, model)
        return f"{where}; the loss is not finite in {_name_rows(_rows(losses), box.rows)}."
    made, state = without_state(model)
    params, frozen = split_model(made, box.trainable)
    grads = jax.grad(
        lambda params: jnp.mean(loss(with_state(eqx.combine(params, frozen), state)))
    )(params)
    bad = [path for path, leaf in _floats(grads) if not bool(jnp.isfinite(leaf).all())]
    if bad:
        return (
            "the loss is finite and its gradient is not; the first parameter whose "
            f"gradient is not finite is {bad[0]} (of {len(bad)}: {', '.join(bad[:8])})."
        )
    return (
        "nothing: on one device, loss and gradients are finite; it may have been a fault "
        "of a device, or rounding."
    )


def _first_layer(loss: Any, model: PyTree) -> str:
    """Where an operation is the first to return NaN or, if none does, an infinity."""
    for check, what in ((jax.debug_nans, "NaN"), (jax.debug_infs, "infinity")):
        try:
            with jax.disable_jit(), check(True):
                jax.block_until_ready(loss(model))
        except FloatingPointError as error:
            layer, line = _place(error.__traceback__, without_state(model)[0])
            return f"the first {what} is made in {layer}, {line}"
    return "no operation on its own makes it"


def _place(trace: TracebackType | None, model: PyTree) -> tuple[str, str]:
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

    def walk(path: tuple[Any, ...], node: Any) -> None:
        if isinstance(node, eqx.Module):
            paths[id(node)] = leaf_path(path) or "the model"
        children, _ = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda x: x is not node
        )
        for key, child in children:
            if child is not node:
                walk((*path, *key), child)

    walk((), model)
    return paths


def _floats(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            yield leaf_path(path), leaf


def _rows(values: Any) -> np.ndarray:
    """Which rows of an array are not finite."""
    finite = np.asarray(jnp.isfinite(values))
    return np.flatnonzero(~finite.reshape(finite.shape[0] if finite.ndim else 1, -1).all(1))


def _name_rows(bad: np.ndarray, rows: list[int] | None) -> str:
    """Rows of a batch, and which examples of the source they are."""
    some = [int(row) for row in bad[:8]]
    more = f" and {bad.size - 8} more" if bad.size > 8 else ""
    named = f"rows {some}{more} of the batch"
    if rows is None:
        return named
    # Beyond these, rows are padding.
    source = [rows[row] for row in some if row < len(rows)]
    return f"{named} (examples {source} of the source)"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m eqxshard.replay",
        description="Name what was not finite first in the step of a black box.",
    )
    parser.add_argument("folder", help="the black_box folder that a run named")
    folder = parser.parse_args().folder
    try:
        box = read_black_box(folder_path(folder))
    except (FileNotFoundError, ValueError, ImportError, AttributeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"steps {box.steps[0]} to {box.steps[-1]} were not finite; step {box.steps[0]}:")
    print(replay(box))
    return 0


if __name__ == "__main__":
    sys.exit(main())
