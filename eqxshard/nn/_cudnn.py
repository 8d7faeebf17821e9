"""Self-attention by cuDNN where it is compiled for NVIDIA GPUs, exact elsewhere.

cuDNN splits over the batch and the heads as its arrays are split.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from ..sharding._mesh import BATCH_AXES, automatic_axes
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
    like = [jax.ShapeDtypeStruct(x.shape[-3:], x.dtype) for x in (query, key, key)]
    mask = None
    if segments is not None:
        mask = jax.ShapeDtypeStruct(segments.shape[-1:], segments.dtype)

    def gradient(query: Array, key: Array, value: Array, segments: Any) -> PyTree:
        out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), query, key, value)
        return back(out)

    # JAX has no other way to ask.
    try:
        jax.eval_shape(gradient, *like, mask)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def attend(
    exact: Callable[..., Array],
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads head_dim"],
    segments: Int[Array, "*batch seq"] | None,
    causal: bool,
    scale: float,
) -> Float[Array, "*batch seq heads head_dim"]:
    """Attention by cuDNN, or by `exact` where it is not compiled for such a GPU."""
    cudnn = ft.partial(_attend, causal, scale)
    if segments is None and not jax.sharding.get_abstract_mesh().manual_axes:
        return _by_platform(cudnn, exact)(query, key, value)
    arrays = (query, key, value) if segments is None else (query, key, value, segments)
    out = _by_batch((cudnn, exact), *arrays)
    return checkpoint_name(out, "attention")


def _attend(
    causal: bool,
    scale: float,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None = None,
) -> Array:
    mask = None
    if segments is not None:
        mask = (segments[..., :, None] == segments[..., None, :])[..., None, :, :]
        mask = mask.reshape(-1, *mask.shape[-3:])
    shape = query.shape
    query, key, value = (
        constrain(x.reshape(-1, *x.shape[-3:]), _WHOLE) for x in (query, key, value)
    )
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=causal,
        scale=scale,
        implementation="cudnn",
    )
    return constrain(out, _WHOLE).reshape(shape)


def _by_platform(cuda: Callable[..., Any], default: Callable[..., Any]) -> Any:
    return ft.partial(jax.lax.platform_dependent, cuda=cuda, default=default)


# With a whole batch, under `jax.vmap` too, and the gradient by hand so that this can be.
#
# - A mask is a bias to cuDNN, of which JAX's rule for vmap would ask that it has all heads.
# - In code that is per device over some axes, such as a pipeline's stages, cuDNN does not
#   split over the others by itself.
@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_batch(ways: tuple[Callable[..., Array], ...], *arrays: Array) -> Array:
    cudnn, exact = ways
    return _batched(_by_platform(ft.partial(_on_devices, cudnn), exact))(*arrays)


def _by_batch_fwd(
    ways: tuple[Callable[..., Array], ...], *arrays: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _by_batch(ways, *arrays), arrays


def _by_batch_bwd(
    ways: tuple[Callable[..., Array], ...], arrays: tuple[Array, ...], grad: Array
) -> tuple[Array | None, ...]:
    def gradient(attend: Callable[..., Array], *arrays: Array) -> tuple[Array, ...]:
        query, key, value, grad, *segments = arrays
        back = jax.vjp(lambda *qkv: attend(*qkv, *segments), query, key, value)[1]
        return back(grad)

    cudnn, exact = (ft.partial(gradient, way) for way in ways)
    call = _batched(_by_platform(ft.partial(_on_devices, cudnn), exact))
    return *call(*arrays[:3], grad, *arrays[3:]), *[None] * len(arrays[3:])


_by_batch.defvjp(_by_batch_fwd, _by_batch_bwd)


def _batched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays `*batch ...` that is called once under `jax.vmap`, too."""
    call = custom_vmap(fn)

    @call.def_vmap
    def _(axis_size: int, in_batched: list[bool], *args: Array) -> tuple[Any, Any]:
        out = call(
            *(
                x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
                for x, batched in zip(args, in_batched, strict=True)
            )
        )
        return out, jax.tree.map(lambda _: True, out)

    return call


def _on_devices(fn: Callable[..., Any], *arrays: Array) -> Any:
    """Call it per device over all axes, in code that is so over some of them."""
    mesh, batch = jax.sharding.get_abstract_mesh(), arrays[0].shape[:-3]
    rest = {*mesh.axis_names} - {*mesh.manual_axes}
    if not rest or not mesh.manual_axes:
        return fn(*arrays)
    arrays = tuple(x.reshape(-1, *x.shape[len(batch) :]) for x in arrays)
    rows = automatic_axes(BATCH_AXES, len(arrays[0])) or None
    heads = automatic_axes(("tensor",), arrays[0].shape[-2], arrays[1].shape[-2])
    spec = PartitionSpec(rows, None, heads or None)
    out = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=tuple(spec if x.ndim == 4 else PartitionSpec(rows) for x in arrays),
        out_specs=spec,
        axis_names=rest,
        check_vma=False,
    )(*arrays)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)
