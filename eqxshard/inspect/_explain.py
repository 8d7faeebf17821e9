"""`explain`: a rule's decisions for a model, before anything is placed."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..sharding._combinators import HOST_MEMORY, optimizer_rule
from ..sharding._leaves import array_leaves, is_inexact
from ..sharding._placement import decide_leaves, named_leaves
from ..sharding._rule import Decision, Rule, check_rule
from ..training._layout import make_layout
from ..training._state import TrainState, split_model, without_state
from ._explanation import Bytes, Explanation, Leaf


def explain(
    tree: PyTree,
    mesh: Mesh,
    rule: Rule,
    *,
    optim: optax.GradientTransformation | None = None,
    trainable: PyTree = True,
) -> Explanation:
    """Show how each array of a model would be split, why, and what each device would hold.

    Nothing is placed: `tree` may consist of `jax.ShapeDtypeStruct`s, as from
    `equinox.filter_eval_shape`, for a model larger than this machine.

    **Arguments:**

    - `tree`: a model, or any PyTree; for a model with state, the pair of both.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: as for [`eqxshard.shardings`][].
    - `optim`: an optax optimizer, to count its state too.
    - `trainable`: which arrays have gradients and optimizer state, as for
        [`eqxshard.init_state`][].

    **Returns:**

    An [`eqxshard.Explanation`][]. It prints as a table: path, shape, dtype, spec, bytes
    per device, the rule that decided, and why if a leaf could not be split. (If gradients
    and optimizer state are split otherwise, a column says how.) Below it are the bytes of
    parameters, gradients and optimizer state. `to_dict` returns the same for programs,
    and `draw` a picture of it.

    **Raises:**

    `ValueError` and `TypeError` as [`eqxshard.shardings`][] does, and `ValueError` if
    `trainable` is not a prefix of the model; `TypeError` for a whole
    [`eqxshard.TrainState`][].

    !!! Example

        ```python
        print(eqxshard.explain(model, mesh, eqxshard.fsdp(), optim=optax.adamw(1e-3)))
        ```
    """
    if isinstance(tree, TrainState):
        raise TypeError("explain takes a model; give it state.model, and optim=.")

    def shapes(model: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params, _ = split_model(model, trainable)
        return model, params, None if optim is None else optim.init(params)

    model, model_state = without_state(tree)
    # NumPy arrays, too, get the dtypes that they will have as JAX arrays.
    model, params, opt_state = eqx.filter_eval_shape(shapes, model)
    leaves = named_leaves(model)
    check_rule(rule, dict(leaves), mesh)
    decisions = decide_leaves(leaves, mesh, rule)
    update_rule = optimizer_rule(rule)
    trained = named_leaves(params)
    updates = dict(
        zip((path for path, _ in trained), decide_leaves(trained, mesh, update_rule))
    )
    rows, parameters, other, gradients = [], [], [], []
    for (path, leaf), decision in zip(leaves, decisions, strict=True):
        update, notes = updates.get(path), [decision.note]
        if update is not None:
            gradients.append((leaf, NamedSharding(mesh, update.spec)))
            notes.append(update.note)
        elif is_inexact(leaf):
            notes.append("frozen")
        kind = parameters if is_inexact(leaf) else other
        kind.append((leaf, NamedSharding(mesh, decision.spec)))
        rows.append(_row(path, leaf, mesh, decision, update, notes))
    for path, leaf in array_leaves({"model_state": model_state}):
        decision = Decision(PartitionSpec(), "model state")
        other.append((leaf, NamedSharding(mesh, decision.spec)))
        rows.append(_row(path, leaf, mesh, decision, None, ["whole under every rule"]))
    optimizer_state, host = None, 0
    if optim is not None:
        layout = make_layout(model, params, opt_state, mesh, rule)
        arrays = [leaf for _, leaf in array_leaves(opt_state)]
        shardings = jax.tree.leaves(layout.opt_state)
        placed = list(zip(arrays, shardings, strict=True))
        # What is in the host's memory, no device holds.
        away = [pair for pair in placed if pair[1].memory_kind == HOST_MEMORY]
        host, (whole, parts) = _bytes(away).per_device, _bytes(placed)
        optimizer_state = Bytes(whole, parts - host)
    return Explanation(
        leaves=tuple(rows),
        mesh=mesh,
        parameters=_bytes(parameters),
        other=_bytes(other),
        gradients=_bytes(gradients),
        optimizer_state=optimizer_state,
        host=host,
    )


def _row(
    path: str,
    leaf: Any,
    mesh: Mesh,
    decision: Decision,
    update: Decision | None,
    notes: Sequence[str],
) -> Leaf:
    size = _bytes([(leaf, NamedSharding(mesh, decision.spec))])
    return Leaf(
        path=path,
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype),
        spec=decision.spec,
        bytes_whole=size.whole,
        bytes_per_device=size.per_device,
        rule=decision.rule,
        note="; ".join(dict.fromkeys(filter(None, notes))),
        update_spec=update and update.spec,
        update_rule=update.rule if update else "",
    )


def _bytes(arrays: Iterable[tuple[Any, NamedSharding]]) -> Bytes:
    sizes = [
        (leaf.dtype.itemsize, leaf.shape, sharding.shard_shape(leaf.shape))
        for leaf, sharding in arrays
    ]
    return Bytes(
        sum(size * math.prod(shape) for size, shape, _ in sizes),
        sum(size * math.prod(part) for size, _, part in sizes),
    )
