"""Sharding as a type check: the first place where arrays meet that are split differently.

On Explicit axes JAX types each array by how it is split, while it traces. Nothing is
compiled, and no device is needed.
"""

import itertools
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

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

_MOST_FIELDS = 8
_ON_AUTO = "leave this to the compiler on Auto axes, as eqxshard.make_mesh makes them"


class _Kind(NamedTuple):
    """A kind of error on Explicit axes.

    - `said`: a pattern of what JAX or Equinox says, with `float32[8@data]` as `float32[8]`.
    - `remedy`: what to write.
    - `untyped`: whether nothing is known to be wrong.
    """

    said: str
    remedy: str
    untyped: bool = False

    def matches(self, text: str) -> bool:
        """Whether text is of this kind."""
        return re.search(self.said, re.sub(r"@(\w+|\([^)]*\))", "", text)) is not None


_LOOKUP = _Kind(
    r"\.at\[\.\.\.\]\.get",
    "write table.at[ids].get(out_sharding=...) in place of table[ids]; under more than one "
    "jax.vmap, wrap it in jax.sharding.auto_axes(..., out_sharding=...)",
    untyped=True,
)
_KINDS = (
    _LOOKUP,
    _Kind(
        "conv_general_dilated|is not supported|is not implemented",
        "wrap it in jax.sharding.auto_axes(..., out_sharding=...)",
        untyped=True,
    ),
    _Kind(
        "only AbstractMesh exists|should match the aval mesh|Mesh for all inputs",
        "compute such a constant in make_model, as a field of the model, or train under "
        "jax.set_mesh(mesh)",
        untyped=True,
    ),
    _Kind(
        "Mapped away dimension",
        "jax.sharding.reshard what jax.vmap maps over alike, such as the keys of "
        "jax.random.split as the rows of the batch",
    ),
    _Kind(
        "has type (.*) but the corresponding .* has type \\1",
        "begin the loop with an array that is split as the loop returns it, and have all "
        "branches return the same (jax.sharding.reshard)",
    ),
    _Kind(
        "The old value is (.*) and the new value is \\1",
        "jax.sharding.reshard the state's new value as the old (BatchNorm: mode='batch')",
        untyped=True,
    ),
)
#: All others that JAX raises as of how arrays are split.
_SPLIT = _Kind(
    "",
    "say how the result is split (out_sharding=, or jax.sharding.reshard of an input)",
)


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
        kind = _kind(error)
        if kind is None:
            raise
        return _report(error, kind, used, specs, dict(named_leaves(model)), rule)
    return TypeReport()


def _kind(error: BaseException) -> _Kind | None:
    """Which kind of error on Explicit axes it is, if it is one."""
    # Which JAX does not export.
    is_typing = type(error).__name__ == "ShardingTypeError"
    if not is_typing and not isinstance(error, TypeError | ValueError):
        return None
    for kind in _KINDS:
        if kind.matches(str(error)):
            return kind
    if not is_typing:
        return None
    files = [frame.f_code.co_filename for frame in _frames(error)]
    return _LOOKUP if any("indexing.py" in file for file in files) else _SPLIT


def add_type_note(error: Exception) -> None:
    """Note on an error of Explicit axes in a step which parameters meet something there."""
    kind = _kind(error)
    if kind is None:
        return
    used = {
        stored.path.removeprefix("model."): (array, compute_sharding(stored.storage).spec)
        for array, stored in (in_use() or {}).values()
    }
    met = _met(error, {path: array for path, (array, _) in used.items()})
    split = [(path, used[path][1]) for path in met if any(used[path][1])]
    fields = [
        f"{path} is split as {format_spec(spec)} by the rule." for path, spec in split
    ]
    error.add_note("\n".join([*fields, f"Remedy: {_advice(kind)}."]))


def _abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def _typed(x: Any, sharding: NamedSharding) -> Any:
    """The shape of an array, with its type on Explicit axes."""
    if not hasattr(x, "shape"):
        return x
    mesh = _abstract(sharding.mesh)  # pyright: ignore[reportArgumentType]
    place = NamedSharding(mesh, explicit_part(sharding.spec, mesh))
    # As JAX takes an array of float64 where jax_enable_x64 is off.
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=place)


def _report(
    error: Exception,
    kind: _Kind,
    used: Mapping[str, Any],
    specs: Mapping[str, PartitionSpec],
    leaves: Mapping[str, Any],
    rule: Rule,
) -> TypeReport:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    frame = user_frame(Frame(x.filename, x.lineno or 0, x.name) for x in frames)
    said, fields, met = str(error).split("\n"), [], _met(error, used)
    for path in met:
        # One table that is looked up in is what to know, split or not.
        if not any(specs[path]) and (kind is not _LOOKUP or len(met) > 1):
            continue
        dims = " ".join(name or "_" for name in leaf_dims(leaves[path]))
        annotated = f' "{dims}"' if dims else ""
        fields.append(
            f"{path} {leaves[path].shape}{annotated} is split as "
            f"{format_spec(specs[path])} by {rule_name(rule)}."
        )
    return TypeReport(
        next(filter(kind.matches, said), said[0]).strip(" *;"),
        None if frame is None else frame.place,
        tuple(fields),
        _advice(kind),
        untyped=kind.untyped,
    )


def _advice(kind: _Kind) -> str:
    return f"{kind.remedy}, or {_ON_AUTO}"


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _met(error: Exception, used: Mapping[str, Any]) -> list[str]:
    """The parameters at the place of an error: the operands; else the layer's own."""
    paths = {id(array): path for path, array in used.items()}

    def found(values: Iterable[Any]) -> list[str]:
        return [*dict.fromkeys(paths[id(x)] for x in values if id(x) in paths)]

    frames = _frames(error)[::-1]
    for frame in frames:
        values = [*frame.f_locals.values()]
        several = [each for each in values if isinstance(each, tuple | list)]
        if here := found(itertools.chain(values, *several)):
            return here
    for frame in frames:
        layers = [x for x in frame.f_locals.values() if isinstance(x, eqx.Module)]
        if here := found(jax.tree.leaves(layers)):
            # All of a large model would say nothing.
            return here if len(here) <= _MOST_FIELDS else []
    return []
