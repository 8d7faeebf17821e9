"""Pipeline parallelism: a stack of layers split over `stage`, a batch in microbatches.

Glossary:

- a *stage* is one device along the mesh axis `stage`, with an equal share of the layers;
- a *chunk* is a run of layers that follow one another: all those of a stage, or one of
  several equal parts, between which come the chunks of the other stages;
- a *layer* is numbered within the whole stack, a *row* (one example) within the batch;
- a *microbatch* is one of several equal parts of a device's rows;
- in a *tick* each stage takes at most one microbatch through one chunk, and then sends the
  result to a neighbour.
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

from ..sharding._leaves import array_leaves, format_array
from ..transforms._shard_map import filter_shard_map
from ._pipeline_schedule import make_schedule, split_chunks


def pipeline(
    layers: PyTree,
    x: Float[Array, "batch ..."],
    *args: PyTree,
    microbatches: int,
    chunks: int | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch ..."]:
    r"""Apply a stack of layers, split over the mesh axis `stage`, to a batch.

    The batch passes through the stages in microbatches: while a stage works on one, the
    stage before it works on the next. This is GPipe (Huang et al. 2019,
    https://arxiv.org/abs/1811.06965): all microbatches go forward, then all go backward.
    Each direction takes `microbatches + stages - 1` ticks, and each stage is idle in
    `stages - 1` of them. Layers are recomputed in the backward pass, so only their inputs
    are kept, but those of all microbatches. [`eqxshard.parallel.pipeline_loss`][] keeps
    fewer.

    With `chunks` the schedule is interleaved (Narayanan et al. 2021,
    https://arxiv.org/abs/2104.04473; MaxText calls it circular): each stage has that many
    chunks of layers, and a microbatch goes around the stages once for each. There are
    `microbatches * chunks + stages - 1` ticks of one chunk each: a stage is idle in as many
    of them as before, but they are `chunks` times as short. Activations are sent `chunks`
    times as often.

    It runs on the mesh of the step, like [`eqxshard.constrain`][]. (Outside a step, call
    it under `jax.jit`.) Without a mesh, or with `stage=1`, the layers are applied to the
    whole batch, one after the other. The result is the same either way.

    **Arguments:**

    - `layers`: one module whose arrays have a leading dim of layers, as from
        `eqx.filter_vmap(make_layer)(keys)`. A layer takes the activations of one example
        and returns activations of the same shape and dtype. The rule should store it with
        `P("stage")`, whatever the `chunks`.
    - `x`: the activations of a batch, its rows split over `data` and `fsdp`.
    - `args`: what else every layer gets of each example, such as its positions: PyTrees of
        arrays of leading size batch, or `None`. They go with their microbatch: a layer is
        called as `layer(h, *args)`.
    - `microbatches`: the number of parts to split each device's rows into. Use several
        times the number of stages to keep the stages busy.
    - `chunks`: the number of chunks on each stage. If given, the arrays of `layers` have
        two leading dims, `(layers // chunks, chunks)`, and entry `[i, c]` is layer
        `c * (layers // chunks) + i`. Each stage then stores just the layers that it
        applies, and none is sent to another.
    - `key`: a random key. If given, a layer is called with a `key=` as well, a key for
        each layer and example that depends on nothing else.

    **Returns:**

    The activations after the last layer, in the shape of `x`.

    **Raises:**

    `ValueError` if the layers do not divide over the stages and chunks, the batch into
    microbatches, or with several chunks the microbatches over the stages; if an array of
    `layers` does not have the leading dims, or one of `args` the batch's size; or if a
    layer changes the shape or dtype of activations.

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

        Interleaved, with 16 layers in two chunks on each stage:

        ```python
        keys = jax.random.split(key, (8, 2))
        layers = eqx.filter_vmap(eqx.filter_vmap(make_layer))(keys)
        h = eqxshard.parallel.pipeline(layers, h, microbatches=8, chunks=2)
        ```
    """
    layers, layer_ids = split_chunks(layers, chunks)
    args = jax.tree.map(jnp.asarray, args)
    check_rows({"args": args}, len(x))
    rows, chunks = jnp.arange(len(x)), layer_ids.shape[1]
    schedule, batch_axes = make_schedule(layer_ids.size, len(x), microbatches, chunks)
    last = schedule.stages - 1
    if last == 0:
        for chunk in range(chunks):
            x, _ = apply_chunk(layers, layer_ids, chunk, x, args, rows, key)
        return x

    def gpipe(
        layers: PyTree, layer_ids: Array, inputs: PyTree, rows: Array, key: Any
    ) -> Array:
        stage = jax.lax.axis_index("stage")
        layers = local_copy(layers)
        (x, args), rows = to_microbatches((local_copy(inputs), rows), microbatches)

        def tick(received: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            time, new = now
            microbatch, chunk, busy = schedule.turn(time - stage)
            h = jnp.where((stage == 0) & (chunk == 0), new, received)
            now_args, now_rows = take((args, rows), microbatch)
            h, _ = apply_chunk(layers, layer_ids, chunk, h, now_args, now_rows, key, busy)
            return jax.lax.ppermute(h, "stage", schedule.to_next), h

        now = jnp.arange(schedule.ticks), schedule.inputs(x)
        _, out = jax.lax.scan(tick, jnp.zeros_like(x[0]), now)
        out = from_microbatches(schedule.outputs(out))
        return jnp.where(stage == last, out, 0)[None]

    by_stage, by_batch = PartitionSpec("stage"), PartitionSpec(batch_axes)
    in_specs = (
        PartitionSpec(batch_axes, "stage"),
        by_stage,
        PartitionSpec("stage", batch_axes),
        by_batch,
        PartitionSpec(),
    )
    out_specs = PartitionSpec("stage", batch_axes)
    run = per_device(gpipe, batch_axes, in_specs, out_specs)
    layers, inputs = copy_along(batch_axes, layers), copy_along(("stage",), (x, args))
    # Only the last stage's result is not zero, so the sum sends it to all stages. It is
    # exact in any dtype, unlike that of `sum_copies`, which is in float32 at least.
    return jax.lax.reduce_sum(run(layers, layer_ids, inputs, rows, key), (0,))


def apply_chunk(
    layers: PyTree,
    layer_ids: Array,
    chunk: Any,
    h: Array,
    args: tuple[PyTree, ...],
    rows: Array,
    key: PRNGKeyArray | None,
    busy: Array | None = None,
) -> tuple[Array, Array]:
    """Apply the layers of a chunk; return the output of the last, and the input of each.

    A stage that is not busy computes too, on values that may lead to nan, so its weights
    and `args` get no gradient from that.
    """
    arrays, static = eqx.partition(layers, eqx.is_array)
    if busy is not None:
        args = jax.tree.map(ft.partial(_stop_gradient_unless, busy), args)

    # The scan already keeps XLA from merging the recomputation with the forward pass.
    @ft.partial(jax.checkpoint, prevent_cse=False)
    def one(h: Array, of_chunks: tuple[PyTree, Array]) -> tuple[Array, Array]:
        arrays, layer_id = take(of_chunks, chunk)
        if busy is not None:
            arrays = jax.tree.map(ft.partial(_stop_gradient_unless, busy), arrays)
        return apply_layer(eqx.combine(arrays, static), layer_id, h, args, rows, key), h

    return jax.lax.scan(one, h, (arrays, layer_ids))


def take(tree: PyTree, index: Any) -> PyTree:
    """The entries of one chunk or microbatch, in arrays with a leading dim of them."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _stop_gradient_unless(condition: Array, leaf: Array) -> Array:
    if not eqx.is_inexact_array(leaf):
        return leaf
    return jnp.where(condition, leaf, jax.lax.stop_gradient(leaf))


def apply_layer(
    layer: PyTree,
    layer_id: Array,
    h: Array,
    args: tuple[PyTree, ...],
    rows: Array,
    key: PRNGKeyArray | None,
) -> Array:
    """Apply one layer to each example of a microbatch."""
    out = map_examples(layer, rows, fold_in_if_given(key, layer_id), h, *args)
    if format_example(out) != format_example(h):
        raise ValueError(
            f"a layer takes {format_example(h)} for each example and returns "
            f"{format_example(out)}; have it return the same shape and dtype, for the next "
            "layer to take."
        )
    return out


def map_examples(
    fn: Callable[..., Any], rows: Array, key: PRNGKeyArray | None, *args: PyTree
) -> Any:
    """Call a function for each example; if there is a key, with one for each row."""
    if key is None:
        return jax.vmap(fn)(*args)
    keys = jax.vmap(ft.partial(jax.random.fold_in, key))(rows)
    return jax.vmap(lambda key, *args: fn(*args, key=key))(keys, *args)


def fold_in_if_given(key: PRNGKeyArray | None, data: Any) -> PRNGKeyArray | None:
    """As `jax.random.fold_in`, if there is a key."""
    return None if key is None else jax.random.fold_in(key, data)


def format_example(batch: PyTree) -> str:
    """The dtype and shape of one example of a batch: `float32[16]`."""
    if not isinstance(batch, jax.Array):
        return f"a {type(batch).__name__}"
    return format_array(jax.ShapeDtypeStruct(batch.shape[1:], batch.dtype))


def check_rows(tree: PyTree, rows: int) -> None:
    """Raise unless all arrays of a PyTree have an entry for each example."""
    for path, leaf in array_leaves(tree):
        if leaf.shape[:1] != (rows,):
            raise ValueError(
                f"{path} has the shape {leaf.shape} for a batch of {rows}; give it one "
                "entry for each example."
            )


def to_microbatches(tree: PyTree, microbatches: int) -> PyTree:
    """Give this device's rows a leading dim of microbatches."""
    return jax.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), tree)


def from_microbatches(x: Array) -> Array:
    """The inverse of `to_microbatches`, for one array."""
    return x.reshape(-1, *x.shape[2:])


def copy_along(axes: tuple[str, ...], tree: PyTree) -> PyTree:
    """Give arrays a leading dim, with a copy for each device along some axes.

    The sum of gradients over these axes, like that of `sum_copies`, is then left to the
    compiler: XLA:CPU crashes if code that is per device along some of the axes only sums
    bfloat16 with a collective.
    """
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in axes)

    def copy(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, (count, *leaf.shape)) if eqx.is_array(leaf) else leaf

    return jax.tree.map(copy, tree)


def local_copy(tree: PyTree) -> PyTree:
    """This device's copy, of those that `copy_along` makes."""
    return jax.tree.map(lambda leaf: leaf[0] if eqx.is_array(leaf) else leaf, tree)


def sum_copies(tree: PyTree) -> PyTree:
    """Sum the results of devices along some axes, each with a leading dim of one."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree)


def per_device(
    fn: Callable[..., Any], batch_axes: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Map a function over the stages and the rows; other axes are left to the compiler."""
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
