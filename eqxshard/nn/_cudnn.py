"""Self-attention by cuDNN, split over the axes of the batch and over `tensor`.

On meshes whose axes have other names, and without a mesh, JAX splits it like its arrays.
"""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..sharding._placement import constrain
from . import _cudnn_call, _packed
from ._cudnn_call import Options, in_rows

_ANY = PartitionSpec.UNCONSTRAINED
#: cuDNN takes whole sequences, even where the compiler would split them for experts.
_WHOLE = PartitionSpec(_ANY, None, _ANY, None)


def supports(options: Options, query: Array, key: Array, segments: Array | None) -> bool:
    """True if cuDNN can do this attention and its gradient on the devices in context."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    seq = min(query.shape[1], _packed.CHUNK) if segments is not None else query.shape[1]
    # For one example, whatever the mesh.
    like = [jax.ShapeDtypeStruct((1, seq, *x.shape[2:]), x.dtype) for x in (query, key)]
    mask = None if segments is None else jax.ShapeDtypeStruct((1, 1, seq, seq), jnp.bool)

    def gradient(query: Array, key: Array, value: Array, mask: Array | None) -> PyTree:
        attend = ft.partial(
            jax.nn.dot_product_attention,
            mask=mask,
            is_causal=options.causal,
            implementation="cudnn",
        )
        out, back = jax.vjp(attend, query, key, value)
        return back(out)

    # JAX has no other way to ask.
    try:
        jax.eval_shape(gradient, *like, like[1], mask)
    except NotImplementedError:
        return False
    except RuntimeError:
        # cuDNN is not installed here, but it is where the GPUs of the mesh are.
        fits = _cudnn_call.fits(like[0], like[1], mask)
        return fits and _is_for_gpus() and _cudnn_call.knows_axes()
    return True


def _is_for_gpus() -> bool:
    """True if the mesh in context is for GPUs, which may not be on this machine."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "gpu"


def attend(options: Options, *arrays: Array) -> Array:
    """Attention of a query, a key and a value, with or without segments."""
    query, key, value, *segments = arrays
    query, key, value = (constrain(x, _WHOLE) for x in (query, key, value))
    if not segments or query.shape[1] <= _packed.CHUNK:
        return constrain(_attend(options, query, key, value, *segments), _WHOLE)
    attend = ft.partial(_dot_product, options._replace(causal=False, window=None))
    packed = _packed.Packed(attend, options.causal, options.window)
    forward = ft.partial(_packed.forward, packed)
    calls = _Calls(forward, ft.partial(_packed.backward, packed))
    out = _attend_packed(calls, *_cudnn_call.vary_alike(query, key, value, *segments))
    return checkpoint_name(constrain(out, _WHOLE), "attention")


class _Calls(NamedTuple):
    """Attention, and its backward pass: of the same arrays, with `grad` before segments."""

    forward: Callable[..., Array]
    backward: Callable[..., tuple[Array, ...]]


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_packed(calls: _Calls, *arrays: Array) -> Array:
    return in_rows(calls.forward, 4, *arrays)


def _packed_forward(calls: _Calls, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return in_rows(calls.forward, 4, *arrays), arrays


def _packed_backward(
    calls: _Calls, arrays: tuple[Array, ...], grad: Array
) -> tuple[Array | None, ...]:
    query, key, value, *segments = arrays
    grads = in_rows(calls.backward, 4, query, key, value, grad, *segments)
    return *grads, *[None] * len(segments)


_attend_packed.defvjp(_packed_forward, _packed_backward)


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
            # Not every cuDNN has both a mask and a window.
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
    if _cudnn_call.knows_axes():
        return _cudnn_call.attend(options, query, key, value, mask)
    # The compiler splits JAX's own function like its arrays.
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
