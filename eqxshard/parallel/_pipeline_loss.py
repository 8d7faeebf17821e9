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

from ..sharding._leaves import array_leaves
from ..transforms._dtypes import accumulation_dtype
from ._pipeline import (
    apply_chunk,
    apply_layer,
    fold_in_if_given,
    format_example,
    from_microbatches,
    map_examples,
    per_device,
    pipeline,
    sum_copies,
    take_chunk,
    to_microbatches,
)
from ._pipeline_schedule import Schedule, make_schedule, split_chunks


def pipeline_loss(
    loss_fn: Callable[..., Float[Array, ""]],
    layers: PyTree,
    head: PyTree,
    x: Float[Array, "batch ..."],
    target: PyTree,
    *,
    microbatches: int,
    chunks: int | None = None,
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
    microbatches, whatever their number. With `chunks` it is interleaved, as for
    [`eqxshard.parallel.pipeline`][]: idle for less time, with activations of about the
    same size.

    The gradients with respect to `layers`, `head` and `x` are computed together with the
    loss if it is differentiated (in reverse mode, and once). Those of `target` and
    `weight` are not, and asking for them is an error if there are stages.

    **Arguments:**

    - `loss_fn`: `loss_fn(head, h, target)` returns the loss of one example, a scalar. If
        `key` is given, it is called with a `key=` as well.
    - `layers`, `x`, `microbatches`, `chunks`, `key`: as for
        [`eqxshard.parallel.pipeline`][].
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
    layers, layer_ids = split_chunks(layers, chunks)
    chunks = layer_ids.shape[1]
    schedule, _ = make_schedule(layer_ids.size, len(x), microbatches, chunks)
    dtype = accumulation_dtype(x.dtype)
    counts = jnp.ones(len(x), dtype) if weight is None else jnp.asarray(weight, dtype)
    total = jnp.sum(counts)
    share = counts / jnp.where(total == 0, 1, total)
    loss = _loss if schedule.stages == 1 else _one_f_one_b_loss
    return loss((layers, head, x), loss_fn, target, share, schedule, key)


def _loss(
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    target: PyTree,
    share: Float[Array, " batch"],
    schedule: Schedule,
    key: PRNGKeyArray | None,
) -> Float[Array, ""]:
    layers, head, x = params
    _, microbatches, chunks = schedule
    h = pipeline(layers, x, microbatches=microbatches, chunks=chunks, key=key)
    key = fold_in_if_given(key, split_chunks(layers, chunks)[1].size)
    return _sum_losses((head, h), loss_fn, target, share, jnp.arange(len(x)), key)


_one_f_one_b_loss = eqx.filter_custom_vjp(_loss)


@_one_f_one_b_loss.def_fwd
def _(
    perturbed: PyTree,
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    target: PyTree,
    share: Float[Array, " batch"],
    schedule: Schedule,
    key: PRNGKeyArray | None,
) -> tuple[Array, PyTree]:
    """The loss, and the gradients with it."""
    layers, head, x = params
    layers, layer_ids = split_chunks(layers, schedule.chunks)
    rows = jnp.arange(len(x))
    _, batch_axes = make_schedule(layer_ids.size, len(x), *schedule[1:])
    keys = key, fold_in_if_given(key, layer_ids.size)

    def one_f_one_b(
        layers: PyTree, layer_ids: Array, head: PyTree, batch: PyTree, keys: PyTree
    ) -> tuple[Array, PyTree]:
        stage = jax.lax.axis_index("stage")
        batch = to_microbatches(batch, schedule.microbatches)
        work = _Work(schedule, stage, layers, layer_ids, head, loss_fn, *batch, *keys)
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

    schedule: Schedule
    stage: Array
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
        return self.schedule.stages - 1

    @property
    def first_loss(self) -> int:
        """The tick in which the last stage has the first microbatch in its last chunk."""
        return (self.schedule.chunks - 1) * self.schedule.group + self.last

    @property
    def slots(self) -> int:
        """The number of turns to keep the layers' inputs of."""
        return 2 * self.first_loss + 1


class _Carry(NamedTuple):
    """The values that a stage carries from tick to tick.

    - `h`: activations, from the stage before.
    - `dh`: their gradient, from the stage after.
    - `inputs`: of each layer, for each turn that has yet to go backward.
    - `loss`, `layer_grads`, `head_grads`: sums so far.
    - `dx`: the gradient of the stage's input, for each microbatch.
    """

    h: Array
    dh: Array
    inputs: Array
    loss: Array
    layer_grads: PyTree
    head_grads: PyTree
    dx: Array


def _run_schedule(work: _Work) -> tuple[Array, tuple[PyTree, PyTree, Array]]:
    """One device's part of the loss, and of the gradients of layers, head and input.

    Stage `i` takes its turn `t` forward in tick `t + i`. Backward, the turns are the same
    with the chunks in reverse order; they begin with the first loss, on the last stage.
    All stages do the same in each tick, even if it is of no use. Taking turns would halve
    the number of microbatches under way, but collectives of layers along other axes would
    then get mixed up with those of another stage's layers.
    """
    x, first_loss, forward_ticks = work.x, work.first_loss, work.schedule.ticks

    def forward_only(carry: _Carry, time: Array) -> tuple[_Carry, None]:
        return _forward_tick(work, carry, time)[0], None

    def both(carry: _Carry, time: Array) -> tuple[_Carry, None]:
        carry, h = _forward_tick(work, carry, time)
        return _backward_tick(work, _loss_tick(work, carry, h, time), time), None

    def backward_only(carry: _Carry, time: Array) -> tuple[_Carry, None]:
        return _backward_tick(work, carry, time), None

    def zeros(tree: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, eqx.filter(tree, eqx.is_inexact_array))

    inputs_shape = (work.slots, len(work.layer_ids), *x.shape[1:])
    carry = _Carry(
        h=jnp.zeros_like(x[0]),
        dh=jnp.zeros_like(x[0]),
        inputs=jnp.zeros_like(x, shape=inputs_shape),
        loss=jnp.zeros((), work.share.dtype),
        layer_grads=zeros(work.layers),
        head_grads=zeros(work.head),
        dx=jnp.zeros_like(x),
    )
    # Until the first loss; until the last loss; until the last microbatch is back at the
    # first stage.
    times = jnp.arange(first_loss + forward_ticks)
    warm_up, steady, cool_down = jnp.split(times, (first_loss, forward_ticks))
    carry, _ = jax.lax.scan(forward_only, carry, warm_up)
    carry, _ = jax.lax.scan(both, carry, steady)
    carry, _ = jax.lax.scan(backward_only, carry, cool_down)
    dx = jnp.where(work.stage == 0, from_microbatches(carry.dx), 0)
    return carry.loss, (carry.layer_grads, carry.head_grads, dx)


def _forward_tick(work: _Work, carry: _Carry, time: Array) -> tuple[_Carry, Array]:
    """Take a microbatch through a chunk of this stage; also return its activations."""
    turn = time - work.stage
    microbatch, chunk, _ = work.schedule.turn(turn)
    new = (work.stage == 0) & (chunk == 0)
    h = jnp.where(new, work.x[microbatch], carry.h)
    h, inputs = apply_chunk(
        work.layers, work.layer_ids, chunk, h, work.rows[microbatch], work.key
    )
    inputs = carry.inputs.at[turn % work.slots].set(inputs)
    received = jax.lax.ppermute(h, "stage", work.schedule.to_next)
    return carry._replace(h=received, inputs=inputs), h


def _loss_tick(work: _Work, carry: _Carry, h: Array, time: Array) -> _Carry:
    """Add the loss of the microbatch on the last stage, if it left the last chunk."""
    microbatch, chunk, _ = work.schedule.turn(time - work.last)
    if work.schedule.chunks == 1:
        return _add_loss(work, carry, h, microbatch)
    # The same on all devices, so collectives in the head meet no others.
    return jax.lax.cond(
        chunk == work.schedule.chunks - 1,
        lambda carry: _add_loss(work, carry, h, microbatch),
        lambda carry: carry,
        carry,
    )


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


def _backward_tick(work: _Work, carry: _Carry, time: Array) -> _Carry:
    """Take a microbatch back through a chunk of this stage."""
    schedule = work.schedule
    number = time - work.first_loss - work.last + work.stage
    microbatch, chunks_done, busy = schedule.turn(number)
    chunk = schedule.chunks - 1 - chunks_done
    inputs = carry.inputs[schedule.number(microbatch, chunk) % work.slots]
    dh, layer_grads = _chunk_vjp(work, carry, chunk, inputs, work.rows[microbatch], busy)
    # Elsewhere it is not the gradient of an input, and out of range is not written.
    entry = jnp.where(busy & (chunk == 0), microbatch, len(work.x))
    dx = carry.dx.at[entry].set(dh, mode="drop")
    to_previous = [(after, before) for before, after in schedule.to_next]
    received = jax.lax.ppermute(dh, "stage", to_previous)
    return carry._replace(dh=received, layer_grads=layer_grads, dx=dx)


def _chunk_vjp(
    work: _Work, carry: _Carry, chunk: Array, inputs: Array, rows: Array, busy: Array
) -> tuple[Array, PyTree]:
    """The backward pass of `apply_chunk`, which adds to the layers' gradients."""
    arrays, static = eqx.partition(work.layers, eqx.is_array)

    def one(
        carry: tuple[Array, PyTree], saved: tuple[Array, PyTree, Array, Array]
    ) -> tuple[tuple[Array, PyTree], None]:
        (dh, grads), (index, arrays, layer_id, h) = carry, saved
        arrays, layer_id = take_chunk((arrays, layer_id), chunk)
        layer = eqx.combine(arrays, static)
        _, vjp = eqx.filter_vjp(
            lambda layer, h: apply_layer(layer, layer_id, h, rows, work.key), layer, h
        )
        grad, dh = vjp(dh)
        total = jax.tree.map(lambda stacked: stacked[index, chunk], grads)
        total = _add_if(busy, total, grad)
        grads = jax.tree.map(
            lambda stacked, new: stacked.at[index, chunk].set(new), grads, total
        )
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
