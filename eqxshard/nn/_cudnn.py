"""Self-attention by cuDNN, which splits over the batch and the heads as its arrays do."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from ..sharding._mesh import automatic_axes, batch_axes
from ..sharding._placement import constrain

_ANY = PartitionSpec.UNCONSTRAINED
#: cuDNN takes whole sequences, also where experts would have the compiler split them.
_WHOLE = PartitionSpec(_ANY, None, _ANY, None)


def supports(
    query: Array, key: Array, segments: Array | None, causal: bool, scale: float
) -> bool:
    """Whether cuDNN is installed and can do this attention and its gradient."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    # It can be compiled in per-device code since JAX 0.10.2.
    per_device = jax.sharding.get_abstract_mesh().manual_axes
    if per_device and jax.__version_info__ < (0, 10, 2):
        return False
    attend = ft.partial(_attend, causal, scale)
    arrays = (query, key, key) if segments is None else (query, key, key, segments)
    # Of one example, whatever the mesh.
    like = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in arrays]

    def gradient(query: Array, key: Array, value: Array, *segments: Array) -> PyTree:
        out, back = jax.vjp(lambda q, k, v: attend(q, k, v, *segments), query, key, value)
        return back(out)

    # JAX has no other way to ask.
    try:
        jax.eval_shape(gradient, *like)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def attend(causal: bool, scale: float, *arrays: Array) -> Array:
    """Attention of a query, a key and a value, and maybe segments."""
    fn = ft.partial(_attend, causal, scale)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes and {*mesh.manual_axes} < {*mesh.axis_names}:
        return checkpoint_name(_within_per_device_code(fn, *arrays), "attention")
    return fn(*arrays)


# In code that is per device over some axes, such as a pipeline's stages, cuDNN does not
# split over the others by itself. JAX cannot differentiate `_on_devices` there.
@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _within_per_device_code(fn: Callable[..., Array], *arrays: Array) -> Array:
    return _on_devices(fn, *arrays)


def _forward(fn: Callable[..., Array], *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _on_devices(fn, *arrays), arrays


def _backward(
    fn: Callable[..., Array], arrays: tuple[Array, ...], grad: Array
) -> tuple[Array | None, ...]:
    def gradient(*arrays: Array) -> tuple[Array, ...]:
        query, key, value, grad, *segments = arrays
        return jax.vjp(lambda *qkv: fn(*qkv, *segments), query, key, value)[1](grad)

    segments = arrays[3:]
    return *_on_devices(gradient, *arrays[:3], grad, *segments), *[None] * len(segments)


_within_per_device_code.defvjp(_forward, _backward)


def _on_devices(fn: Callable[..., Any], *arrays: Array) -> Any:
    """Call a function per device over the axes over which the code around it is not."""
    mesh, (query, key, *_) = jax.sharding.get_abstract_mesh(), arrays
    rows = automatic_axes(batch_axes(mesh), len(query)) or None
    heads = automatic_axes(("tensor",), query.shape[2], key.shape[2]) or None
    spec = PartitionSpec(rows, None, heads)
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=tuple(spec if x.ndim == 4 else PartitionSpec(rows) for x in arrays),
        out_specs=spec,
        axis_names={*mesh.axis_names} - {*mesh.manual_axes},
        check_vma=False,
    )(*arrays)


def _attend(
    causal: bool,
    scale: float,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    query, key, value = (constrain(x, _WHOLE) for x in (query, key, value))
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=causal,
        scale=scale,
        implementation="cudnn",
    )
    return constrain(out, _WHOLE)
