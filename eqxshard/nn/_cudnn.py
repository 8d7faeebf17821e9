"""Self-attention by cuDNN, which splits over the batch and the heads as its arrays do."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..sharding._mesh import automatic_axes, batch_axes
from ..sharding._placement import constrain
from . import _packed

_ANY = PartitionSpec.UNCONSTRAINED
#: cuDNN takes whole sequences, also where experts would have the compiler split them.
_WHOLE = PartitionSpec(_ANY, None, _ANY, None)


class Options(NamedTuple):
    """The static arguments of a call, as for [`eqxshard.nn.attention`][]."""

    causal: bool
    window: int | None
    scale: float


def supports(options: Options, query: Array, key: Array, segments: Array | None) -> bool:
    """Whether cuDNN is installed and can do this attention and its gradient."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    if jax.sharding.get_abstract_mesh().manual_axes and not _compiles_per_device():
        return False
    seq = min(query.shape[1], _packed.CHUNK) if segments is not None else query.shape[1]
    # Of one example, whatever the mesh.
    like = [jax.ShapeDtypeStruct((1, seq, *x.shape[2:]), x.dtype) for x in (query, key)]
    mask = None if segments is None else jax.ShapeDtypeStruct((1, seq, seq), jnp.bool)

    def gradient(query: Array, key: Array, value: Array, mask: Array | None) -> PyTree:
        attend = ft.partial(_dot_product, options, mask=mask)
        out, back = jax.vjp(attend, query, key, value)
        return back(out)

    # JAX has no other way to ask.
    try:
        jax.eval_shape(gradient, *like, like[1], mask)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def attend(options: Options, *arrays: Array) -> Array:
    """Attention of a query, a key and a value, and maybe segments."""
    query, key, value, *segments = arrays
    query, key, value = (constrain(x, _WHOLE) for x in (query, key, value))
    if segments and query.shape[1] > _packed.CHUNK:
        attend = ft.partial(_dot_product, options._replace(causal=False, window=None))
        packed = _packed.Packed(attend, options.causal, options.window)
        forward = ft.partial(_packed.forward, packed)
        calls = _Calls(forward, ft.partial(_packed.backward, packed))
        out = _call(calls, query, key, value, *segments)
    elif _inside_per_device_code():
        fn = ft.partial(_attend, options)
        calls = _Calls(fn, ft.partial(_gradient, fn))
        out = _call(calls, query, key, value, *segments)
    else:
        return constrain(_attend(options, query, key, value, *segments), _WHOLE)
    return checkpoint_name(constrain(out, _WHOLE), "attention")


class _Calls(NamedTuple):
    """Attention, and a function that has the gradient of its output before segments."""

    forward: Callable[..., Array]
    backward: Callable[..., tuple[Array, ...]]


def _gradient(
    fn: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    grad: Array,
    *segments: Array,
) -> tuple[Array, ...]:
    return jax.vjp(lambda *qkv: fn(*qkv, *segments), query, key, value)[1](grad)


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(calls: _Calls, *arrays: Array) -> Array:
    return _in_rows(calls.forward, *arrays)


def _forward(calls: _Calls, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _in_rows(calls.forward, *arrays), arrays


def _backward(
    calls: _Calls, arrays: tuple[Array, ...], grad: Array
) -> tuple[Array | None, ...]:
    query, key, value, *segments = arrays
    grads = _in_rows(calls.backward, query, key, value, grad, *segments)
    return *grads, *[None] * len(segments)


_call.defvjp(_forward, _backward)


def _in_rows(fn: Callable[..., Any], *arrays: Array) -> Any:
    """Call a function of batches. Under `jax.vmap` it gets one batch of them all."""

    @custom_vmap
    def call(*arrays: Array) -> Any:
        return _on_devices(fn, *arrays)

    @call.def_vmap
    def _(size: int, mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        rows = (
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(arrays, mapped)
        )
        out = _in_rows(fn, *(x.reshape(-1, *x.shape[2:]) for x in rows))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call(*arrays)


def _inside_per_device_code() -> bool:
    """Whether the code around is per device over some axes, such as a pipeline's stages.

    There cuDNN does not split over the others by itself, and JAX cannot differentiate what
    is split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and {*mesh.manual_axes} < {*mesh.axis_names}


def _compiles_per_device() -> bool:
    return jax.__version_info__ >= (0, 10, 2)


def _on_devices(fn: Callable[..., Any], *arrays: Array) -> Any:
    """Call a function per device over the axes over which the code around it is not."""
    mesh, (query, key, *_) = jax.sharding.get_abstract_mesh(), arrays
    rows = automatic_axes(batch_axes(mesh), len(query))
    heads = automatic_axes(("tensor",), query.shape[2], key.shape[2])
    split = math.prod(mesh.shape[axis] for axis in (*rows, *heads))
    split_otherwise = split != mesh.size or not _compiles_per_device()
    if not _inside_per_device_code() and split_otherwise:
        # Split over other axes, if at all, as the compiler has it.
        return fn(*arrays)
    spec = PartitionSpec(rows or None, None, heads or None)
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=tuple(spec if x.ndim == 4 else PartitionSpec(*spec[:1]) for x in arrays),
        out_specs=spec,
        axis_names={*mesh.axis_names} - {*mesh.manual_axes},
    )(*arrays)


def _attend(
    options: Options,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    mask = None
    if segments is not None:
        mask = segments[:, :, None] == segments[:, None, :]
        if options.window is not None:
            # Not every cuDNN has both.
            far = jnp.tri(query.shape[1], k=-options.window, dtype=bool)[None]
            mask &= ~jnp.broadcast_to(far, mask.shape)
            options = options._replace(window=None)
    return _dot_product(options, query, key, value, mask)


def _dot_product(
    options: Options,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Bool[Array, "batch seq keys"] | None,
) -> Float[Array, "batch seq heads head_dim"]:
    window = options.window
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=None if mask is None else mask[:, None],
        is_causal=options.causal,
        scale=options.scale,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
