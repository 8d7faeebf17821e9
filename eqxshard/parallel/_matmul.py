"""Matrix products of tensor parallelism that compute while they communicate.

Arrays are split over an axis of n devices: `x` into blocks of rows, which are those before
the last dim, or into features; `weight` by its columns or by its rows. In each of n *steps*
a device multiplies one block of rows, and sends one to the next device of a ring.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .._errors import UsageError
from ..transforms._dtypes import accumulation_dtype, at_least_float32
from ._ring import Ring, find_ring


def all_gather_matmul(
    x: Float[Array, "*batch rows in"],
    weight: Float[Array, "in out"],
    *,
    axis: str = "tensor",
) -> Float[Array, "*batch all_rows out"]:
    """`x @ weight` where each device has some rows of `x` and some columns of `weight`.

    The result has all rows and is split by columns. Instead of gathering `x` first, a
    device multiplies the rows it has while the next ones arrive from its neighbour, so the
    communication is hidden behind the product (Wang et al. 2023, Overlap Communication
    with Dependent Computation via Decomposition in Large Deep Learning Models,
    https://doi.org/10.1145/3567955.3567959). Each device sends its block `n - 1` times
    around a ring of `n`; the gradient of `x` travels the other way, summed underway as by
    [`eqxshard.parallel.matmul_reduce_scatter`][]. The gathered rows are kept for the
    gradient of `weight`, unless `jax.checkpoint` (`remat` of [`eqxshard.scan_layers`][])
    has them gathered again.

    It runs on the mesh of the step, like [`eqxshard.constrain`][]. Without a mesh, or with
    an axis of size 1, it is `x @ weight`; the values are the same either way, up to
    rounding. In per-device code of [`jax.shard_map`][] over `axis` it takes and returns
    the device's own parts. Other mesh axes are left to the compiler.

    **Arguments:**

    - `x`: its rows, such as the positions of a sequence, are split over `axis`. Under
        `jax.vmap`, those of one example.
    - `weight`: its columns are split over `axis`.
    - `axis`: the mesh axis.

    **Returns:**

    `x @ weight`, its columns split over `axis`.

    **Raises:**

    `ValueError` if the shapes do not fit each other, the rows or the columns do not divide
    over the axis, or the mesh has no such axis.

    !!! Example

        An MLP as in Megatron-LM, between whose layers a sequence stays split over `tensor`
        (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198):

        ```python
        class MLP(eqx.Module):
            up: Float[Array, "embed mlp"]
            down: Float[Array, "mlp embed"]

            def __call__(self, x: Float[Array, "seq embed"]):
                x = eqxshard.constrain(x, P("tensor"))
                hidden = jax.nn.gelu(all_gather_matmul(x, self.up))
                return x + matmul_reduce_scatter(hidden, self.down)


        rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.fsdp())
        ```
    """
    ring = _find_ring("all_gather_matmul", x, weight, axis)
    if ring.size == 1:
        return x @ weight
    if ring.mesh is not None:
        ring.check_divides(x.shape[-2], "rows of x")
        ring.check_divides(weight.shape[1], "columns of weight")
    rows, columns = _split_specs(x.ndim, axis)
    in_specs = (rows, PartitionSpec(None, axis))
    return ring.run(ft.partial(_gather_matmul, ring), in_specs, columns, x, weight)


def matmul_reduce_scatter(
    x: Float[Array, "*batch all_rows in"],
    weight: Float[Array, "in out"],
    *,
    axis: str = "tensor",
) -> Float[Array, "*batch rows out"]:
    """`x @ weight` where each device has some columns of `x` and those rows of `weight`.

    The products of all devices must be summed, and the sum is split by rows: a
    reduce-scatter, which here is hidden behind the product. A device adds its own part to
    the sum for some rows while it multiplies the next ones, and passes the sum on to its
    neighbour. This is the counterpart of [`eqxshard.parallel.all_gather_matmul`][], with
    the same communication, and each is the gradient of the other.

    **Arguments:**

    - `x`: its last dim is split over `axis`. All devices have all rows.
    - `weight`: its rows are split over `axis`.
    - `axis`: the mesh axis.

    **Returns:**

    `x @ weight`, its rows split over `axis`. Sums are sent in the dtype of the result, and
    added up in float32 or better.

    **Raises:**

    `ValueError` as for [`eqxshard.parallel.all_gather_matmul`][].

    !!! Example

        ```python
        hidden = jax.nn.gelu(all_gather_matmul(x, self.up))
        x = x + matmul_reduce_scatter(hidden, self.down)
        ```
    """
    ring = _find_ring("matmul_reduce_scatter", x, weight, axis)
    if ring.size == 1:
        return x @ weight
    ring.check_divides(x.shape[-2], "rows of x")
    if ring.mesh is not None:
        ring.check_divides(x.shape[-1], "columns of x")
    rows, columns = _split_specs(x.ndim, axis)
    in_specs = (columns, PartitionSpec(axis))
    return ring.run(ft.partial(_matmul_scatter, ring), in_specs, rows, x, weight)


def _find_ring(name: str, x: Array, weight: Array, axis: str) -> Ring:
    if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise UsageError(
            f"{name}: x has the shape {x.shape} and weight {weight.shape}; give x "
            "(*batch, rows, in) and weight (in, out), with the same size of in."
        )
    return find_ring(name, axis)


def _split_specs(ndim: int, axis: str) -> tuple[PartitionSpec, PartitionSpec]:
    """How an array is split by its rows, and by its columns."""
    batch = [None] * (ndim - 2)
    return PartitionSpec(*batch, axis), PartitionSpec(*batch, None, axis)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather_matmul(ring: Ring, rank: Array, x: Array, weight: Array) -> Array:
    return _gather_ring(ring, rank, x, weight)[0]


@_gather_matmul.defjvp
def _(
    ring: Ring, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (rank, x, weight), (_, dx, dweight) = primals, tangents
    out, gathered = _gather_ring(ring, rank, x, weight)
    # One product for the gradient of the weight. A product for each step would be summed
    # over the axes of the batch each time.
    return out, _gather_ring(ring, rank, dx, weight)[0] + gathered @ dweight


def _gather_ring(
    ring: Ring, rank: Array, block: Array, weight: Array
) -> tuple[Array, Array]:
    """The product of all devices' rows, and these rows."""
    outs: list[Array] = []
    blocks: list[Array] = []
    for step in range(ring.size):
        # Sent before it is used, so that the next block arrives while this one is.
        arriving = ring.send(block) if step + 1 < ring.size else block
        outs.append(block @ weight)
        blocks.append(block)
        block = arriving
    return _put_rows(outs, rank), _put_rows(blocks, rank)


def _put_rows(parts: list[Array], rank: Array) -> Array:
    """All rows, from blocks in the order of their arrival: this device's first."""
    *batch, length, width = parts[0].shape
    shape = (*batch, len(parts) * length, width)
    out = jnp.zeros_like(parts[0], shape=shape)
    for step, part in enumerate(parts):
        start = (rank - step) % len(parts) * length
        out = jax.lax.dynamic_update_slice_in_dim(out, part, start, axis=-2)
    return out


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matmul_scatter(ring: Ring, rank: Array, x: Array, weight: Array) -> Array:
    def part(owner: Array) -> Array:
        return _dot(_take_rows(ring, x, owner), weight)

    return _scatter_ring(ring, rank, part, jnp.result_type(x, weight))


@_matmul_scatter.defjvp
def _(
    ring: Ring, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (rank, x, weight), (_, dx, dweight) = primals, tangents
    # One product for the gradient of the weight here too.
    of_weight = x @ dweight

    def part(owner: Array) -> Array:
        rows = _take_rows(ring, of_weight, owner)
        return _dot(_take_rows(ring, dx, owner), weight) + at_least_float32(rows)

    out = _matmul_scatter(ring, rank, x, weight)
    return out, _scatter_ring(ring, rank, part, out.dtype)


def _scatter_ring(
    ring: Ring, rank: Array, part: Callable[[Array], Array], dtype: Any
) -> Array:
    """The sum of all devices' parts for the rows of this device."""
    total = part((rank - 1) % ring.size)
    for step in range(2, ring.size + 1):
        received = ring.send(total.astype(dtype))
        total = at_least_float32(received) + part((rank - step) % ring.size)
    return total.astype(dtype)


def _take_rows(ring: Ring, x: Array, owner: Array) -> Array:
    """The rows that belong to one device."""
    length = x.shape[-2] // ring.size
    return jax.lax.dynamic_slice_in_dim(x, owner * length, length, axis=-2)


def _dot(x: Array, weight: Array) -> Array:
    """A product that may be added to others."""
    dtype = accumulation_dtype(jnp.result_type(x, weight))
    return jnp.matmul(x, weight, preferred_element_type=dtype)
