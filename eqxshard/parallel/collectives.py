"""Collectives for per-device code, in terms of data parallelism.

This is the vocabulary of the UvA tutorials on training models at scale (Phillip Lippe,
https://uvadlc-notebooks.readthedocs.io), for plain PyTrees inside
[`eqxshard.filter_shard_map`][]. There the code of one device computes the loss of *its
own* rows, and the gradient of that; these functions turn it into the gradient of the mean
over all rows. So do not average the loss over devices before differentiating it: the
gradient would be too small by their number. (With `check_vma` on, a loss that is averaged
needs none of this: JAX derives its gradient from `jax.lax.pmean` and
`jax.lax.all_gather`.)

They are correct whether or not `check_vma` is on. (With it, JAX itself sums the gradients
of an array that several devices share; `sync_gradients` reads from a gradient's type that
this was done, and only divides.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Key, PyTree, Shaped, UInt32

from .._errors import UsageError
from ..sharding._leaves import is_array
from ..sharding._spec import axes_of, check_axis, spec_axes
from ..sharding._text import comma_list
from ..transforms._shard_map import broadcast_specs


def all_gather_mean_grad(
    x: Shaped[Array, "..."], axis: str | tuple[str, ...], dim: int = 0
) -> Shaped[Array, "..."]:
    """Gather the parts of all devices; the gradient is their mean, scattered.

    An all-gather whose gradient is a reduce-scatter of the mean, where the gradient of
    [`jax.lax.all_gather`][] takes the sum: each device gets its own part of the mean of
    all devices' gradients. (`gather_array_with_mean_grads` in the UvA tutorial on fully
    sharded data parallelism.)

    **Arguments:**

    - `x`: this device's part.
    - `axis`: the mesh axis, or several, slowest first, that the array is split over.
    - `dim`: the dim of `x` that is split.

    **Returns:**

    The whole array: the size of `dim` times the number of devices along the axis.

    **Raises:**

    `ValueError` if the code is not per device along the axis, or `x` has no such dim.
    """
    axes = _check_bound(axis, "all_gather_mean_grad")
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(
            f"all_gather_mean_grad of an array {x.shape}, which has no dim {dim}; choose a "
            f"dim below {x.ndim}."
        )
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = _scale_gradient(x, 1 / jax.lax.axis_size(axes))
    return jax.lax.all_gather(x, axes, axis=dim % x.ndim, tiled=True)


def shift(x: PyTree[Array], axis: str, by: int = 1, *, wrap: bool = True) -> PyTree[Array]:
    """Send arrays to neighbours along an axis, in a ring or in a line.

    **Arguments:**

    - `x`: a PyTree of arrays.
    - `axis`: the mesh axis.
    - `by`: how far: device `i` gets the arrays of device `i - by`.
    - `wrap`: whether the last device sends to the first, as in ring attention. Otherwise,
        as in a pipeline, devices without a sender get zeros.

    **Returns:**

    A PyTree like `x`, with the neighbour's arrays.

    **Raises:**

    `ValueError` if the code is not per device along the axis.
    """
    _check_bound(axis, "shift")
    size = jax.lax.axis_size(axis)
    ring = [(i, (i + by) % size) for i in range(size)]
    line = [(i, i + by) for i in range(size) if 0 <= i + by < size]
    return jax.lax.ppermute(x, axis, ring if wrap else line)


def fold_in_axes(
    key: Key[Array, ""] | UInt32[Array, "2"], axes: str | tuple[str, ...]
) -> Key[Array, ""] | UInt32[Array, "2"]:
    """Make one random key into another for each device along some axes.

    Devices that differ along other axes only get the same key: for dropout, fold in the
    axes that the batch is split over, but not `tensor`, whose devices must agree. The key
    of a device depends on its index along all the axes together, so it is the same on 8
    devices with `data=8` as with `data=2, fsdp=4`. (`fold_rng_over_axis` in the UvA
    tutorials.)

    **Arguments:**

    - `key`: a random key, the same on all devices.
    - `axes`: the mesh axis, or several, slowest first.

    **Returns:**

    A key like `key`.

    **Raises:**

    `ValueError` if the code is not per device along an axis.
    """
    axes = _check_bound(axes, "fold_in_axes")
    return jax.random.fold_in(key, jax.lax.axis_index(axes))


def gather_params(
    params: PyTree, specs: PyTree[PartitionSpec | None], axes: str | tuple[str, ...]
) -> PyTree:
    """Gather parameters for use, each from the parts that devices store.

    Their gradients are reduce-scattered: each device gets its own part of the mean over
    the axes that a parameter is split over. The means over the other axes are left to
    [`eqxshard.parallel.collectives.sync_gradients`][]. (ZeRO stage 3, Rajbhandari et al.
    2020, https://arxiv.org/abs/1910.02054; `gather_params` in the UvA tutorial on fully
    sharded data parallelism.)

    **Arguments:**

    - `params`: any PyTree; leaves that are not arrays pass through.
    - `specs`: how they are stored: a PyTree of `PartitionSpec`s that is a prefix of
        `params`, such as the `.spec` of each sharding that [`eqxshard.shardings`][]
        returns.
    - `axes`: the mesh axis, or several, that the batch is split over. Dims that are split
        over other axes, such as `tensor`, stay split.

    **Returns:**

    A PyTree like `params`.

    **Raises:**

    `ValueError` if the code is not per device along an axis.

    !!! Example

        ```python
        axes = ("data", "fsdp")
        shardings = eqxshard.shardings(params, mesh, eqxshard.fsdp())
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

        def per_device(params, batch):
            def loss(params):
                return loss_fn(gather_params(params, specs, axes), batch)

            grads = sync_gradients(jax.grad(loss)(params), specs, axes)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        step = eqxshard.filter_shard_map(per_device, mesh, (specs, P(axes)), specs)
        ```
    """
    axes = _check_bound(axes, "gather_params")

    def gather_leaf(path: str, leaf: Array, spec: PartitionSpec) -> Array:
        # So that JAX scatters gradients before it sums them over the other axes.
        leaf = _vary(leaf, axes)
        for dim, entry in enumerate(spec):
            gathered = tuple(axis for axis in axes_of(entry) if axis in axes)
            if not gathered:
                continue
            if axes_of(entry)[-len(gathered) :] != gathered:
                raise UsageError(
                    f"{path}: {spec} splits dim {dim} over {entry}, and gathering it over "
                    f"{comma_list(gathered)} alone would reorder its rows; name the axes "
                    "to gather over last."
                )
            leaf = all_gather_mean_grad(leaf, gathered, dim)
        return leaf

    return _map_arrays(gather_leaf, params, specs, "params")


def sync_gradients(
    grads: PyTree, specs: PyTree[PartitionSpec | None], axes: str | tuple[str, ...]
) -> PyTree:
    """Average gradients over devices, along the axes where that is still to be done.

    Along an axis that a parameter is split over, the mean was taken when its gradient was
    scattered ([`eqxshard.parallel.collectives.gather_params`][]).

    **Arguments:**

    - `grads`: the gradients of each device's own loss.
    - `specs`: how the parameters are stored: a PyTree of `PartitionSpec`s that is a prefix
        of `grads`; `P()` for parameters that every device has whole.
    - `axes`: the mesh axis, or several, that the batch is split over.

    **Returns:**

    A PyTree like `grads`: the gradients of the mean of all devices' losses.

    **Raises:**

    `ValueError` if the code is not per device along an axis.
    """
    axes = _check_bound(axes, "sync_gradients")

    def average(path: str, grad: Array, spec: PartitionSpec) -> Array:
        left = tuple(axis for axis in axes if axis not in spec_axes(spec))
        summed = tuple(a for a in left if _is_checked(a) and a not in _varying(grad))
        unsummed = tuple(axis for axis in left if axis not in summed)
        if unsummed:
            grad = jax.lax.pmean(grad, unsummed)
        return grad / jax.lax.axis_size(summed) if summed else grad

    return _map_arrays(average, grads, specs, "grads")


def _scale_gradient(x: Array, factor: float) -> Array:
    @jax.custom_vjp
    def identity(x: Array) -> Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, grad: (grad * factor,))
    return identity(x)


def _varying(x: Array) -> frozenset[str]:
    """The axes that JAX takes `x` to vary along; none of those it does not check."""
    return jax.typeof(x).mat.varying


def _is_checked(axis: str) -> bool:
    """Whether this code runs with `check_vma`."""
    return axis in _varying(jax.lax.axis_index(axis))


def _vary(x: Array, axes: tuple[str, ...]) -> Array:
    """Tell JAX that `x` varies over devices, so that its gradient does too."""
    shared = tuple(axis for axis in axes if axis not in _varying(x))
    return jax.lax.pcast(x, shared, to="varying") if shared else x


def _map_arrays(
    fn: Callable[[str, Any, PartitionSpec], Any], tree: PyTree, specs: PyTree, root: str
) -> PyTree:
    mesh = jax.sharding.get_abstract_mesh()
    leaves = broadcast_specs(specs, tree, "specs", root)
    for path, _, spec in leaves:
        for axis in spec_axes(spec):
            check_axis(axis, mesh, path)
    found = iter(leaves)
    return jax.tree.map(lambda leaf: fn(*next(found)) if is_array(leaf) else leaf, tree)


def _check_bound(axes: str | tuple[str, ...], where: str) -> tuple[str, ...]:
    """The axes as a tuple; raise unless this code is per device along each of them."""
    axes = (axes,) if isinstance(axes, str) else axes
    for axis in axes:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            mesh = jax.sharding.get_abstract_mesh()
            if not mesh.empty:
                check_axis(axis, mesh, where)
            raise UsageError(
                f"{where} names the axis {axis!r}, but this code is not per device along "
                "it; call it inside eqxshard.filter_shard_map."
            ) from None
    return axes
