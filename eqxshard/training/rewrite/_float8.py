"""Products of activations with parameters, on factors of eight bits.

Forward, both factors are float8_e4m3fn; backward, the gradient of the product is
float8_e5m2 and the other factor float8_e4m3fn (Micikevicius et al. 2022, FP8 Formats for
Deep Learning, https://arxiv.org/abs/2209.05433). Each factor is divided by one number, such
that its largest magnitude becomes the largest of the type: the "tensorwise dynamic" scaling
of torchao (https://github.com/pytorch/ao/tree/main/torchao/float8). Sums are in float32.

A parameter is rounded where it is stored, so that eight bits of each entry are gathered.
What is gathered in the type to compute in is left in the program for its gradient, which
goes back the way it always does, and for uses other than products; without any, the
compiler drops it.

The loss function is traced, and run again with parameters that know what they are rounded
to. What is not understood gets the parameters as they are.
"""

import contextlib
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jaxtyping import Array, Float

from ...sharding._explicit import auto_mesh, is_explicit, to_auto, type_mesh
from ...sharding._leaves import is_inexact, leaf_path
from .._precision import Precision, check_patterns, is_found
from ._jaxprs import evaluate_equation, map_jaxpr, open_jaxpr, scan_counts
from ._rewrite import is_rewriting, looks_for_nan, warn_once

#: The name of a product, for policies of what to keep for the backward pass.
KEPT = "float8_product"

_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
#: Of the features on both sides of a weight, as GPUs want them; fewer are not worth it.
_MULTIPLE = 16
#: What a product asks for that may be rounded.
_FAST = (None, (jax.lax.Precision.DEFAULT,) * 2)
#: What an array of another shape or place is made of, entry by entry.
_MOVES = (
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "slice",
    "dynamic_slice",
    "sharding_constraint",
    "reshard",
    "copy",
    "convert_element_type",
)


class _Stored(NamedTuple):
    """A parameter as it is stored; for one layer of several, with its largest magnitude."""

    array: Array
    largest: Float[Array, ""] | None = None


class _Weight(NamedTuple):
    """A parameter as it is used: rounded, and in the type to compute in."""

    array: Array
    rounded: Array
    scale: Float[Array, ""]


def with_float8(
    fn: Callable[..., Any], precision: Precision | None, models: int = 1
) -> Callable[..., Any]:
    """Have a function multiply activations with parameters as `precision` says.

    **Arguments:**

    - `fn`: a function of PyTrees.
    - `precision`: of the step.
    - `models`: how many of its first arguments have the parameters.

    **Returns:**

    The same function, to be differentiated in reverse, or not at all.
    """
    if precision is None or precision.matmul is None or not is_rewriting():
        return fn

    def rewritten(*args: Any) -> Any:
        if looks_for_nan():
            return fn(*args)
        flat, structure = jax.tree_util.tree_flatten_with_path(args)
        leaves = [leaf for _, leaf in flat]
        given = [i for i, leaf in enumerate(leaves) if eqx.is_array(leaf)]

        def call(*arrays: Any) -> Any:
            every = dict(enumerate(leaves)) | dict(zip(given, arrays, strict=True))
            return fn(*jax.tree.unflatten(structure, [*every.values()]))

        arrays = [leaves[i] for i in given]
        paths = {
            i: leaf_path(path[1:], "model")
            for i, (path, leaf) in enumerate(flat)
            if path[0].idx < models and is_inexact(leaf)
        }
        check_patterns("matmul_except", precision.matmul_except, paths.values())
        kept = (*precision.matmul_except, *precision.compute_except)
        chosen = {i for i, path in paths.items() if not is_found(kept, path)}
        inputs = [_Stored(leaves[i]) if i in chosen else leaves[i] for i in given]
        # A mistake in the user's code is raised here.
        jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*arrays)
        try:
            values = _run(open_jaxpr(jaxpr), jaxpr.consts, inputs)
        except Exception as error:
            warn_once(f"{type(error).__name__}: {error}")
            return fn(*args)
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return rewritten


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate an open jaxpr, of values that may be parameters."""
    outputs = _evaluate(jaxpr, consts, args)
    # A constant comes back as a NumPy scalar.
    return [
        x if isinstance(x, jax.Array) else jnp.asarray(x, var.aval.dtype)
        for x, var in zip(map(_plain, outputs), jaxpr.outvars, strict=True)
    ]


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The same, and what it returns may be parameters."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs, outputs = [read(atom) for atom in eqn.invars], None
        if any(isinstance(x, _Stored | _Weight) for x in inputs):
            outputs = _apply(eqn, inputs)
        if outputs is None:
            outputs = _bind(eqn, inputs)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _plain(value: Any) -> Any:
    return value.array if isinstance(value, _Stored | _Weight) else value


def _apply(eqn: Any, inputs: list[Any]) -> list[Any] | None:
    """What an equation gives for parameters; `None` if it takes them as plain arrays."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit", "closed_call"):
        return _inline(params, inputs)
    if name in ("custom_vjp_call", "custom_jvp_call"):
        return _moved_inside(eqn, inputs)
    if name == "scan":
        return _scan(eqn, inputs)
    if name in ("remat2", "checkpoint") and not params["differentiated"]:
        return _remat(eqn, inputs)
    if name == "dot_general":
        return _multiply(eqn, inputs)
    weight, *others = inputs
    if name == "reshard" and isinstance(weight, _Stored):
        return [_Stored(_bind(eqn, inputs)[0], weight.largest)]
    if name in _MOVES and isinstance(weight, _Weight):
        if any(isinstance(x, _Stored | _Weight) for x in others):
            return None
        (array,), rounded = _bind(eqn, inputs), weight.rounded
        if name != "convert_element_type":
            (rounded,) = _bind(eqn, [rounded, *others])
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            return None
        return [_Weight(array, rounded, weight.scale)]
    return None


def _bind(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of an equation, as the user's line computes them."""
    return evaluate_equation(eqn, [*map(_plain, inputs)])


def _at(eqn: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function at the user's line that an equation is from."""
    with eqn.ctx.manager:
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)

    def move(part: Any) -> Any:
        eqns = [each.replace(source_info=eqn.source_info) for each in part.eqns]
        return part.replace(eqns=eqns)

    values = core.jaxpr_as_fun(map_jaxpr(move, jaxpr))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), values)


def _inline(params: dict[str, Any], inputs: list[Any]) -> list[Any] | None:
    """A call, such as the one that `jnp.einsum` is."""
    places = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    if any(isinstance(each, jax.sharding.Sharding) for each in places):
        return None
    part = params.get("jaxpr", params.get("call_jaxpr"))
    return _evaluate(open_jaxpr(part), getattr(part, "consts", ()), inputs)


def _moved_inside(eqn: Any, inputs: list[Any]) -> list[Any] | None:
    """A function with a derivative of its own that returns a parameter: its gather."""
    part = eqn.params["call_jaxpr"]
    jaxpr = open_jaxpr(part)
    if len(jaxpr.outvars) != 1 or any(e.primitive.name not in _MOVES for e in jaxpr.eqns):
        return None
    with eqn.ctx.manager:
        weights = [_round_stored(x) if isinstance(x, _Stored) else x for x in inputs]
        (out,) = _evaluate(jaxpr, getattr(part, "consts", ()), weights)
    if not isinstance(out, _Weight):
        return None
    (array,) = _bind(eqn, inputs)
    return [_Weight(array, out.rounded, out.scale)]


def _round_stored(stored: _Stored) -> Any:
    """A parameter, and the same rounded where it is stored."""
    array = to_auto(jax.lax.stop_gradient(stored.array))
    if array.ndim < 2 or not jnp.issubdtype(array.dtype, jnp.floating):
        return stored.array
    return _Weight(stored.array, *_round(array, _FORWARD, stored.largest))


def _scan(eqn: Any, inputs: list[Any]) -> list[Any]:
    """A loop, which may be over the layers of stacked parameters."""
    start, count = scan_counts(eqn)
    carry = [*map(_plain, inputs[start : start + count])]
    consts, xs = inputs[:start], inputs[start + count :]
    scales = [x.scale if isinstance(x, _Weight) else None for x in xs]
    xs = [_by_layer(x) if isinstance(x, _Stored) else x for x in xs]
    xs = [x._replace(scale=None) if isinstance(x, _Weight) else x for x in xs]
    part = eqn.params["jaxpr"]

    def loop(consts: Any, scales: Any, carry: Any, xs: Any) -> Any:
        def body(carry: list[Any], xs: Any) -> tuple[list[Any], list[Any]]:
            layer = [
                x._replace(scale=scale) if isinstance(x, _Weight) else x
                for x, scale in zip(xs, scales, strict=True)
            ]
            args = [*consts, *carry, *layer]
            out = _run(open_jaxpr(part), getattr(part, "consts", ()), args)
            return out[: len(carry)], out[len(carry) :]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(body, carry, xs, **options)
        return [*carry, *stacked]

    return _at(eqn, loop, consts, scales, carry, xs)


def _by_layer(stored: _Stored) -> Any:
    """Stacked parameters, with the largest magnitude of each layer.

    Reduced here, where all layers' are one reduction over devices, and not in the loop.
    """
    array = jax.lax.stop_gradient(stored.array)
    if array.ndim < 3 or not jnp.issubdtype(array.dtype, jnp.floating):
        return stored
    with _auto_axes(type_mesh(array)):
        largest = jnp.max(jnp.abs(to_auto(array)), axis=range(1, array.ndim))
    return _Stored(stored.array, largest)


def _auto_axes(mesh: Any) -> Any:
    if not is_explicit(mesh):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(auto_mesh(mesh))


def _remat(eqn: Any, inputs: list[Any]) -> list[Any]:
    jaxpr = open_jaxpr(eqn.params["jaxpr"])
    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}

    def again(inputs: list[Any]) -> list[Any]:
        return jax.checkpoint(lambda *args: _run(jaxpr, (), args), **options)(*inputs)

    return _at(eqn, again, inputs)


def _multiply(eqn: Any, inputs: list[Any]) -> list[Any] | None:
    """The product of an activation with a weight, if it is large enough and of floats."""
    lhs, rhs = inputs
    if isinstance(lhs, _Weight) == isinstance(rhs, _Weight):
        return None
    if any(isinstance(x, _Stored) for x in inputs) or eqn.params["precision"] not in _FAST:
        return None
    dims, shapes = eqn.params["dimension_numbers"], [x.aval.shape for x in eqn.invars]
    dtypes = [x.aval.dtype for x in (*eqn.outvars, *eqn.invars)]
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return None
    inner = math.prod(shapes[0][dim] for dim in dims[0][0])
    outer = [
        math.prod(shape[dim] for dim in _free(len(shape), contracted, batch))
        for shape, contracted, batch in zip(shapes, *dims, strict=True)
    ]
    of_weight = outer[0] if isinstance(lhs, _Weight) else outer[1]
    if inner % _MULTIPLE or of_weight % _MULTIPLE or min(outer) < _MULTIPLE:
        return None
    known = [(x.rounded, x.scale) if isinstance(x, _Weight) else None for x in inputs]
    multiply = ft.partial(_product, dims, tuple(dtypes))
    out = eqn.outvars[0].aval.sharding

    def on_auto_axes(*args: Any) -> Array:
        with _auto_axes(out.mesh):
            product = multiply(*to_auto(args))
        if not is_explicit(out.mesh):
            return product
        with jax.sharding.use_abstract_mesh(out.mesh):
            return jax.sharding.reshard(product, out.spec)

    return [_at(eqn, on_auto_axes, _plain(lhs), _plain(rhs), *known)]


def _free(ndim: int, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dims that only one factor of a product has."""
    return [dim for dim in range(ndim) if dim not in (*contracted, *batch)]


def _round(
    x: Float[Array, "..."], dtype: Any, largest: Float[Array, ""] | None = None
) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """Round an array to eight bits.

    **Arguments:**

    - `x`: the array.
    - `dtype`: the type.
    - `largest`: its largest magnitude, if it is known.

    **Returns:**

    The array divided by its scale, and the scale, which its largest magnitude makes the
    largest number of the type. Of an array that is not finite, nothing is.
    """
    largest = jnp.max(jnp.abs(x)) if largest is None else largest
    scale = largest.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    # Of zeros, or of what is almost zero, dividing by which would overflow.
    scale = jnp.maximum(scale, float(np.finfo(np.float32).tiny))
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


@ft.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    dims: Any,
    dtypes: Any,
    lhs: Array,
    rhs: Array,
    lhs_rounded: tuple[Array, Array] | None,
    rhs_rounded: tuple[Array, Array] | None,
) -> Array:
    """`jax.lax.dot_general` of rounded arrays.

    **Arguments:**

    - `dims`: its `dimension_numbers`.
    - `dtypes`: those of the product, and of the arrays.
    - `lhs`, `rhs`: the arrays.
    - `lhs_rounded`, `rhs_rounded`: the same rounded, and their scales, if they are known.
    """
    return _forward(dims, dtypes, lhs, rhs, lhs_rounded, rhs_rounded)[0]


def _forward(
    dims: Any, dtypes: Any, lhs: Any, rhs: Any, left: Any, right: Any
) -> tuple[Array, Any]:
    left = _round(lhs, _FORWARD) if left is None else left
    right = _round(rhs, _FORWARD) if right is None else right
    out = checkpoint_name(_dot(left, right, dims, dtypes[0]), KEPT)
    # As bits, because `jax.checkpoint` rounds the floating-point numbers that it keeps with
    # `reduce_precision`, which makes nan of those beyond 240 in float8_e4m3fn.
    bits = [(jax.lax.bitcast_convert_type(x, jnp.uint8), s) for x, s in (left, right)]
    return out, bits


def _backward(dims: Any, dtypes: Any, kept: Any, grad: Array) -> tuple[Any, ...]:
    left, right = [(jax.lax.bitcast_convert_type(x, _FORWARD), s) for x, s in kept]
    rounded = _round(grad, _BACKWARD)
    (lhs, rhs), (lhs_batch, rhs_batch) = dims
    mine, theirs = (lhs, lhs_batch), (rhs, rhs_batch)
    return (
        _factor_gradient(rounded, right, mine, theirs, dtypes[1], True),
        _factor_gradient(rounded, left, theirs, mine, dtypes[2], False),
        None,
        None,
    )


_product.defvjp(_forward, _backward)


def _factor_gradient(
    grad: Any, other: Any, mine: Any, theirs: Any, dtype: Any, is_left: bool
) -> Array:
    """The gradient of a factor of a product: the product of `grad` with the other factor.

    `mine` and `theirs` are the contracted and batch dims of this factor and of the other.
    The dims of the product are the batch's, then those that only the left factor has, then
    the right's.
    """
    (contracted, batch), (their_contracted, their_batch) = mine, theirs
    their_free = _free(other[0].ndim, *theirs)
    ndim = grad[0].ndim - len(their_free) + len(contracted)
    free = _free(ndim, *mine)
    start = len(batch) + (len(free) if is_left else 0)
    summed = tuple(range(start, start + len(their_free)))
    dims = (summed, tuple(their_free)), (tuple(range(len(batch))), their_batch)
    out = _dot(grad, other, dims, dtype)
    # What is contracted comes last, in the order of the other's dims.
    last = [contracted[i] for i in np.argsort(their_contracted)]
    return jnp.transpose(out, [*np.argsort([*batch, *free, *last])])


def _dot(left: Any, right: Any, dims: Any, dtype: Any) -> Array:
    """The product of two rounded arrays, each with its scale.

    In this form, compilers for GPUs multiply eight bits, and scale and cast in the same
    kernel. One scale after the other, as the product of two small ones may underflow.
    """
    (a, a_scale), (b, b_scale) = left, right
    out = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    return (out * a_scale * b_scale).astype(dtype)
