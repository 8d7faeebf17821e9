"""Pipeline parallelism in less memory: a microbatch turns back as soon as it has its loss.

The words are those of `_pipeline.py`; but here a tick takes a microbatch one way only.
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

from ..sharding import leaf_path
from ._pipeline import (
    apply,
    cut,
    depth,
    divide,
    fold_in,
    forward,
    in_words,
    join,
    map_rows,
    per_device,
    pipeline,
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
    """The mean loss behind a stack of layers that is split over the mesh axis `stage`.

    The same as [`eqxshard.parallel.pipeline`][] and a loss behind it, in less memory. The
    schedule is 1F1B, also called PipeDream-Flush (Narayanan et al. 2021,
    https://arxiv.org/abs/2006.09503 and https://arxiv.org/abs/2104.04473): a microbatch
    turns back as soon as the last stage has its loss, and each stage takes one forward
    and one backward in turn. It idles as long as under GPipe, but stage `i`, counted from
    0, holds the activations of at most `stages - i` microbatches, however many there are.

    The gradients with respect to `layers`, `head` and `x` are computed along with the
    loss, where it is differentiated (in reverse mode, and once). Those of `target` and
    `weight` are not, and to ask for them is an error where there are stages.

    **Arguments:**

    - `loss_fn`: `loss_fn(head, h, target)` returns the loss of one example, a scalar. If
        `key` is given, it is called with a `key=` as well.
    - `layers`, `x`, `microbatches`, `key`: as for [`eqxshard.parallel.pipeline`][].
    - `head`: what is trained behind the layers: a module, or any PyTree.
    - `target`: what else the loss needs of the batch: a PyTree of arrays of leading size
        batch.
    - `weight`: how much each example counts, such as `batch["weight"]`; once, if not
        given.

    **Returns:**

    The mean of the losses, by weight: a scalar, as the loss function of a step may
    return it.

    **Raises:**

    `ValueError` as for [`eqxshard.parallel.pipeline`][]; if `target` or `weight` is not of
    the batch's size; or if `loss_fn` does not return a scalar.

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
    for path, leaf in jax.tree_util.tree_leaves_with_path(entries):
        if leaf.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"{leaf_path(path)} has the shape {leaf.shape} for a batch of {len(x)}; "
                "give it one entry for each example."
            )
    stages, _ = divide(depth(layers), len(x), microbatches)
    # Sums of many need float32 at least.
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    counts = jnp.ones(len(x), dtype) if weight is None else jnp.asarray(weight, dtype)
    total = jnp.sum(counts)
    share = counts / jnp.where(total == 0, 1, total)
    loss = _loss if stages == 1 else _one_f_one_b
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
    key = fold_in(key, depth(layers))
    return _sum_losses((head, h), loss_fn, target, share, jnp.arange(len(x)), key)


_one_f_one_b = eqx.filter_custom_vjp(_loss)


class _Held(NamedTuple):
    """What a stage holds from tick to tick."""

    message: Array  # Activations on their way forward, or their gradient on its way back.
    inputs: Array  # Of each layer, for each microbatch that is to come back.
    loss: Array
    grads: tuple[PyTree, PyTree]  # Of the layers and of the head.


@_one_f_one_b.def_fwd
def _(
    perturbed: PyTree,
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    target: PyTree,
    share: Float[Array, " batch"],
    microbatches: int,
    key: PRNGKeyArray | None,
) -> tuple[Array, PyTree]:
    """The loss, and the gradients with it.

    Stage `i` takes microbatch `m` forward in tick `2 m + i`, and backward in tick
    `2 m + 2 stages - 1 - i`. So two neighbours never go the same way in a tick, and what
    one of them sends, the other needs in the next: they swap.
    """
    layers, head, x = params
    numbers, rows = jnp.arange(depth(layers)), jnp.arange(len(x))
    stages, batch_axes = divide(len(numbers), len(x), microbatches)
    keys = key, fold_in(key, len(numbers))

    def one_f_one_b(
        layers: PyTree, numbers: Array, head: PyTree, batch: PyTree, keys: PyTree
    ) -> tuple[Array, PyTree]:
        stage, (key, head_key) = jax.lax.axis_index("stage"), keys
        x, target, share, rows = cut(batch, microbatches)

        def go_forward(number: Array, held: _Held) -> _Held:
            h = jnp.where(stage == 0, x[number], held.message)
            h, inputs = forward(layers, numbers, h, rows[number], key)
            inputs = held.inputs.at[number % stages].set(inputs)
            held = held._replace(message=h, inputs=inputs)
            return _if(stage == stages - 1, ft.partial(turn_back, number), held)

        def turn_back(number: Array, held: _Held) -> _Held:
            its_target = jax.tree.map(lambda leaf: leaf[number], target)
            loss, (grads, dh) = eqx.filter_value_and_grad(_sum_losses)(
                (head, held.message),
                loss_fn,
                its_target,
                share[number],
                rows[number],
                head_key,
            )
            grads = held.grads[0], jax.tree.map(jnp.add, held.grads[1], grads)
            return held._replace(message=dh, loss=held.loss + loss, grads=grads)

        def go_backward(number: Array, held: _Held) -> _Held:
            of_layers, of_head = held.grads
            inputs = held.inputs[number % stages]
            dh, of_layers = _backward(
                layers, numbers, inputs, held.message, rows[number], key, of_layers
            )
            return held._replace(message=dh, grads=(of_layers, of_head))

        def tick(parity: int, time: Array, held: _Held) -> tuple[_Held, Array]:
            is_forward = stage % 2 == parity
            first = jnp.where(is_forward, stage, 2 * stages - 1 - stage)
            number = (time - first) // 2
            busy = (number >= 0) & (number < microbatches)
            held = _if(busy & is_forward, ft.partial(go_forward, number), held)
            held = _if(busy & ~is_forward, ft.partial(go_backward, number), held)
            message = _swap(held.message, parity, stages)
            return held._replace(message=message), held.message

        def two_ticks(held: _Held, time: Array) -> tuple[_Held, Array]:
            held, _ = tick(0, time, held)
            return tick(1, time + 1, held)

        held = _Held(
            message=jnp.zeros_like(x[0]),
            inputs=jnp.zeros_like(x, shape=(stages, len(numbers), *x.shape[1:])),
            loss=jnp.zeros((), share.dtype),
            grads=jax.tree.map(
                jnp.zeros_like, eqx.filter((layers, head), eqx.is_inexact_array)
            ),
        )
        times = 2 * jnp.arange(microbatches + stages - 1)
        held, sent = jax.lax.scan(two_ticks, held, times)
        # The first stage goes backward in the odd ticks, and is the last to begin with it.
        dx = jnp.where(stage == 0, join(sent[stages - 1 :]), 0)
        everywhere = ("stage", *batch_axes)
        loss, of_head = jax.lax.psum((held.loss, held.grads[1]), everywhere)
        of_layers = jax.lax.psum(held.grads[0], batch_axes)
        return loss, (of_layers, of_head, jax.lax.psum(dx, "stage"))

    split, batch, whole = PartitionSpec("stage"), PartitionSpec(batch_axes), PartitionSpec()
    in_specs = (split, split, whole, batch, whole)
    out_specs = (whole, (split, whole, batch))
    run = per_device(one_f_one_b, batch_axes, in_specs, out_specs)
    return run(layers, numbers, head, (x, target, share, rows), keys)


@_one_f_one_b.def_bwd
def _(grads: PyTree, scale: Array, *_: Any) -> PyTree:
    return jax.tree.map(lambda grad: grad * scale.astype(grad.dtype), grads)


def _backward(
    layers: PyTree,
    numbers: Array,
    inputs: Array,
    dh: Array,
    rows: Array,
    key: PRNGKeyArray | None,
    grads: PyTree,
) -> tuple[Array, PyTree]:
    """The way back of `forward`: the gradient of its input; those of the layers added."""
    arrays, static = eqx.partition(layers, eqx.is_array)

    def one(
        carry: tuple[Array, PyTree], saved: tuple[Array, PyTree, Array, Array]
    ) -> tuple[tuple[Array, PyTree], None]:
        (dh, grads), (index, arrays, number, h) = carry, saved
        layer = eqx.combine(arrays, static)
        _, vjp = eqx.filter_vjp(
            lambda layer, h: apply(layer, number, h, rows, key), layer, h
        )
        grad, dh = vjp(dh)
        grads = jax.tree.map(lambda total, new: total.at[index].add(new), grads, grad)
        return (dh, grads), None

    each = (jnp.arange(len(numbers)), arrays, numbers, inputs)
    return jax.lax.scan(one, (dh, grads), each, reverse=True)[0]


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
    losses = map_rows(ft.partial(loss_fn, head), rows, key, h, target)
    if jnp.shape(losses) != share.shape:
        raise ValueError(
            f"loss_fn returns {in_words(losses)} for each example; have it return a scalar."
        )
    # What has weight 0 does not count, whatever it is.
    return jnp.sum(jnp.where(share == 0, 0, losses.astype(share.dtype) * share))


def _if(condition: Array, fn: Callable[[_Held], _Held], held: _Held) -> _Held:
    """As `jax.lax.cond`, which would copy all that a branch does not change."""
    once = condition.astype(jnp.int32)
    return jax.lax.fori_loop(0, once, lambda _, held: fn(held), held)


def _swap(message: Array, parity: int, stages: int) -> Array:
    """Exchange messages between stages that went forward and the next, that went back."""
    left = range(parity, stages - 1, 2)
    pairs = [(i, i + 1) for i in left] + [(i + 1, i) for i in left]
    if (stages - 1) % 2 == parity:
        # The last stage went forward, and turned back.
        pairs.append((stages - 1, stages - 1))
    return jax.lax.ppermute(message, "stage", pairs)
