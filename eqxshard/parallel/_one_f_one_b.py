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
    apply_layer,
    apply_layers,
    format_example,
    from_microbatches,
    map_examples,
    take,
    to_next,
)


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

    stages: int
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
        return self.stages - 1

    @property
    def slots(self) -> int:
        """The number of microbatches to keep the layers' inputs of."""
        return 2 * self.last + 1


class _Carry(NamedTuple):
    """The values that a stage carries from tick to tick.

    - `h`: activations, from the stage before.
    - `dh`: their gradient, from the stage after.
    - `inputs`: of each layer, for each microbatch that has yet to go backward.
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

    Stage `i` takes microbatch `t` forward in tick `t + i`. The last stage takes it backward
    in the same tick, and each stage before it one tick later. All stages do the same in
    each tick, even if it is of no use. Taking turns would halve the number of microbatches
    under way, but collectives of layers along other axes would then get mixed up with those
    of another stage's layers.
    """
    x, last = work.x, work.last
    forward_ticks = len(x) + last

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
    times = jnp.arange(last + forward_ticks)
    warm_up, steady, cool_down = jnp.split(times, (last, forward_ticks))
    carry, _ = jax.lax.scan(forward_only, carry, warm_up)
    carry, _ = jax.lax.scan(both, carry, steady)
    carry, _ = jax.lax.scan(backward_only, carry, cool_down)
    dx = jnp.where(work.stage == 0, from_microbatches(carry.dx), 0)
    return carry.loss, (carry.layer_grads, carry.head_grads, dx)


def _forward_tick(work: Work, carry: _Carry, time: Array) -> tuple[_Carry, Array]:
    """Take a microbatch through the layers of this stage; also return its activations."""
    microbatch = time - work.stage
    h = jnp.where(work.stage == 0, work.x[microbatch], carry.h)
    args, rows = take((work.examples.args, work.rows), microbatch)
    h, inputs = apply_layers(work.layers, work.layer_ids, h, args, rows, work.key)
    inputs = carry.inputs.at[microbatch % work.slots].set(inputs)
    received = jax.lax.ppermute(h, "stage", to_next(work.stages))
    return carry._replace(h=received, inputs=inputs), h


def _loss_tick(work: Work, carry: _Carry, h: Array, time: Array) -> _Carry:
    """On the last stage: the loss of a microbatch, and the gradient to go backward with."""
    on_last = work.stage == work.last
    examples, rows = take((work.examples, work.rows), time - work.last)
    loss, (head_grads, dh) = eqx.filter_value_and_grad(sum_losses)(
        (work.head, h), work.loss_fn, examples, rows, work.head_key
    )
    return carry._replace(
        dh=jnp.where(on_last, dh, carry.dh),
        loss=_add_if(on_last, carry.loss, loss),
        head_grads=_add_if(on_last, carry.head_grads, head_grads),
    )


def _backward_tick(work: Work, carry: _Carry, time: Array) -> _Carry:
    """Take a microbatch back through the layers of this stage."""
    microbatch = time - 2 * work.last + work.stage
    busy = (microbatch >= 0) & (microbatch < len(work.x))
    inputs = carry.inputs[microbatch % work.slots]
    args, rows = take((work.examples.args, work.rows), microbatch)
    dh, layer_grads = _layers_vjp(work, carry, inputs, args, rows, busy)
    # What is out of range is not written.
    entry = jnp.where(busy, microbatch, len(work.x))
    dx = carry.dx.at[entry].set(dh, mode="drop")
    to_previous = [(after, before) for before, after in to_next(work.stages)]
    received = jax.lax.ppermute(dh, "stage", to_previous)
    return carry._replace(dh=received, layer_grads=layer_grads, dx=dx)


def _layers_vjp(
    work: Work,
    carry: _Carry,
    inputs: Array,
    args: tuple[PyTree, ...],
    rows: Array,
    busy: Array,
) -> tuple[Array, PyTree]:
    """The backward pass of `apply_layers`, which adds to the layers' gradients."""
    arrays, static = eqx.partition(work.layers, eqx.is_array)

    def one(
        carry: tuple[Array, PyTree], saved: tuple[Array, PyTree, Array, Array]
    ) -> tuple[tuple[Array, PyTree], None]:
        (dh, grads), (index, arrays, layer_id, h) = carry, saved
        layer = eqx.combine(arrays, static)
        _, vjp = eqx.filter_vjp(
            lambda layer, h: apply_layer(layer, layer_id, h, args, rows, work.key), layer, h
        )
        grad, dh = vjp(dh)
        total = _add_if(busy, take(grads, index), grad)
        grads = jax.tree.map(lambda stacked, new: stacked.at[index].set(new), grads, total)
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
