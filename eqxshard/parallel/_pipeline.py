"""Pipeline parallelism: a stack of layers split over `stage`, a batch in microbatches.

What is counted here: *stages*, the devices along the mesh axis `stage`, each with an
equal part of the *layers*; *microbatches*, equal parts of each device's *rows*, which
are examples by their number in the whole batch; and *ticks*, in each of which a stage
works on at most one microbatch and then sends the result to a neighbour.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._shard_map import filter_shard_map
from ..mesh import BATCH_AXES
from ..sharding import leaf_path


def pipeline(
    layers: PyTree,
    x: Float[Array, "batch ..."],
    *,
    microbatches: int,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch ..."]:
    r"""Apply a stack of layers, split over the mesh axis `stage`, to a batch.

    The batch goes through the stages in microbatches: while a stage works on one, the
    stage before it works on the next. This is GPipe (Huang et al. 2019,
    https://arxiv.org/abs/1811.06965): all microbatches go forward, then all go backward,
    each way in `microbatches + stages - 1` ticks, of which every stage idles
    `stages - 1`. A layer is computed again in the backward pass, so that only its inputs
    are kept: those of all microbatches. [`eqxshard.parallel.pipeline_loss`][] keeps
    fewer.

    The mesh is that of the step, as for [`eqxshard.constrain`][]. (Outside of a step, call
    this under `jax.jit`.) Without a mesh, or with `stage=1`, the layers are applied one
    after the other to the whole batch. The result is the same everywhere.

    **Arguments:**

    - `layers`: one module whose arrays have a leading dim of layers, as
        `eqx.filter_vmap(make_layer)(keys)` makes it. A layer takes the activations of
        one example, and returns activations of the same shape and dtype. The rule should
        store it with `P("stage")`.
    - `x`: the activations of a batch, its rows split over `data` and `fsdp`.
    - `microbatches`: how many parts to cut each device's rows into. Several times the
        number of stages keeps the stages busy.
    - `key`: a random key. If given, a layer is called as `layer(h, key=...)`, with a key
        for each layer and example that depends on nothing else; if not, as `layer(h)`.

    **Returns:**

    The activations after the last layer, of the shape of `x`.

    **Raises:**

    `ValueError` if the layers do not divide over the stages, or the batch into
    microbatches; if an array of `layers` has no leading dim of layers; or if a layer
    changes the shape or dtype of activations.

    !!! Example

        ```python
        rule = eqxshard.by_path({r"^layers\.": P("stage")})


        def loss_fn(model, batch, key):
            h = jax.vmap(model.embed)(batch["x"])
            h = eqxshard.parallel.pipeline(model.layers, h, microbatches=8, key=key)
            return optax.squared_error(jax.vmap(model.head)(h), batch["y"])
        ```
    """
    numbers, rows = jnp.arange(depth(layers)), jnp.arange(len(x))
    stages, batch_axes = divide(len(numbers), len(x), microbatches)
    if stages == 1:
        return forward(layers, numbers, x, rows, key)[0]

    def gpipe(layers: PyTree, numbers: Array, x: Array, rows: Array, key: Any) -> Array:
        stage = jax.lax.axis_index("stage")
        layers, (x, rows) = own(layers), cut((own(x), rows), microbatches)
        # In the last ticks there is nothing new for the first stage.
        new = jnp.concatenate([x, jnp.zeros_like(x, shape=(stages - 1, *x.shape[1:]))])

        def tick(received: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
            time, new = now
            number = time - stage
            busy = (number >= 0) & (number < microbatches)
            h = jnp.where(stage == 0, new, received)
            h, _ = forward(layers, numbers, h, rows[number], key, busy)
            onward = [(i, i + 1) for i in range(stages - 1)]
            return jax.lax.ppermute(h, "stage", onward), h

        times = jnp.arange(microbatches + stages - 1)
        _, out = jax.lax.scan(tick, jnp.zeros_like(x[0]), (times, new))
        # The last stage has the results, after its idle ticks.
        return jnp.where(stage == stages - 1, join(out[stages - 1 :]), 0)[None]

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
    layers, x = copy_along(batch_axes, layers), copy_along(("stage",), x)
    # All but the last stage's are zero: the sum brings that to all stages.
    return add_copies(run(layers, numbers, x, rows, key))


def forward(
    layers: PyTree,
    numbers: Array,
    h: Array,
    rows: Array,
    key: PRNGKeyArray | None,
    busy: Array | None = None,
) -> tuple[Array, Array]:
    """Apply layers in turn; return what comes out, and what went into each.

    A stage that is not busy computes too, on what may give nan; no gradient comes of it.
    """
    arrays, static = eqx.partition(layers, eqx.is_array)

    # The scan keeps XLA from undoing it.
    @ft.partial(jax.checkpoint, prevent_cse=False)
    def one(h: Array, numbered: tuple[PyTree, Array]) -> tuple[Array, Array]:
        arrays, number = numbered
        if busy is not None:
            arrays = jax.tree.map(ft.partial(_trained_if, busy), arrays)
        return apply(eqx.combine(arrays, static), number, h, rows, key), h

    return jax.lax.scan(one, h, (arrays, numbers))


def _trained_if(busy: Array, leaf: Array) -> Array:
    if not eqx.is_inexact_array(leaf):
        return leaf
    return jnp.where(busy, leaf, jax.lax.stop_gradient(leaf))


def apply(
    layer: PyTree, number: Array, h: Array, rows: Array, key: PRNGKeyArray | None
) -> Array:
    """Apply one layer to each example of a microbatch."""
    out = map_rows(layer, rows, fold_in(key, number), h)
    if in_words(out) != in_words(h):
        raise ValueError(
            f"a layer takes {in_words(h)} of each example and returns {in_words(out)}; "
            "have it return what the next one takes, of the same shape and dtype."
        )
    return out


def map_rows(
    fn: Callable[..., Any], rows: Array, key: PRNGKeyArray | None, *args: PyTree
) -> Any:
    """Call a function for each example: if there is a key, with one by its number."""
    if key is None:
        return jax.vmap(fn)(*args)
    keys = jax.vmap(ft.partial(jax.random.fold_in, key))(rows)
    return jax.vmap(lambda key, *args: fn(*args, key=key))(keys, *args)


def fold_in(key: PRNGKeyArray | None, number: Any) -> PRNGKeyArray | None:
    """As `jax.random.fold_in`, where there is a key."""
    return None if key is None else jax.random.fold_in(key, number)


def in_words(mapped: PyTree) -> str:
    """What there is for each example, such as `float32[16]`."""
    if not isinstance(mapped, jax.Array):
        return f"a {type(mapped).__name__}"
    return f"{mapped.dtype}{list(mapped.shape[1:])}"


def cut(tree: PyTree, microbatches: int) -> PyTree:
    """Give this device's rows a leading dim of microbatches."""
    return jax.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), tree)


def join(x: Array) -> Array:
    """The reverse of `cut`, for one array."""
    return x.reshape(-1, *x.shape[2:])


def copy_along(axes: tuple[str, ...], tree: PyTree) -> PyTree:
    """Give arrays a leading dim, with a copy for each device along some axes.

    So the sum of gradients over these axes, as that of `add_copies`, is the compiler's
    and no collective: XLA:CPU crashes where code that is per device along some axes only
    sums up bfloat16.
    """
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in axes)

    def copy(leaf: Any) -> Any:
        return jnp.broadcast_to(leaf, (count, *leaf.shape)) if eqx.is_array(leaf) else leaf

    return jax.tree.map(copy, tree)


def own(tree: PyTree) -> PyTree:
    """This device's copy."""
    return jax.tree.map(lambda leaf: leaf[0] if eqx.is_array(leaf) else leaf, tree)


def add_copies(tree: PyTree) -> PyTree:
    """Add up what the devices along some axes return, each with a leading dim of one."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree)


def per_device(
    fn: Callable[..., Any], batch_axes: tuple[str, ...], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Map a function over the stages and the rows; the compiler sees to all other axes."""
    return filter_shard_map(
        fn,
        None,
        in_specs,
        out_specs,
        # If the rows were left to the compiler, it would sum the gradients of the layers
        # over the batch's axes for each microbatch, rather than once.
        axis_names={"stage", *batch_axes},
        # The check would refuse layers with a scan of their own that begins with zeros.
        check_vma=False,
    )


def depth(layers: PyTree) -> int:
    """How many layers are stacked in a module."""
    shapes = {
        leaf_path(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(layers)
        if eqx.is_array(leaf)
    }
    depths = {shape[:1] for shape in shapes.values()}
    if len(depths) != 1 or () in depths:
        raise ValueError(
            f"the arrays of the layers have the shapes {shapes}, not all with the same "
            "leading dim; stack the layers with eqx.filter_vmap(make_layer)(keys)."
        )
    return depths.pop()[0]


def divide(layers: int, batch: int, microbatches: int) -> tuple[int, tuple[str, ...]]:
    """The number of stages, and the axes that split the batch; check that all divides."""
    if microbatches < 1:
        raise ValueError(
            f"microbatches={microbatches} is not a number of parts; use 1 or more."
        )
    mesh = jax.sharding.get_abstract_mesh()
    auto = [a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind is AxisType.Auto]
    stages = mesh.shape["stage"] if "stage" in auto else 1
    batch_axes = tuple(axis for axis in BATCH_AXES if axis in auto)
    if stages == 1:
        return 1, batch_axes
    if layers % stages:
        raise ValueError(
            f"{layers} layers do not divide over stage={stages}; use a multiple of "
            f"{stages} layers, or a number of stages that divides {layers}."
        )
    devices = math.prod(mesh.shape[axis] for axis in batch_axes)
    parts = devices * microbatches
    if batch % parts:
        sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in batch_axes)
        raise ValueError(
            f"a batch of {batch} does not divide over {sizes} = {devices} devices, each "
            f"with microbatches={microbatches}; use a multiple of {parts} examples, or "
            "fewer microbatches."
        )
    return stages, batch_axes
