"""The calls of cuDNN's attention, for the rows and heads of each device.

They are the calls that `jax.nn.dot_product_attention` makes, as a test checks. But JAX
makes them only where cuDNN is installed, and they are split during compilation, by code in
the process that lowered them. Ours can be planned on any machine, and compiled by any
process.
"""

import functools as ft
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from .._jax import varies_along
from ..sharding._mesh import automatic_axes, batch_axes
from ..sharding._spec import AXES

#: The largest size of a head on all GPUs, and the number that it must be a multiple of.
_MAX_HEAD, _HEAD_MULTIPLE = 128, 8
#: The bias of a masked score: the lowest number of a dtype would overflow in a sum.
_MASKED = {"bfloat16": -2.0 * 2**40, "float16": -2.0 * 2**14}
_TYPES = {"bfloat16": "BF16", "float16": "F16"}
#: Before 0.11.1, JAX's call also returns the gradient of the bias.
_OF_BIAS = jax.__version_info__ < (0, 11, 1)
#: Swaps heads and sequence: cuDNN writes (batch, heads, seq, dim).
_SWAP = (0, 2, 1, 3)
#: The products of each direction: the dims that they sum over, and those of the batch, of
#: the left and the right factor.
_FORWARD = {
    "bmm1": ((3, 3), ((0, 2), (0, 2))),
    "bmm2": ((3, 1), ((0, 1), (0, 2))),
}
_BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


class Options(NamedTuple):
    """The static arguments of a call, as for [`eqxshard.nn.attention`][]."""

    causal: bool
    window: int | None
    scale: float


def attend(
    options: Options,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Bool[Array, "batch seq keys"] | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention; `mask` says which keys each query sees."""
    arrays = query, key, value, *([] if mask is None else [mask])
    return _attend(options, *vary_alike(*arrays))


def vary_alike(*arrays: Array) -> list[Array]:
    """Arrays in per-device code, made to vary along every axis that one of them varies on.

    The gradient of one that did not is then summed over the devices.
    """
    along = [varies_along(jax.typeof(x)) for x in arrays]
    every = frozenset().union(*along)
    missing = [tuple(sorted(every - own)) for own in along]
    return [
        jax.lax.pcast(x, axes, to="varying") if axes else x
        for x, axes in zip(arrays, missing, strict=True)
    ]


def knows_axes() -> bool:
    """True if the names of the axes in context say which split rows, and which heads."""
    mesh = jax.sharding.get_abstract_mesh()
    names = {*mesh.axis_names}
    return bool(mesh.manual_axes) or (bool(names) and names <= {*AXES, *batch_axes(mesh)})


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, *arrays: Array) -> Array:
    return in_rows(ft.partial(_forward, options), (4, 3), *arrays)[0]


def _attend_forward(options: Options, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    made = in_rows(ft.partial(_forward, options), (4, 3), *arrays)
    out, statistics = (checkpoint_name(x, "attention") for x in made)
    return out, (*arrays, statistics, out)


def _attend_backward(
    options: Options, kept: tuple[Array, ...], grad: Array
) -> tuple[Array | None, ...]:
    grads = in_rows(ft.partial(_backward, options), 4, *kept, grad)
    return *grads, *[None] * (len(kept) - 5)  # None for the mask, if there is one.


_attend.defvjp(_attend_forward, _attend_backward)


def in_rows(fn: Callable[..., Any], ranks: Any, *arrays: Array) -> Any:
    """Call a function of batches per device; `jax.vmap` makes one batch of several.

    **Arguments:**

    - `fn`: takes arrays `(batch, seq, heads, head_dim)`, and others of fewer dims: masks
        and segments, which are not floating-point, and statistics `(batch, heads, seq)`.
    - `ranks`: the number of dims of each of its results.
    - `arrays`: its arguments; the first two are query and key.
    """

    @custom_vmap
    def call(*arrays: Array) -> Any:
        return _on_devices(fn, ranks, *arrays)

    @call.def_vmap
    def _(size: int, mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        rows = (
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(arrays, mapped)
        )
        out = in_rows(fn, ranks, *(x.reshape(-1, *x.shape[2:]) for x in rows))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call(*arrays)


def _on_devices(fn: Callable[..., Any], ranks: Any, *arrays: Array) -> Any:
    """Call a function per device along the axes along which its caller is not."""
    mesh, (query, key, *_) = jax.sharding.get_abstract_mesh(), arrays
    axes = {*mesh.axis_names} - {*mesh.manual_axes}
    if not axes or not knows_axes():
        return fn(*arrays)
    names = batch_axes(mesh)  # As many of them as divide the rows, from the first.
    found = (automatic_axes(names[:n], len(query)) for n in range(len(names), 0, -1))
    rows = next(filter(None, found), None)
    heads = automatic_axes(("tensor",), query.shape[2], key.shape[2]) or None

    by_rank = {4: PartitionSpec(rows, None, heads), 3: PartitionSpec(rows, heads)}

    def spec(x: Array) -> PartitionSpec:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return by_rank[x.ndim] if is_float else PartitionSpec(rows)

    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=tuple(map(spec, arrays)),
        out_specs=jax.tree.map(by_rank.get, ranks),
        axis_names=axes,
    )(*arrays)


def _bias(query: Array, mask: Sequence[Array]) -> list[Array]:
    """The bias of a mask: 0 where it is true, a large negative number elsewhere."""
    dtype = query.dtype
    masked = jnp.asarray(_MASKED[dtype.name], dtype)
    return [jnp.where(x[:, None], jnp.asarray(0, dtype), masked) for x in mask]


def _forward(
    options: Options, query: Array, key: Array, value: Array, *mask: Array
) -> tuple[Array, Array]:
    """The output, and the statistics for the gradient: a number for each row of scores."""
    batch, seq, heads, dim = query.shape
    bias = _bias(query, mask)
    out, statistics = _call(
        f"__cudnn$fmha{'ScaleBias' if bias else ''}Softmax",
        _config(options, query, key, _FORWARD),
        [(batch, heads, seq, dim)],
        [((batch, heads, seq), np.float32)],
        [query, key, value, *bias],
    )
    return out, statistics


def _backward(
    options: Options, query: Array, key: Array, value: Array, *rest: Array
) -> Any:
    """The gradients of query, key and value."""
    *mask, statistics, out, grad = rest
    bias = _bias(query, mask)
    shapes = [tuple(x.shape[i] for i in _SWAP) for x in (query, key, value)]
    grads = _call(
        f"__cudnn$fmha{'ScaleBias' if bias else ''}SoftmaxBackward",
        _config(options, query, key, _BACKWARD),
        shapes,
        [(x.shape, x.dtype) for x in bias if _OF_BIAS],
        [query, key, value, statistics, grad, *bias, out],
    )
    return tuple(grads[:3])


def _call(
    name: str,
    config: str,
    swapped: Sequence[tuple[int, ...]],
    plain: Sequence[tuple[tuple[int, ...], Any]],
    operands: Sequence[Array],
) -> list[Array]:
    """Call cuDNN. Returns all results but the workspace, the transposed ones first."""
    query = operands[0]
    results = [jax.ShapeDtypeStruct(shape, query.dtype) for shape in swapped]
    results += [jax.ShapeDtypeStruct(*each) for each in plain]
    made = jax.ffi.ffi_call(
        name,
        [*results, jax.ShapeDtypeStruct((0,), np.uint8)],
        output_layouts=[_SWAP] * len(swapped) + [None] * (len(plain) + 1),
        custom_call_api_version=2,
        legacy_backend_config=config,
    )(*operands)[:-1]
    axes = tuple(sorted(varies_along(jax.typeof(query))))
    varying = [jax.lax.pcast(x, axes, to="varying") if axes else x for x in made]
    count = len(swapped)
    return [*(jnp.transpose(x, _SWAP) for x in varying[:count]), *varying[count:]]


def _config(options: Options, query: Array, key: Array, products: Any) -> str:
    """The configuration of a call, as XLA reads it: JSON."""
    batch, seq, heads, _ = query.shape
    layout = {
        "dim_level_types": [],
        "dim_unique": [],
        "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"],
        "tiles": [],
        "element_size_in_bits": "0",
        "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }
    config: dict[str, Any] = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": options.scale,
        "intermediate_tensor_shape": {
            "element_type": _TYPES[query.dtype.name],
            "dimensions": [str(n) for n in (batch, heads, seq, key.shape[1])],
            "tuple_shapes": [],
            "layout": layout,
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if options.causal else "NO_MASK",
    }
    for name, ((left, right), (left_batch, right_batch)) in products.items():
        config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(i) for i in left_batch],
            "rhs_batch_dimensions": [str(i) for i in right_batch],
        }
    config |= {
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": options.window or 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


def fits(query: Any, key: Any, mask: Any) -> bool:
    """True if cuDNN can do attention of these shapes, and its gradient, on all GPUs."""
    seq, keys, dim = query.shape[1], key.shape[1], query.shape[-1]
    is_even = mask is None or seq % 2 == keys % 2 == 0
    return dim <= _MAX_HEAD and dim % _HEAD_MULTIPLE == 0 and is_even
