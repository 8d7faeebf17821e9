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

from .._errors import UsageError
from ..sharding._leaves import stacked_depth
from ..transforms._dtypes import accumulation_dtype
from ._pipeline import (
    apply_layer,
    apply_layers,
    check_rows,
    fold_in_if_given,
    format_example,
    from_microbatches,
    map_examples,
    per_device,
    pipeline,
    split_axes,
    sum_copies,
    take,
    to_microbatches,
    to_next,
)

#: Arrays of leading size batch: what every layer gets of each example, what the loss gets,
#: and how much of the batch's mean each example is.
_Examples = tuple[tuple[PyTree, ...], PyTree, Array]


def pipeline_loss(
    loss_fn: Callable[..., Float[Array, ""]],
    layers: PyTree,
    head: PyTree,
    x: Float[Array, "batch ..."],
    target: PyTree,
    *,
    args: tuple[PyTree, ...] = (),
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
    each stage keeps the activations of `2 stages - 1` microbatches only, whatever their
    number.

    The gradients with respect to `layers`, `head` and `x` are computed together with the
    loss if it is differentiated (in reverse mode, and once). Those of `target`, `args` and
    `weight` are not, and asking for them is an error if there are stages; where one of
    these depends on what is differentiated, use [`jax.lax.stop_gradient`][].

    **Arguments:**

    - `loss_fn`: `loss_fn(head, h, target)` returns the loss of one example, a scalar. If
        `key` is given, it is called with a `key=` as well.
    - `layers`, `x`, `args`, `microbatches`, `key`: as for
        [`eqxshard.parallel.pipeline`][].
    - `head`: the trained part after the layers: a module, or any PyTree.
    - `target`: everything else the loss needs from the batch: a PyTree of arrays of
        leading size batch.
    - `weight`: how much each example counts, such as `batch["__weight__"]`; 1 by default.

    **Returns:**

    The weighted mean of the losses: a scalar, as the loss function of a step may return
    it.

    **Raises:**

    `ValueError` as for [`eqxshard.parallel.pipeline`][]; if `target` or `weight` does not
    have the batch's size; if `loss_fn` does not return a scalar; or if `target`, `args` or
    `weight` is differentiated and there are stages.

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
    target, args = jax.tree.map(jnp.asarray, (target, args))
    stages, _ = split_axes(stacked_depth(layers), len(x), microbatches)
    dtype = accumulation_dtype(x.dtype)
    counts = jnp.ones(len(x), dtype) if weight is None else jnp.asarray(weight, dtype)
    check_rows({"args": args, "target": target, "weight": counts}, len(x))
    if stages > 1:
        target, args, counts = jax.tree.map(_constant, (target, args, counts))
    total = jnp.sum(counts)
    share = counts / jnp.where(total == 0, 1, total)
    loss = _loss if stages == 1 else _one_f_one_b_loss
    return loss((layers, head, x), loss_fn, (args, target, share), microbatches, key)


@jax.custom_jvp
def _constant(x: Array) -> Array:
    """`x`, which must not depend on what is differentiated."""
    return x


@_constant.defjvp
def _(*_: Any) -> tuple[Array, Array]:
    # Called only if there is something to differentiate.
    raise UsageError(
        "pipeline_loss has no gradient of target, args and weight, one of which depends "
        "here on what is differentiated; use jax.lax.stop_gradient of it, or "
        "eqxshard.parallel.pipeline where you need the gradient."
    )


# The schedule on one device


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


def _run_schedule(
    stages: int,
    layers: PyTree,
    layer_ids: Array,
    head: PyTree,
    loss_fn: Callable[..., Array],
    batch: tuple[Array, _Examples, Array],
    keys: tuple[PRNGKeyArray | None, PRNGKeyArray | None],
) -> tuple[Array, tuple[PyTree, PyTree, Array]]:
    """One device's part of the loss, and of the gradients of layers, head and input.

    Stage `i` takes microbatch `t` forward in tick `t + i`. The last stage takes it backward
    in the same tick, and each stage before it one tick later. All stages do the same in
    each tick, even if it is of no use. Taking turns would halve the number of microbatches
    under way, but collectives of layers along other axes would then get mixed up with those
    of another stage's layers.

    **Arguments:**

    - `layers`, `layer_ids`: those of this device.
    - `batch`: the input, the examples and their rows, by microbatch.
    - `keys`: of the layers and of the loss.
    """
    x, examples, all_rows = batch
    all_args, _, share = examples
    key, head_key = keys
    stage, last = jax.lax.axis_index("stage"), stages - 1
    # The number of microbatches to keep the layers' inputs of.
    slots = 2 * last + 1

    def forward(carry: _Carry, time: Array) -> tuple[_Carry, Array]:
        """Take a microbatch through this stage's layers; also return its activations."""
        microbatch = time - stage
        h = jnp.where(stage == 0, x[microbatch], carry.h)
        args, rows = take((all_args, all_rows), microbatch)
        h, inputs = apply_layers(layers, layer_ids, h, args, rows, key)
        inputs = carry.inputs.at[microbatch % slots].set(inputs)
        received = jax.lax.ppermute(h, "stage", to_next(stages))
        return carry._replace(h=received, inputs=inputs), h

    def take_loss(carry: _Carry, h: Array, time: Array) -> _Carry:
        """On the last stage: a microbatch's loss, and the gradient to go backward with."""
        now, rows = take((examples, all_rows), time - last)
        loss, (head_grads, dh) = eqx.filter_value_and_grad(_sum_losses)(
            (head, h), loss_fn, now, rows, head_key
        )
        return carry._replace(
            dh=jnp.where(stage == last, dh, carry.dh),
            loss=_add_if(stage == last, carry.loss, loss),
            head_grads=_add_if(stage == last, carry.head_grads, head_grads),
        )

    def backward(carry: _Carry, time: Array) -> _Carry:
        """Take a microbatch back through the layers of this stage."""
        microbatch = time - 2 * last + stage
        busy = (microbatch >= 0) & (microbatch < len(x))
        inputs = carry.inputs[microbatch % slots]
        args, rows = take((all_args, all_rows), microbatch)
        arrays, static = eqx.partition(layers, eqx.is_array)

        def one(
            carry: tuple[Array, PyTree], saved: tuple[Array, PyTree, Array, Array]
        ) -> tuple[tuple[Array, PyTree], None]:
            (dh, grads), (index, arrays, layer_id, h) = carry, saved
            layer = eqx.combine(arrays, static)
            _, vjp = eqx.filter_vjp(
                lambda layer, h: apply_layer(layer, layer_id, h, args, rows, key), layer, h
            )
            grad, dh = vjp(dh)
            total = _add_if(busy, take(grads, index), grad)
            return (dh, jax.tree.map(lambda x, y: x.at[index].set(y), grads, total)), None

        each = (jnp.arange(len(layer_ids)), arrays, layer_ids, inputs)
        sums = (carry.dh, carry.layer_grads)
        (dh, layer_grads), _ = jax.lax.scan(one, sums, each, reverse=True)
        # What is out of range is not written.
        entry = jnp.where(busy, microbatch, len(x))
        dx = carry.dx.at[entry].set(dh, mode="drop")
        to_previous = [(after, before) for before, after in to_next(stages)]
        received = jax.lax.ppermute(dh, "stage", to_previous)
        return carry._replace(dh=received, layer_grads=layer_grads, dx=dx)

    def forward_only(carry: _Carry, time: Array) -> tuple[_Carry, None]:
        return forward(carry, time)[0], None

    def both(carry: _Carry, time: Array) -> tuple[_Carry, None]:
        carry, h = forward(carry, time)
        return backward(take_loss(carry, h, time), time), None

    def backward_only(carry: _Carry, time: Array) -> tuple[_Carry, None]:
        return backward(carry, time), None

    def zeros(tree: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, eqx.filter(tree, eqx.is_inexact_array))

    carry = _Carry(
        h=jnp.zeros_like(x[0]),
        dh=jnp.zeros_like(x[0]),
        inputs=jnp.zeros_like(x, shape=(slots, len(layer_ids), *x.shape[1:])),
        loss=jnp.zeros((), share.dtype),
        layer_grads=zeros(layers),
        head_grads=zeros(head),
        dx=jnp.zeros_like(x),
    )
    # Until the first loss; until the last loss; until the last microbatch is back at the
    # first stage.
    forward_ticks = len(x) + last
    times = jnp.arange(last + forward_ticks)
    warm_up, steady, cool_down = jnp.split(times, (last, forward_ticks))
    carry, _ = jax.lax.scan(forward_only, carry, warm_up)
    carry, _ = jax.lax.scan(both, carry, steady)
    carry, _ = jax.lax.scan(backward_only, carry, cool_down)
    dx = jnp.where(stage == 0, from_microbatches(carry.dx), 0)
    return carry.loss, (carry.layer_grads, carry.head_grads, dx)


def _sum_losses(
    params: tuple[PyTree, Array],
    loss_fn: Callable[..., Array],
    examples: _Examples,
    rows: Array,
    key: PRNGKeyArray | None,
) -> Array:
    """Sum the losses of examples, each by its share of the batch's mean."""
    (head, h), (_, target, share) = params, examples
    losses = map_examples(ft.partial(loss_fn, head), rows, key, h, target)
    if jnp.shape(losses) != share.shape:
        raise UsageError(
            f"loss_fn returns {format_example(losses)} for each example; have it return a "
            "scalar."
        )
    # An example of weight 0 does not count, even if its loss is nan.
    return jnp.sum(jnp.where(share == 0, 0, losses.astype(share.dtype) * share))


def _add_if(condition: Array, total: PyTree, new: PyTree) -> PyTree:
    """Add where the condition holds; elsewhere the new values may be nan."""
    return jax.tree.map(lambda total, new: total + jnp.where(condition, new, 0), total, new)


# The loss, and its gradient


def _loss(
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    examples: _Examples,
    microbatches: int,
    key: PRNGKeyArray | None,
) -> Float[Array, ""]:
    layers, head, x = params
    h = pipeline(layers, x, *examples[0], microbatches=microbatches, key=key)
    key = fold_in_if_given(key, stacked_depth(layers))
    return _sum_losses((head, h), loss_fn, examples, jnp.arange(len(x)), key)


_one_f_one_b_loss = eqx.filter_custom_vjp(_loss)


@_one_f_one_b_loss.def_fwd
def _(
    perturbed: PyTree,
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    examples: _Examples,
    microbatches: int,
    key: PRNGKeyArray | None,
) -> tuple[Array, PyTree]:
    """The loss, and the gradients with it."""
    layers, head, x = params
    layer_ids, rows = jnp.arange(stacked_depth(layers)), jnp.arange(len(x))
    stages, batch_axes = split_axes(len(layer_ids), len(x), microbatches)
    keys = key, fold_in_if_given(key, len(layer_ids))

    def one_f_one_b(
        layers: PyTree, layer_ids: Array, head: PyTree, batch: PyTree, keys: PyTree
    ) -> tuple[Array, PyTree]:
        batch = to_microbatches(batch, microbatches)
        sums = _run_schedule(stages, layers, layer_ids, head, loss_fn, batch, keys)
        return jax.tree.map(lambda leaf: leaf[None], sums)

    by_stage, by_batch = PartitionSpec("stage"), PartitionSpec(batch_axes)
    in_specs = (by_stage, by_stage, PartitionSpec(), by_batch, PartitionSpec())
    of_all = PartitionSpec(("stage", *batch_axes))
    of_layers, of_x = PartitionSpec(batch_axes, "stage"), PartitionSpec("stage", batch_axes)
    out_specs = (of_all, (of_layers, of_all, of_x))
    run = per_device(one_f_one_b, batch_axes, in_specs, out_specs)
    return sum_copies(run(layers, layer_ids, head, (x, examples, rows), keys))


@_one_f_one_b_loss.def_bwd
def _(grads: PyTree, scale: Array, *_: Any) -> PyTree:
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)
