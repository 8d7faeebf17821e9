"""1F1B on one device: when it goes forward, takes losses, and goes backward.

The terms are those of `_pipeline.py`.
"""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from ._pipeline import (
    apply_chunk,
    apply_layer,
    format_example,
    from_microbatches,
    map_examples,
    take,
)
from ._pipeline_schedule import Schedule


class Examples(NamedTuple):
    """What is given with the activations: arrays of leading size batch.

    - `args`: what every layer gets of each example.
    - `target`: what the loss gets.
    - `share`: how much of the batch's mean each example is.
    """

    args: tuple[PyTree, ...]
    target: PyTree
    share: Array


class Work(NamedTuple):
    """The work of one device, the same in all ticks: its layers and its rows."""

    schedule: Schedule
    stage: Array
    layers: PyTree
    layer_ids: Array
    head: PyTree
    loss_fn: Callable[..., Array]
    # Each with a leading dim of microbatches.
    x: Array
    examples: Examples
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


def run_schedule(work: Work) -> tuple[Array, tuple[PyTree, PyTree, Array]]:
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
        loss=jnp.zeros((), work.examples.share.dtype),
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


def _forward_tick(work: Work, carry: _Carry, time: Array) -> tuple[_Carry, Array]:
    """Take a microbatch through a chunk of this stage; also return its activations."""
    turn = time - work.stage
    microbatch, chunk, _ = work.schedule.turn(turn)
    new = (work.stage == 0) & (chunk == 0)
    h = jnp.where(new, work.x[microbatch], carry.h)
    args, rows = take((work.examples.args, work.rows), microbatch)
    h, inputs = apply_chunk(work.layers, work.layer_ids, chunk, h, args, rows, work.key)
    inputs = carry.inputs.at[turn % work.slots].set(inputs)
    received = jax.lax.ppermute(h, "stage", work.schedule.to_next)
    return carry._replace(h=received, inputs=inputs), h


def _loss_tick(work: Work, carry: _Carry, h: Array, time: Array) -> _Carry:
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


def _add_loss(work: Work, carry: _Carry, h: Array, microbatch: Array) -> _Carry:
    """On the last stage: the loss of a microbatch, and the gradient to go backward with."""
    on_last = work.stage == work.last
    examples, rows = take((work.examples, work.rows), microbatch)
    loss, (head_grads, dh) = eqx.filter_value_and_grad(sum_losses)(
        (work.head, h), work.loss_fn, examples, rows, work.head_key
    )
    return carry._replace(
        dh=jnp.where(on_last, dh, carry.dh),
        loss=_add_if(on_last, carry.loss, loss),
        head_grads=_add_if(on_last, carry.head_grads, head_grads),
    )


def _backward_tick(work: Work, carry: _Carry, time: Array) -> _Carry:
    """Take a microbatch back through a chunk of this stage."""
    schedule = work.schedule
    number = time - work.first_loss - work.last + work.stage
    microbatch, chunks_done, busy = schedule.turn(number)
    chunk = schedule.chunks - 1 - chunks_done
    inputs = carry.inputs[schedule.number(microbatch, chunk) % work.slots]
    args, rows = take((work.examples.args, work.rows), microbatch)
    dh, layer_grads = _chunk_vjp(work, carry, chunk, inputs, args, rows, busy)
    # Elsewhere it is not the gradient of an input, and out of range is not written.
    entry = jnp.where(busy & (chunk == 0), microbatch, len(work.x))
    dx = carry.dx.at[entry].set(dh, mode="drop")
    to_previous = [(after, before) for before, after in schedule.to_next]
    received = jax.lax.ppermute(dh, "stage", to_previous)
    return carry._replace(dh=received, layer_grads=layer_grads, dx=dx)


def _chunk_vjp(
    work: Work,
    carry: _Carry,
    chunk: Array,
    inputs: Array,
    args: tuple[PyTree, ...],
    rows: Array,
    busy: Array,
) -> tuple[Array, PyTree]:
    """The backward pass of `apply_chunk`, which adds to the layers' gradients."""
    arrays, static = eqx.partition(work.layers, eqx.is_array)

    def one(
        carry: tuple[Array, PyTree], saved: tuple[Array, PyTree, Array, Array]
    ) -> tuple[tuple[Array, PyTree], None]:
        (dh, grads), (index, arrays, layer_id, h) = carry, saved
        arrays, layer_id = take((arrays, layer_id), chunk)
        layer = eqx.combine(arrays, static)
        _, vjp = eqx.filter_vjp(
            lambda layer, h: apply_layer(layer, layer_id, h, args, rows, work.key), layer, h
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


def sum_losses(
    params: tuple[PyTree, Array],
    loss_fn: Callable[..., Array],
    examples: Examples,
    rows: Array,
    key: PRNGKeyArray | None,
) -> Array:
    """Sum the losses of examples, each by its share of the batch's mean."""
    (head, h), (_, target, share) = params, examples
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
