"""Pipeline parallelism in less memory: each microbatch goes backward after its loss.

The terms are those of `_pipeline.py`.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from ..sharding._leaves import array_leaves, stacked_depth
from ..transforms._dtypes import accumulation_dtype
from ._pipeline import (
    apply_layer,
    apply_layers,
    fold_in_if_given,
    format_example,
    from_microbatches,
    map_examples,
    per_device,
    pipeline,
    stages_and_batch_axes,
    sum_copies,
    to_microbatches,
)


def pipeline_loss(
    loss_fn: Callable[..., Float[Array, ""]],
    layers: PyTree,
    head: PyTree,
    x: Float[Array, "batch ..."],
    target: PyTree,
    *,
    microbatches: int,
    weight: Shaped[Array | np.ndarray, " batch"] | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, ""]:
    """The mean loss after a stack of layers that is split over the mesh axis `stage`.

    The same as [`eqxshard.parallel.pipeline`][] followed by a loss, in less memory. The
    schedule is 1F1B, also called PipeDream-Flush (Narayanan et al. 2021,
    https://arxiv.org/abs/2006.09503 and https://arxiv.org/abs/2104.04473): a microbatch
    goes backward as soon as the last stage has its loss, and from then on each stage does
    one forward and one backward in every tick. It is idle as long as under GPipe, but
    stage `i`, counted from 0, holds the activations of at most `2 (stages - i) - 1`
    microbatches, whatever their number.

    The gradients with respect to `layers`, `head` and `x` are computed together with the
    loss if it is differentiated (in reverse mode, and once). Those of `target` and
    `weight` are not, and asking for them is an error if there are stages.

    **Arguments:**

    - `loss_fn`: `loss_fn(head, h, target)` returns the loss of one example, a scalar. If
        `key` is given, it is called with a `key=` as well.
    - `layers`, `x`, `microbatches`, `key`: as for [`eqxshard.parallel.pipeline`][].
    - `head`: the trained part after the layers: a module, or any PyTree.
    - `target`: everything else the loss needs from the batch: a PyTree of arrays of
        leading size batch.
    - `weight`: how much each example counts, such as `batch["weight"]`; 1 by default.

    **Returns:**

    The weighted mean of the losses: a scalar, as the loss function of a step may return
    it.

    **Raises:**

    `ValueError` as for [`eqxshard.parallel.pipeline`][]; if `target` or `weight` does not
    have the batch's size; or if `loss_fn` does not return a scalar.

    !!! Example

        ```python
        def squared_error(head, h, target):
            return jnp.sum((head(h) - target) ** 2)


        def loss_fn(model, batch, key):
            h = jax.vmap(model.embed)(batch["x"])
            return eqxshard.parallel.pipeline_loss(
                squared_error, model.layers, model.head, h, batch["y"], microbatches=8
            )
        ```
    """
    target = jax.tree.map(jnp.asarray, target)
    entries = {"target": target, "weight": weight}
    for path, leaf in array_leaves(entries):
        if leaf.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"{path} has the shape {leaf.shape} for a batch of {len(x)}; "
                "give it one entry for each example."
            )
    stages, _ = stages_and_batch_axes(stacked_depth(layers), len(x), microbatches)
    dtype = accumulation_dtype(x.dtype)
    counts = jnp.ones(len(x), dtype) if weight is None else jnp.asarray(weight, dtype)
    total = jnp.sum(counts)
    share = counts / jnp.where(total == 0, 1, total)
    loss = _loss if stages == 1 else _one_f_one_b_loss
    return loss((layers, head, x), loss_fn, target, share, microbatches, key)


def _loss(
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    target: PyTree,
    share: Float[Array, " batch"],
    microbatches: int,
    key: PRNGKeyArray | None,
) -> Float[Array, ""]:
    layers, head, x = params
    h = pipeline(layers, x, microbatches=microbatches, key=key)
    key = fold_in_if_given(key, stacked_depth(layers))
    return _sum_losses((head, h), loss_fn, target, share, jnp.arange(len(x)), key)


_one_f_one_b_loss = eqx.filter_custom_vjp(_loss)


@_one_f_one_b_loss.def_fwd
def _(
    perturbed: PyTree,
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    target: PyTree,
    share: Float[Array, " batch"],
    microbatches: int,
    key: PRNGKeyArray | None,
) -> tuple[Array, PyTree]:
    """The loss, and the gradients with it."""
    layers, head, x = params
    layer_ids, rows = jnp.arange(stacked_depth(layers)), jnp.arange(len(x))
    stages, batch_axes = stages_and_batch_axes(len(layer_ids), len(x), microbatches)
    keys = key, fold_in_if_given(key, len(layer_ids))

    def one_f_one_b(
        layers: PyTree, layer_ids: Array, head: PyTree, batch: PyTree, keys: PyTree
    ) -> tuple[Array, PyTree]:
        stage = jax.lax.axis_index("stage")
        batch = to_microbatches(batch, microbatches)
        work = _Work(stage, stages, layers, layer_ids, head, loss_fn, *batch, *keys)
        sums = _run_schedule(work)
        return jax.tree.map(lambda leaf: leaf[None], sums)

    by_stage, by_batch = PartitionSpec("stage"), PartitionSpec(batch_axes)
    in_specs = (by_stage, by_stage, PartitionSpec(), by_batch, PartitionSpec())
    of_all = PartitionSpec(("stage", *batch_axes))
    of_layers, of_x = PartitionSpec(batch_axes, "stage"), PartitionSpec("stage", batch_axes)
    out_specs = (of_all, (of_layers, of_all, of_x))
    run = per_device(one_f_one_b, batch_axes, in_specs, out_specs)
    return sum_copies(run(layers, layer_ids, head, (x, target, share, rows), keys))


@_one_f_one_b_loss.def_bwd
def _(grads: PyTree, scale: Array, *_: Any) -> PyTree:
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)


class _Work(NamedTuple):
    """The work of one device, the same in all ticks: its layers and its rows."""

    stage: Array
    stages: int
    layers: PyTree
    layer_ids: Array
    head: PyTree
    loss_fn: Callable[..., Array]
    # Each with a leading dim of microbatches.
    x: Array
    target: PyTree
    share: Array
    rows: Array
    key: PRNGKeyArray | None
    head_key: PRNGKeyArray | None

    @property
    def last(self) -> int:
        """The last stage."""
        return self.stages - 1

    @property
    def slots(self) -> int:
        """The number of microbatches to keep the layers' inputs of."""
        return 2 * self.stages - 1


class _Carry(NamedTuple):
    """The values that a stage carries from tick to tick.

    - `h`: activations, from the stage before.
    - `dh`: their gradient, from the stage after.
    - `inputs`: of each layer, for each microbatch that has yet to go backward.
    - `loss`, `layer_grads`, `head_grads`: sums so far.
    """

    h: Array
    dh: Array
    inputs: Array
    loss: Array
    layer_grads: PyTree
    head_grads: PyTree


def _run_schedule(work: _Work) -> tuple[Array, tuple[PyTree, PyTree, Array]]:
    """One device's part of the loss, and of the gradients of layers, head and input.

    Stage `i` takes microbatch `m` forward in tick `m + i`, and backward in tick
    `m + 2 (stages - 1) - i`. All stages do the same in each tick, even if it is of no
    use. Taking turns would halve the number of microbatches under way, but collectives of
    layers along other axes would then get mixed up with those of another stage's layers.
    """
    microbatches, last = len(work.x), work.last
    x = work.x

    def forward_only(carry: _Carry, time: Array) -> tuple[_Carry, None]:
        return _forward_tick(work, carry, time)[0], None

    def both(carry: _Carry, time: Array) -> tuple[_Carry, Array]:
        carry, h = _forward_tick(work, carry, time)
        return _backward_tick(work, _add_loss(work, carry, h, time - last), time)

    def backward_only(carry: _Carry, time: Array) -> tuple[_Carry, Array]:
        return _backward_tick(work, carry, time)

    def zeros(tree: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, eqx.filter(tree, eqx.is_inexact_array))

    carry = _Carry(
        h=jnp.zeros_like(x[0]),
        dh=jnp.zeros_like(x[0]),
        inputs=jnp.zeros_like(x, shape=(work.slots, len(work.layer_ids), *x.shape[1:])),
        loss=jnp.zeros((), work.share.dtype),
        layer_grads=zeros(work.layers),
        head_grads=zeros(work.head),
    )
    # Until the first microbatch reaches the last stage; until the last one has its loss;
    # until the last one is back at the first stage.
    times = jnp.arange(microbatches + 2 * last)
    warm_up, steady, cool_down = jnp.split(times, (last, last + microbatches))
    carry, _ = jax.lax.scan(forward_only, carry, warm_up)
    carry, early = jax.lax.scan(both, carry, steady)
    carry, late = jax.lax.scan(backward_only, carry, cool_down)
    dx = from_microbatches(jnp.concatenate([early, late])[last:])
    dx = jnp.where(work.stage == 0, dx, 0)
    return carry.loss, (carry.layer_grads, carry.head_grads, dx)


def _forward_tick(work: _Work, carry: _Carry, time: Array) -> tuple[_Carry, Array]:
    """Take a microbatch through this stage's layers; also return its activations."""
    microbatch = time - work.stage
    h = jnp.where(work.stage == 0, work.x[microbatch], carry.h)
    h, inputs = apply_layers(
        work.layers, work.layer_ids, h, work.rows[microbatch], work.key
    )
    inputs = carry.inputs.at[microbatch % work.slots].set(inputs)
    to_next = [(i, i + 1) for i in range(work.last)]
    received = jax.lax.ppermute(h, "stage", to_next)
    return carry._replace(h=received, inputs=inputs), h


def _add_loss(work: _Work, carry: _Carry, h: Array, microbatch: Array) -> _Carry:
    """On the last stage: the loss of a microbatch, and the gradient to go backward with."""
    on_last = work.stage == work.last
    target = jax.tree.map(lambda leaf: leaf[microbatch], work.target)
    loss, (head_grads, dh) = eqx.filter_value_and_grad(_sum_losses)(
        (work.head, h),
        work.loss_fn,
        target,
        work.share[microbatch],
        work.rows[microbatch],
        work.head_key,
    )
    return carry._replace(
        dh=jnp.where(on_last, dh, carry.dh),
        loss=_add_if(on_last, carry.loss, loss),
        head_grads=_add_if(on_last, carry.head_grads, head_grads),
    )


def _backward_tick(work: _Work, carry: _Carry, time: Array) -> tuple[_Carry, Array]:
    """Take a microbatch back through this stage; also return the gradient of its input."""
    microbatch = time - 2 * work.last + work.stage
    busy = (microbatch >= 0) & (microbatch < len(work.x))
    inputs = carry.inputs[microbatch % work.slots]
    dh, layer_grads = _layers_vjp(work, carry, inputs, work.rows[microbatch], busy)
    to_previous = [(i + 1, i) for i in range(work.last)]
    received = jax.lax.ppermute(dh, "stage", to_previous)
    return carry._replace(dh=received, layer_grads=layer_grads), dh


def _layers_vjp(
    work: _Work, carry: _Carry, inputs: Array, rows: Array, busy: Array
) -> tuple[Array, PyTree]:
    """The backward pass of `apply_layers`, which adds to the layers' gradients."""
    arrays, static = eqx.partition(work.layers, eqx.is_array)

    def one(
        carry: tuple[Array, PyTree], saved: tuple[Array, PyTree, Array, Array]
    ) -> tuple[tuple[Array, PyTree], None]:
        (dh, grads), (index, arrays, layer_id, h) = carry, saved
        layer = eqx.combine(arrays, static)
        _, vjp = eqx.filter_vjp(
            lambda layer, h: apply_layer(layer, layer_id, h, rows, work.key), layer, h
        )
        grad, dh = vjp(dh)
        total = jax.tree.map(lambda stacked: stacked[index], grads)
        total = _add_if(busy, total, grad)
        grads = jax.tree.map(lambda stacked, new: stacked.at[index].set(new), grads, total)
        return (dh, grads), None

    layer_ids = work.layer_ids
    each = (jnp.arange(len(layer_ids)), arrays, layer_ids, inputs)
    return jax.lax.scan(one, (carry.dh, carry.layer_grads), each, reverse=True)[0]


def _sum_losses(
    params: tuple[PyTree, Array],
    loss_fn: Callable[..., Array],
    target: PyTree,
    share: Array,
    rows: Array,
    key: PRNGKeyArray | None,
) -> Array:
    """Sum the losses of examples, each by its share of the batch's mean."""
    head, h = params
    losses = map_examples(ft.partial(loss_fn, head), rows, key, h, target)
    if jnp.shape(losses) != share.shape:
        raise ValueError(
            f"loss_fn returns {format_example(losses)} for each example; have it return a "
            "scalar."
        )
    # An example of weight 0 does not count, even if its loss is nan.
    return jnp.sum(jnp.where(share == 0, 0, losses.astype(share.dtype) * share))


def _add_if(condition: Array, total: PyTree, new: PyTree) -> PyTree:
    """Add where the condition holds; elsewhere the new values may be nan."""
    return jax.tree.map(lambda total, new: total + jnp.where(condition, new, 0), total, new)
