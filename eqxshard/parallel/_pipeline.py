"""Pipeline parallelism: a stack of layers split over `stage`, a batch in microbatches.

Glossary:

- a *stage* is one device along the mesh axis `stage`, with an equal share of the layers,
  which follow one another;
- a *layer* is numbered within the whole stack, a *row* (one example) within the batch;
- a *microbatch* is one of several equal parts of a device's rows;
- in a *tick* each stage takes at most one microbatch through its layers, and then sends
  the result to a neighbour.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._errors import UsageError
from ..sharding._explicit import on_auto_axes
from ..sharding._leaves import array_leaves, format_array, stacked_depth
from ..sharding._mesh import batch_axes
from ..sharding._spec import format_sizes
from ..transforms._shard_map import filter_shard_map


@on_auto_axes(like="x")
def pipeline(
    layers: PyTree,
    x: Float[Array, "batch ..."],
    *args: PyTree,
    microbatches: int,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch ..."]:
    r"""Apply a stack of layers, split over the mesh axis `stage`, to a batch.

    The batch passes through the stages in microbatches: while a stage works on one, the
    stage before it works on the next. This is GPipe (Huang et al. 2019,
    https://arxiv.org/abs/1811.06965): all microbatches go forward, then all go backward.
    Each direction takes `microbatches + stages - 1` ticks, and each stage is idle in
    `stages - 1` of them. Layers are recomputed in the backward pass, so only their inputs
    are kept, but those of all microbatches.

    It runs on the mesh of the step, like [`eqxshard.constrain`][]. (Outside a step, call
    it under `jax.jit`.) Without a mesh, or with `stage=1`, the layers are applied to the
    whole batch, one after the other. The result is the same either way.

    **Arguments:**

    - `layers`: one module whose arrays have a leading dim of layers, as from
        `eqx.filter_vmap(make_layer)(keys)`. A layer takes the activations of one example
        and returns activations of the same shape and dtype. The rule should store it with
        `P("stage")`.
    - `x`: the activations of a batch, its rows split over `data` and `fsdp`.
    - `args`: further inputs of every layer for each example, such as its positions: PyTrees
        of arrays whose leading dim is the batch, or `None`. They go with their microbatch:
        a layer is called as `layer(h, *args)`.
    - `microbatches`: the number of parts to split each device's rows into. Use several
        times the number of stages to keep the stages busy.
    - `key`: a random key. If given, a layer is called with a `key=` as well, which differs
        between layers and between examples, and is the same on every mesh.

    **Returns:**

    The activations after the last layer, in the shape of `x`.

    **Raises:**

    `ValueError` if the layers do not divide over the stages, or the batch into
    microbatches; if `microbatches` is not positive; if an array of `layers` does not have
    the leading dim, or one of `args` the batch's size; or if a layer changes the shape or
    dtype of activations.

    !!! Example

        ```python
        rule = eqxshard.first_match(
            eqxshard.by_path({r"^layers\.": P("stage")}), eqxshard.replicate()
        )


        def loss_fn(model, batch, key):
            h = jax.vmap(model.embed)(batch["x"])
            h = eqxshard.parallel.pipeline(model.layers, h, microbatches=8, key=key)
            return optax.squared_error(jax.vmap(model.head)(h), batch["y"])
        ```
    """
    args = jax.tree.map(jnp.asarray, args)
    _check_rows({"args": args}, len(x))
    layer_ids, rows = jnp.arange(stacked_depth(layers)), jnp.arange(len(x))
    stages, batch_axes = _split_axes(len(layer_ids), len(x), microbatches)
    last = stages - 1
    if last == 0:
        return _apply_layers(layers, layer_ids, x, args, rows, key)

    def gpipe(
        layers: PyTree, layer_ids: Array, inputs: PyTree, rows: Array, key: Any
    ) -> Array:
        stage = jax.lax.axis_index("stage")
        to_next = [(stage, stage + 1) for stage in range(last)]
        layers = local_copy(layers)
        (x, args), rows = _to_microbatches((local_copy(inputs), rows), microbatches)

        def tick(received: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            time, new = now
            microbatch = time - stage
            h = jnp.where(stage == 0, new, received)
            now_args, now_rows = jax.tree.map(lambda leaf: leaf[microbatch], (args, rows))
            busy = (microbatch >= 0) & (microbatch < microbatches)
            h = _apply_layers(layers, layer_ids, h, now_args, now_rows, key, busy)
            return jax.lax.ppermute(h, "stage", to_next), h

        # Zeros enter after the last microbatch.
        entering = jnp.pad(x, [(0, last)] + [(0, 0)] * (x.ndim - 1))
        now = jnp.arange(microbatches + last), entering
        _, out = jax.lax.scan(tick, jnp.zeros_like(x[0]), now)
        # The first microbatch leaves the last stage when it has passed the others.
        return jnp.where(stage == last, _from_microbatches(out[last:]), 0)[None]

    by_stage, by_batch = PartitionSpec("stage"), PartitionSpec(batch_axes)
    in_specs = (
        PartitionSpec(batch_axes, "stage"),
        by_stage,
        PartitionSpec("stage", batch_axes),
        by_batch,
        PartitionSpec(),
    )
    out_specs = PartitionSpec("stage", batch_axes)
    run = _per_device(gpipe, batch_axes, in_specs, out_specs)
    layers, inputs = copy_along(batch_axes, layers), copy_along(("stage",), (x, args))
    # Only the last stage's result is not zero, so the sum, which is exact in any dtype,
    # sends it to all stages.
    return jax.lax.reduce_sum(run(layers, layer_ids, inputs, rows, key), (0,))


def _split_axes(layers: int, batch: int, microbatches: int) -> tuple[int, tuple[str, ...]]:
    """The number of stages, and the axes of the batch; raise unless everything divides."""
    if microbatches < 1:
        raise UsageError(f"microbatches={microbatches} must be at least 1.")
    mesh = jax.sharding.get_abstract_mesh()
    stages = mesh.shape["stage"] if "stage" in mesh.auto_axes else 1
    rows = tuple(axis for axis in batch_axes(mesh) if axis in mesh.auto_axes)
    if stages == 1:
        return stages, rows
    if layers % stages:
        raise UsageError(
            f"{layers} layers do not divide over stage={stages}; use a multiple of "
            f"{stages} layers, or a number of stages that divides {layers}."
        )
    sizes = {axis: mesh.shape[axis] for axis in rows}
    devices = math.prod(sizes.values())
    parts = devices * microbatches
    if batch % parts:
        raise UsageError(
            f"a batch of {batch} does not divide over {format_sizes(sizes)} = {devices} "
            f"devices, each with microbatches={microbatches}; use a multiple of {parts} "
            "examples, or fewer microbatches."
        )
    return stages, rows


def _apply_layers(
    layers: PyTree,
    layer_ids: Array,
    h: Array,
    args: tuple[PyTree, ...],
    rows: Array,
    key: PRNGKeyArray | None,
    busy: Array | None = None,
) -> Array:
    """Apply a stage's layers, one after the other.

    A stage that is not busy computes as well, on values that may lead to nan, so its
    weights and `args` get no gradient then.
    """
    arrays, static = eqx.partition(layers, eqx.is_array)
    if busy is not None:
        args = jax.tree.map(ft.partial(_stop_gradient_unless, busy), args)

    # The scan already keeps XLA from merging the recomputation with the forward pass.
    @ft.partial(jax.checkpoint, prevent_cse=False)
    def one(h: Array, layer: tuple[PyTree, Array]) -> tuple[Array, None]:
        arrays, layer_id = layer
        if busy is not None:
            arrays = jax.tree.map(ft.partial(_stop_gradient_unless, busy), arrays)
        layer = eqx.combine(arrays, static)
        return _apply_layer(layer, layer_id, h, args, rows, key), None

    return jax.lax.scan(one, h, (arrays, layer_ids))[0]


def _stop_gradient_unless(condition: Array, leaf: Array) -> Array:
    if not eqx.is_inexact_array(leaf):
        return leaf
    return jnp.where(condition, leaf, jax.lax.stop_gradient(leaf))


def _apply_layer(
    layer: PyTree,
    layer_id: Array,
    h: Array,
    args: tuple[PyTree, ...],
    rows: Array,
    key: PRNGKeyArray | None,
) -> Array:
    """Apply one layer to each example of a microbatch."""
    if key is None:
        out = jax.vmap(layer)(h, *args)
    else:
        key = jax.random.fold_in(key, layer_id)
        keys = jax.vmap(ft.partial(jax.random.fold_in, key))(rows)
        out = jax.vmap(lambda key, h, *args: layer(h, *args, key=key))(keys, h, *args)
    if _format_example(out) != _format_example(h):
        raise UsageError(
            f"a layer takes {_format_example(h)} for each example and returns "
            f"{_format_example(out)}; have it return the same shape and dtype, for the "
            "next layer to take."
        )
    return out


def _format_example(batch: PyTree) -> str:
    """The dtype and shape of one example of a batch: `float32[16]`."""
    if not isinstance(batch, jax.Array):
        return f"a {type(batch).__name__}"
    return format_array(jax.ShapeDtypeStruct(batch.shape[1:], batch.dtype))


def _check_rows(tree: PyTree, rows: int) -> None:
    """Raise unless all arrays of a PyTree have an entry for each example."""
    for path, leaf in array_leaves(tree):
        if leaf.shape[:1] != (rows,):
            raise UsageError(
                f"{path} has the shape {leaf.shape} for a batch of {rows}; give it one "
                "entry for each example."
            )


def _to_microbatches(tree: PyTree, microbatches: int) -> PyTree:
    """Give this device's rows a leading dim of microbatches."""
    return jax.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), tree)


def _from_microbatches(x: Array) -> Array:
    """The inverse of `_to_microbatches`, for one array."""
    return x.reshape(-1, *x.shape[2:])


def copy_along(axes: tuple[str, ...], tree: PyTree) -> PyTree:
    """Give arrays a leading dim, with a copy for each device along some axes.

    The sum of gradients over these axes is then left to the compiler: XLA:CPU crashes if
    code that is per device along only some axes sums bfloat16 with a collective.
    """
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in axes)

    def copy(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, (count, *leaf.shape)) if eqx.is_array(leaf) else leaf

    return jax.tree.map(copy, tree)


def local_copy(tree: PyTree) -> PyTree:
    """This device's copy of those that `copy_along` makes."""
    return jax.tree.map(lambda leaf: leaf[0] if eqx.is_array(leaf) else leaf, tree)


def _per_device(
    fn: Callable[..., Any], batch_axes: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Run a function per stage and per part of the rows; leave other axes to XLA."""
    return filter_shard_map(
        fn,
        None,
        in_specs,
        out_specs,
        # If the rows were left to the compiler, it would sum the gradients of the layers
        # over the batch's axes once for each microbatch.
        axis_names={"stage", *batch_axes},
        # The check would refuse layers with a scan of their own that starts from zeros.
        check_vma=False,
    )
