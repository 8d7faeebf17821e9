"""Lint of a step: everything that is found before it runs for the first time."""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._jax import Literal, frames_of, scope_of
from ..compiled._causes import plain_dims, user_frame
from ..compiled._findings import REWRITTEN, Finding
from ..compiled._hlo import Frame, parse_module
from ..compiled._lint_text import Argument, LintedStep, TextLint, unread_is_warned
from ..sharding._combinators import HOST_MEMORY, optimizer_rule
from ..sharding._leaves import array_leaves, format_array, leaf_path
from ..sharding._mesh import batch_axes
from ..sharding._optimizer_state import decide_opt_state, is_split
from ..sharding._placement import decide_leaves, named_leaves
from ..sharding._rule import NamedLeaf, Rule, check_rule
from ..sharding._spec import AnyMesh
from ..sharding._text import first_few
from ._inputs import STACKED_BATCHES, DeviceBatches, StepInput
from ._jit import Program
from ._optimizer import PER_LAYER, UPDATE, is_stacked
from ._state import TrainState, split_model, without_state
from .rewrite._jaxprs import all_jaxprs, consts_of, equations, jaxprs_in, open_jaxpr

if TYPE_CHECKING:
    from ._step import Call

#: Constants of fewer bytes are not reported.
_LARGE = 10**6
#: Operations on matrices, by JAX's names. Reductions have a parameter `axes`.
_OF_MATRICES = ("dot_general", "svd", "qr", "geqrf", "eigh", "cholesky")
_CALLBACKS = {
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
}
_Shape = tuple[int, ...]
#: The arrays of a model, from `named_leaves`.
_Leaves = list[tuple[str, NamedLeaf]]
#: A jaxpr and those inside of it, from `all_jaxprs`.
_Parts = Sequence[tuple[Any, str]]


def lint_step(call: "Call", program: Program, batch: PyTree) -> Iterator[Finding]:
    """The findings in a step: in how its rule splits a model, and in its program.

    **Arguments:**

    - `call`: the step and its arguments.
    - `program`: the program that was compiled for it.
    - `batch`: the batch that it was compiled for.
    """
    yield from lint_traced(call, program.jaxpr)
    with _unread_is_warned():
        linted = describe_step(call, program.jaxpr, batch)
        yield from TextLint(parse_module(program.text), linted).findings()


def lint_traced(call: "Call", jaxpr: Any) -> Iterator[Finding]:
    """The findings in a step before it is compiled.

    **Arguments:**

    - `call`: the step and its arguments.
    - `jaxpr`: the traced program.
    """
    step, state = call.variant, call.state
    if state is not None:
        model, named = state.model, named_leaves(state.model)
        yield from lint_rule(named, step.mesh, step.rule)
        yield from _lint_opt_state(state, named, step.mesh, step.rule)
    else:
        model, named = _kept_model(call), []
    with _unread_is_warned():
        compute = None if step.precision is None else step.precision.compute
        if compute is None:
            compute = _usual_dtype(model)
        yield from lint_jaxpr([*all_jaxprs(jaxpr)], compute)
        if state is not None:
            yield from _lint_update(state, named, jaxpr)


def describe_step(call: "Call", jaxpr: Any, batch: PyTree) -> LintedStep:
    """The facts about a step that lint needs to read its compiled text.

    **Arguments:** as for `lint_traced`; `batch` is the batch that it is compiled for.
    """
    step = call.variant
    if call.state is not None:
        leaves = array_leaves(call.state)
        donated = [each.memory_kind != HOST_MEMORY for each in step.shardings]
    else:
        leaves = array_leaves(_kept_model(call), "model")
        donated = [False] * len(leaves)
    arguments = [
        Argument(
            name=f"arrays[{number}]",
            path=path.removeprefix("model."),
            shape=tuple(leaf.shape),
            donated=is_donated,
            in_model=path == "model" or path.startswith("model."),
        )
        for number, ((path, leaf), is_donated) in enumerate(zip(leaves, donated))
    ]
    return LintedStep(
        dict(step.mesh.shape),
        arguments,
        _batch_entries(call.key.kind, batch),
        scanned_shapes([*all_jaxprs(jaxpr)]),
        batch_axes(step.mesh),
    )


def _kept_model(call: "Call") -> PyTree:
    """The model that a step measures."""
    return without_state(call.key.kept.static.combine(call.kept))[0]


def _usual_dtype(model: PyTree) -> Any:
    """The widest floating-point dtype of a model's parameters; `None` if it has none.

    Adapters in float32 beside a base in bfloat16 are meant to be wider. A few parameters in
    float64 mostly are not: that is the default dtype with `jax_enable_x64`.
    """
    counts = Counter[Any]()
    for _, leaf in array_leaves(model):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            counts[jnp.dtype(leaf.dtype)] += math.prod(leaf.shape)
    double = jnp.dtype(jnp.float64)
    if 2 * counts[double] < counts.total():
        del counts[double]
    return max(counts, key=lambda x: x.itemsize, default=None)


def _unread_is_warned() -> contextlib.AbstractContextManager[None]:
    return unread_is_warned(
        "a step", ", and make the step with lint='off' until it is mended"
    )


def lint_rule(leaves: _Leaves, mesh: AnyMesh, rule: Rule) -> Iterator[Finding]:
    """The findings in how a rule splits the arrays of a model: `whole` and `unmatched`."""
    for (path, leaf), decision in zip(leaves, decide_leaves(leaves, mesh, rule)):
        # The split of a vector saves too little to be missed.
        is_vector = sum(size > 1 for size in leaf.shape) < 2
        if decision.undivided and not is_vector and not is_split(decision.spec, mesh):
            yield Finding(
                "whole",
                path,
                None,
                f"{path or 'the array'} {format_array(leaf)} is whole on every device, "
                f"though {decision.rule} asked for a split ({decision.note}). Pad one of "
                "its dims to a multiple.",
            )
    try:
        check_rule(rule, dict(leaves), mesh)
    except ValueError as error:
        # `init_state` would have refused this rule, but it made the state with another.
        yield Finding("unmatched", None, None, str(error))


def _lint_opt_state(
    state: TrainState, leaves: _Leaves, mesh: AnyMesh, rule: Rule
) -> Iterator[Finding]:
    """Arrays of the optimizer's state that are whole, and larger than their parameter."""
    # Frozen arrays are among them, too; the state has nothing for those.
    params, _ = split_model(state.model, True)
    parts = {
        path: leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for path, leaf in array_leaves(params)
    }
    updates = optimizer_rule(rule)
    decisions = decide_leaves([x for x in leaves if x[0] in parts], mesh, updates)
    for each in decide_opt_state(state.opt_state, params, decisions, mesh, updates):
        size = each.leaf.dtype.itemsize * math.prod(each.leaf.shape)
        is_large = size > parts.get(each.param or "", _LARGE)
        if each.decision.undivided and is_large and not each.same_shape:
            name = f"opt_state.{each.path}"
            yield Finding(
                "whole",
                name,
                None,
                f"{name} {format_array(each.leaf)}, {size / 1e6:.3g} MB, is whole on every "
                f"device, and its parameter is not ({each.decision.rule}: "
                f"{each.decision.note}).",
            )


def _batch_entries(
    kind: StepInput, batch: PyTree
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The path of each array of a batch and its shape in one step, by JAX's name for it."""
    if isinstance(batch, DeviceBatches):
        size = batch.rows.shape[1]
        examples = {name: (size, *x.shape[1:]) for name, x in batch.examples.items()}
        found = {f"batch.examples[{n!r}]": (f"batch.{n}", s) for n, s in examples.items()}
        return found | {"batch.rows": ("batch", (size,))}
    leading = 1 if kind is STACKED_BATCHES else 0
    return {
        f"batch{jax.tree_util.keystr(path)}": (leaf_path(path, "batch"), x.shape[leading:])
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
    }


def lint_jaxpr(parts: _Parts, compute: Any) -> Iterator[Finding]:
    """The findings of kinds `constant`, `dtype` and `callback`, in a step as it was traced.

    The compiled text would not say: compilers for CPUs compute bfloat16 in float32, and
    print no large constants.

    **Arguments:**

    - `parts`: from `all_jaxprs`.
    - `compute`: the widest dtype to compute in, if there is one.
    """
    yield from _constants(parts)
    if compute is not None:
        yield from _wide_products(parts, jnp.dtype(compute))
    calls = dict[str, Any]()
    for eqn, scope in _equations(parts, _CALLBACKS):
        # A check by error_if calls the host only if it fails, in a rewrite of ours.
        if REWRITTEN not in f"{scope}/{scope_of(eqn)}":
            calls.setdefault(eqn.primitive.name, eqn)
    for name, function in _CALLBACKS.items():
        if name in calls:
            yield Finding(
                "callback",
                None,
                _line(calls[name]),
                f"the step calls the host ({function}), and devices wait for it. Return "
                "values as metrics instead, and compute on the device.",
            )


def calls_host(jaxpr: Any) -> bool:
    """True if a program calls the host."""
    return any(eqn.primitive.name in _CALLBACKS for eqn in equations(jaxpr))


def scanned_shapes(parts: _Parts) -> set[_Shape]:
    """The shapes of the arrays that loops take one part of in each iteration."""
    found = set[_Shape]()
    for eqn, _ in _equations(parts, ["scan"]):
        inside = open_jaxpr(eqn.params["jaxpr"]).invars
        pairs = [(x.aval, y.aval) for x, y in zip(eqn.invars, inside)]
        # What a loop takes whole has the same shape inside of it.
        found |= {whole.shape for whole, part in pairs if whole.shape != part.shape}
    return found


def _equations(parts: _Parts, names: Collection[str]) -> Iterator[tuple[Any, str]]:
    """The equations of some primitives, and the transforms around the jaxpr of each."""
    for part, scope in parts:
        for eqn in open_jaxpr(part).eqns:
            if eqn.primitive.name in names:
                yield eqn, scope


def _line(eqn: Any) -> str | None:
    """The user's line that an equation comes from."""
    frames = frames_of(eqn)
    found = user_frame(Frame(x.file_name, x.line_num, x.function_name) for x in frames)
    return found and found.place


def _constants(parts: _Parts) -> Iterator[Finding]:
    """Findings of large arrays that the program has, but the step was not given."""
    for part, _ in parts:
        names = open_jaxpr(part).constvars
        for name, value in zip(names, consts_of(part)):
            if getattr(value, "nbytes", 0) < _LARGE:
                continue
            users = [x for x in open_jaxpr(part).eqns if any(y is name for y in x.invars)]
            yield Finding(
                "constant",
                None,
                _line(users[0]) if users else None,
                f"{format_array(value)}, {value.nbytes / 1e6:.3g} MB, is compiled in as a "
                "constant, on every device. Make it a field of the model, an entry of the "
                "batch, or a part of extra.",
            )


def _wide_products(parts: _Parts, compute: Any) -> Iterator[Finding]:
    """Matrix products in a wider type, if they are most of the loss and its gradient."""

    def is_wide(var: Any) -> bool:
        dtype = jnp.dtype(var.aval.dtype)
        return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > compute.itemsize

    products = [
        eqn
        for eqn, scope in _equations(parts, ["dot_general"])
        if "jvp(" in f"{scope}/{scope_of(eqn)}"
    ]
    # A product that asks for the highest precision is meant to be wide.
    meant = (jax.lax.Precision.HIGHEST,) * 2
    wide = [
        eqn
        for eqn in products
        if eqn.params["precision"] != meant and any(map(is_wide, eqn.invars))
    ]
    # One layer may need it, such as a softmax.
    if wide and 2 * len(wide) >= len(products):
        types = " and ".join(format_array(var.aval) for var in wide[0].invars)
        yield Finding(
            "dtype",
            None,
            _line(wide[0]),
            f"{len(wide)} of {len(products)} matrix products are in a wider type than "
            f"{compute.name}; the first is of {types}. An array of that type made its "
            "products wide: cast it with .astype(x.dtype), or leave jax_enable_x64 off.",
        )


def _lint_update(state: TrainState, leaves: _Leaves, jaxpr: Any) -> Iterator[Finding]:
    """Stacked layers of a model that the optimizer takes for one array."""
    stacks = {path for path, leaf in leaves if is_stacked(leaf) and leaf.shape[0] > 1}
    if not stacks:
        return
    made, trainable = state.made_with, True
    if made is not None and made.fits(state.model):
        trainable = made.trainable(state.model)
    params, _ = split_model(state.model, trainable)
    shapes = {path: tuple(leaf.shape) for path, leaf in array_leaves(params)}
    others = {_dims(shape) for path, shape in shapes.items() if path not in stacks}
    found = set[_Shape]()
    # An optimizer that looks at all parameters together looks at a single one, too.
    if len({*shapes.values()}) > 1:
        found = {*map(_dims, _looked_at(open_jaxpr(jaxpr), {}, ""))} - others
    paths = [path for path in shapes if path in stacks and _dims(shapes[path]) in found]
    if paths:
        yield Finding(
            "per-layer",
            paths[0],
            None,
            f"the optimizer takes the stacked layers of {first_few(paths)} for one array; "
            f"write eqxshard.per_layer(optim, {paths[0].partition('.')[0]!r}), and leave "
            "outside of it what looks at all parameters, as in "
            "optax.chain(optax.clip_by_global_norm(1), per_layer(...)).",
        )


def _dims(shape: _Shape) -> _Shape:
    """The dims of a matrix in any order, without those of 1: it may be transposed."""
    return tuple(plain_dims(shape))


def _looked_at(jaxpr: Any, sums: dict[Any, set[_Shape]], scope: str) -> Iterator[_Shape]:
    """The shapes of arrays that an update reads as matrices, or scales by a norm of theirs.

    `sums` has the shapes of the arrays that a number was computed from. The norm of several
    arrays is for clipping by the global norm, or the like.
    """
    for eqn in jaxpr.eqns:
        here = f"{scope}/{scope_of(eqn)}"
        parts = [*map(open_jaxpr, jaxprs_in(eqn.params))]
        for part in parts:
            # Before those of a part, an equation may have a condition, or those of another.
            given = zip(reversed(part.invars), reversed(eqn.invars))
            inside = {x: _read(sums, y) for x, y in given}
            yield from _looked_at(part, inside, here)
            for out, result in zip(eqn.outvars, part.outvars):
                sums[out] = _read(sums, out) | _read(inside, result)
        if parts or UPDATE not in here or PER_LAYER in here:
            continue
        looks = eqn.primitive.name in _OF_MATRICES or "axes" in eqn.params
        shapes = {x.aval.shape for x in eqn.invars if x.aval.size > 1} if looks else set()
        numbers = set[_Shape]().union(*(_read(sums, x) for x in eqn.invars))
        for out in eqn.outvars:
            if out.aval.size == 1:
                sums[out] = numbers | shapes
            else:
                yield from shapes
                yield from numbers if numbers == {out.aval.shape} else ()


def _read(sums: dict[Any, set[_Shape]], atom: Any) -> set[_Shape]:
    return set() if isinstance(atom, Literal) else sums.get(atom, set())
