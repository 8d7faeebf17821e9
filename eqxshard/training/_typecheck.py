"""Sharding as a type check: the first place where arrays meet that are split differently.

On Explicit axes JAX types each array by how it is split, while it traces. Nothing is
compiled, and no device is needed.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..compiled._causes import user_frame
from ..compiled._hlo import Frame
from ..sharding._explicit import explicit_part
from ..sharding._leaves import array_leaves, is_array
from ..sharding._mesh import batch_sharding, check_batch_size
from ..sharding._placement import compute_sharding, named_leaves, shardings
from ..sharding._rule import Rule, leaf_dims, rule_name
from ..sharding._spec import format_spec
from ._gather import in_use
from ._state import without_state

_ON_AUTO = "leave this to the compiler on Auto axes, as eqxshard.make_mesh makes them"
_LOOKUP = "write table.at[ids].get(out_sharding=...) in place of table[ids]"


@dataclass(frozen=True)
class TypeReport:
    """What [`eqxshard.typecheck`][] found: true if all arrays that meet are split alike.

    - `error`: what JAX says of the first place where they are not; `None` if there is none.
    - `place`: the line of the user's code.
    - `fields`: the fields of the model that meet something there, with their dims as
        annotated and their specs.
    - `advice`: what to write.
    - `untyped`: whether JAX cannot type the operation yet, such as the lookup of
        `equinox.nn.Embedding`, and nothing is known to be wrong.
    """

    error: str | None = None
    place: str | None = None
    fields: tuple[str, ...] = ()
    advice: str | None = None
    untyped: bool = False

    def __bool__(self) -> bool:
        return self.error is None

    def __str__(self) -> str:
        if self.error is None:
            return "All arrays that meet are split alike."
        where = self.place or "in the loss function"
        kind = "JAX cannot type this yet" if self.untyped else "arrays meet that are split "
        kind += "" if self.untyped else "differently"
        lines = [f"{where}: {kind}: {self.error}", *self.fields, f"Remedy: {self.advice}."]
        return "\n".join(lines)


def typecheck(
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[..., Any],
    batch: PyTree,
    mesh: Mesh | AbstractMesh,
    rule: Rule,
) -> TypeReport:
    """Find the first place in a loss function where arrays are split differently.

    The loss function is traced on Explicit axes, abstractly: nothing is compiled or
    allocated. There a product over dims that are split differently, or both split, is an
    error, where the compiler would move one of them, or sum over devices, without a word.
    Parameters are split as they are used in a step: gathered over the axes of the batch.

    **Arguments:**

    - `make_model`, `rule`: as for [`eqxshard.init_state`][].
    - `loss_fn`: as for [`eqxshard.make_train_step`][].
    - `batch`: a batch, of arrays or of `jax.ShapeDtypeStruct`s.
    - `mesh`: a mesh, of any types of axes, or a `jax.sharding.AbstractMesh`.

    **Returns:**

    An [`eqxshard.TypeReport`][]: print it.

    **Raises:**

    `ValueError` if the batch does not divide over the mesh, and as
    [`eqxshard.shardings`][] does; and what `make_model` or `loss_fn` raise for other
    reasons.

    !!! Example

        ```python
        report = eqxshard.typecheck(make_model, loss_fn, batch, mesh, rule)
        assert report, report
        ```
    """
    typed_axes = (AxisType.Explicit,) * len(mesh.axis_names)
    on: Any = mesh.update(axis_types=typed_axes)
    made = eqx.filter_eval_shape(make_model, jax.random.key(0))
    model, model_state = without_state(made)
    storage = shardings(model, on, rule)
    for _, leaf in array_leaves(batch):
        check_batch_size(leaf.shape[0], on)
    rows, whole = batch_sharding(on), NamedSharding(on, PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))
    specs = {
        path: compute_sharding(sharding).spec
        for (path, _), sharding in zip(array_leaves(model), jax.tree.leaves(storage))
    }
    typed = jax.tree.map(
        lambda x, place: _typed(x, compute_sharding(place)) if is_array(x) else x,
        model,
        storage,
        is_leaf=lambda x: x is None,
    )
    model_state, key = jax.tree.map(lambda x: _typed(x, whole), (model_state, key))
    given = typed, model_state, jax.tree.map(lambda x: _typed(x, rows), batch), key
    dynamic, static = eqx.partition(given, is_array)
    used: dict[str, Any] = {}

    def call(dynamic: PyTree) -> None:
        model, model_state, batch, key = eqx.combine(dynamic, static)
        used.update(array_leaves(model))
        loss_fn(model if model_state is None else (model, model_state), batch, key)

    try:
        with jax.sharding.use_abstract_mesh(_abstract(on)):
            jax.eval_shape(call, dynamic)
    except Exception as error:
        if not is_type_error(error):
            raise
        return _report(error, used, specs, dict(named_leaves(model)), rule)
    return TypeReport()


def is_type_error(error: BaseException) -> bool:
    """Whether JAX raised this because of how arrays are split."""
    # Which JAX does not export.
    return type(error).__name__ == "ShardingTypeError"


def add_type_note(error: Exception) -> None:
    """Note on an error of Explicit axes in a step which parameters meet something there."""
    if not is_type_error(error):
        return
    # The model is the first of what a loss function gets.
    used = {
        stored.path.removeprefix("0."): (array, compute_sharding(stored.storage).spec)
        for array, stored in (in_use() or {}).values()
    }
    met = _met(error, {path: array for path, (array, _) in used.items()})
    split = [(path, used[path][1]) for path in met if any(used[path][1])]
    fields = [
        f"{path} is split as {format_spec(spec)} by the rule." for path, spec in split
    ]
    error.add_note("\n".join([*fields, f"Remedy: {_advice(error)}."]))


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def _typed(x: Any, sharding: NamedSharding) -> Any:
    """The shape of an array, with its type on Explicit axes."""
    if not hasattr(x, "shape"):
        return x
    mesh = _abstract(sharding.mesh)  # pyright: ignore[reportArgumentType]
    place = NamedSharding(mesh, explicit_part(sharding.spec, mesh))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _report(
    error: Exception,
    used: Mapping[str, Any],
    specs: Mapping[str, PartitionSpec],
    leaves: Mapping[str, Any],
    rule: Rule,
) -> TypeReport:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    frame = user_frame(Frame(x.filename, x.lineno or 0, x.name) for x in frames)
    fields = []
    for path in _met(error, used):
        if not _is_lookup(error) and not any(specs[path]):
            continue
        dims = " ".join(name or "_" for name in leaf_dims(leaves[path]))
        annotated = f' "{dims}"' if dims else ""
        fields.append(
            f"{path} {leaves[path].shape}{annotated} is split as "
            f"{format_spec(specs[path])} by {rule_name(rule)}."
        )
    return TypeReport(
        str(error).split("\n")[0],
        None if frame is None else frame.place,
        tuple(fields),
        _advice(error),
        untyped=_is_lookup(error),
    )


def _advice(error: Exception) -> str:
    how = _LOOKUP if _is_lookup(error) else "say how the result is split (out_sharding=, "
    how += "" if _is_lookup(error) else "or jax.sharding.reshard of an input)"
    return f"{how}, or {_ON_AUTO}"


def _is_lookup(error: Exception) -> bool:
    """Whether it is of indexing, which JAX does not type by itself."""
    return any("indexing.py" in frame.f_code.co_filename for frame in _frames(error)) or (
        ".at[...].get" in str(error)
    )


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _met(error: Exception, used: Mapping[str, Any]) -> list[str]:
    """The parameters at the place of an error: the operands; else the layer's own."""
    paths = {id(array): path for path, array in used.items()}

    def found(values: Iterable[Any]) -> list[str]:
        return [*dict.fromkeys(paths[id(x)] for x in values if id(x) in paths)]

    frames = _frames(error)[::-1]
    for frame in frames:
        if here := found(frame.f_locals.values()):
            return here
    for frame in frames:
        layer = frame.f_locals.get("self")
        if isinstance(layer, eqx.Module) and (here := found(jax.tree.leaves(layer))):
            return here
    return []
