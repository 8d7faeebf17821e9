"""`explain`: a rule's decisions for a model, before anything is placed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._errors import UsageTypeError
from ..sharding._combinators import optimizer_rule
from ..sharding._leaves import array_leaves, is_inexact
from ..sharding._mesh import platform_of
from ..sharding._optimizer_state import StateLeaf, decide_opt_state
from ..sharding._placement import decide_leaves, named_leaves
from ..sharding._rule import Decision, Rule, check_rule
from ..sharding._spec import AnyMesh
from ..training._inputs import mesh_of, sharding_on_mesh
from ..training._state import TrainState, is_offloaded, split_model, without_state
from ._explanation import Bytes, Explanation, Leaf


def explain(
    tree: PyTree,
    mesh: AnyMesh | None = None,
    rule: Rule | None = None,
    *,
    optim: optax.GradientTransformation | None = None,
    trainable: PyTree = True,
) -> Explanation:
    """Show how each array of a model would be split, why, and what each device would hold.

    Nothing is placed: `tree` may consist of `jax.ShapeDtypeStruct`s, as from
    `equinox.filter_eval_shape`, for a model larger than this machine.

    **Arguments:**

    - `tree`: a model, or any PyTree; for a model with state, the pair of both.
    - `mesh`: from [`eqxshard.make_mesh`][]; by default, the mesh that the arrays are on.
    - `rule`: as for [`eqxshard.shardings`][]; by default, the arrays as they are placed.
    - `optim`: an optax optimizer, to count its state too.
    - `trainable`: which arrays have gradients and optimizer state, as for
        [`eqxshard.init_state`][].

    **Returns:**

    An [`eqxshard.inspect.Explanation`][]. It prints as a table: path, shape, dtype, spec,
    bytes per device, the rule that decided, and why if a leaf could not be split. (If its
    gradient and optimizer state are split otherwise, a row below says how.) Below the table
    are the bytes of parameters, gradients and optimizer state. Its fields hold the same
    values for programs.

    **Raises:**

    `ValueError` and `TypeError` as [`eqxshard.shardings`][] does, and `ValueError` if
    `trainable` is not a prefix of the model, or no mesh is given and the arrays are on
    none; `TypeError` for a whole [`eqxshard.TrainState`][].

    !!! Example

        ```python
        print(eqxshard.explain(model, mesh, eqxshard.fsdp(), optim=optax.adamw(1e-3)))
        ```
    """
    if isinstance(tree, TrainState):
        raise UsageTypeError("explain takes a model; give it state.model, and optim=.")

    def shapes(model: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params, _ = split_model(model, trainable)
        return model, params, None if optim is None else optim.init(params)

    model, model_state = without_state(tree)
    placed = dict(array_leaves(model))
    mesh = mesh or mesh_of([*placed.values()], "model", ", or give explain mesh= and rule=")
    platform_of(mesh)  # An abstract mesh has to name its platform.

    def as_placed(path: str, leaf: Any, mesh: AnyMesh) -> PartitionSpec | None:
        # None for the optimizer's state, which is placed nowhere yet.
        if path not in placed or placed[path].shape != leaf.shape:
            return None
        sharding = sharding_on_mesh(placed[path])
        return PartitionSpec() if sharding is None else sharding.spec

    rule = rule or as_placed
    # This gives NumPy arrays the dtypes that they will have as JAX arrays.
    model, params, opt_state = eqx.filter_eval_shape(shapes, model)
    leaves = named_leaves(model)
    check_rule(rule, dict(leaves), mesh)
    decisions = decide_leaves(leaves, mesh, rule)
    trained = named_leaves(params)
    for_updates = optimizer_rule(rule)
    split = decide_leaves(trained, mesh, for_updates)
    updates = {path: decision for (path, _), decision in zip(trained, split)}
    kept = decide_opt_state(opt_state, params, split, mesh, for_updates)
    by_path, optimizer_state, host = _optimizer_bytes(kept, mesh, rule)
    rows = []
    for (path, leaf), decision in zip(leaves, decisions, strict=True):
        update = updates.get(path)
        frozen = "frozen" if update is None and is_inexact(leaf) else ""
        notes = (decision.note, update.note if update else "", frozen)
        rows.append(_row(path, leaf, mesh, decision, update, notes, by_path[path]))
    for path, leaf in array_leaves({"model_state": model_state}):
        decision, notes = Decision(PartitionSpec(), "model state"), ["always replicated"]
        rows.append(_row(path, leaf, mesh, decision, None, notes, 0))
    inexact = {path for path, leaf in leaves if is_inexact(leaf)}
    trained_rows = [row for row in rows if row.update_spec is not None]
    gradients = sum(row.gradient for row in trained_rows)
    return Explanation(
        leaves=tuple(rows),
        mesh=mesh,
        parameters=_held([row for row in rows if row.path in inexact]),
        other=_held([row for row in rows if row.path not in inexact]),
        gradients=Bytes(_held(trained_rows).whole, gradients),
        optimizer_state=None if optim is None else optimizer_state,
        host=host,
        other_shapes=tuple(
            _row(each.path, each.leaf, mesh, each.decision, None, [each.decision.note], 0)
            for each in kept
            if not each.same_shape and math.prod(each.leaf.shape) > 1
        ),
    )


def _optimizer_bytes(
    leaves: Iterable[StateLeaf], mesh: AnyMesh, rule: Rule
) -> tuple[Counter[str], Bytes, int]:
    """A device's bytes of an optimizer's state: by parameter, in all, and on its host."""
    by_path, whole, device, host = Counter[str](), 0, 0, 0
    for each in leaves:
        size = _bytes(each.leaf, NamedSharding(mesh, each.decision.spec))
        whole += size.whole
        if is_offloaded(each.leaf, rule):
            host += size.per_device
            continue
        device += size.per_device
        if each.param is not None:
            by_path[each.param] += size.per_device
    return by_path, Bytes(whole, device), host


def _row(
    path: str,
    leaf: Any,
    mesh: AnyMesh,
    decision: Decision,
    update: Decision | None,
    notes: Sequence[str],
    optimizer: int,
) -> Leaf:
    size, gradient = _bytes(leaf, NamedSharding(mesh, decision.spec)), 0
    if update is not None:
        gradient = _bytes(leaf, NamedSharding(mesh, update.spec)).per_device
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
        gradient=gradient,
        optimizer=optimizer,
    )


def _bytes(leaf: Any, sharding: NamedSharding) -> Bytes:
    part = sharding.shard_shape(leaf.shape)
    each = leaf.dtype.itemsize
    return Bytes(each * math.prod(leaf.shape), each * math.prod(part))


def _held(rows: Sequence[Leaf]) -> Bytes:
    whole = sum(row.bytes_whole for row in rows)
    return Bytes(whole, sum(row.bytes_per_device for row in rows))
