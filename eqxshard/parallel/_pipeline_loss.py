"""Pipeline parallelism in less memory: a microbatch turns back as soon as it has its loss.

The words are those of `_pipeline.py`.
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
    add_copies,
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
    turns back as soon as the last stage has its loss, and from then on each stage takes
    one forward and one backward in every tick. It idles as long as under GPipe, but
    stage `i`, counted from 0, holds the activations of at most `2 (stages - i) - 1`
    microbatches, however many there are.

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

    h: Array  # From the stage before: activations.
    dh: Array  # From the stage behind: their gradient.
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

    Stage `i` takes microbatch `m` forward in tick `m + i`, and backward in tick
    `m + 2 (stages - 1) - i`. All stages do the same in a tick, if only in vain: were they
    to take turns, half as many microbatches would be under way at a time, but what a
    layer sends along other axes would meet what another stage's sends.
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
        last, slots = stages - 1, 2 * stages - 1

        def go_forward(held: _Held, time: Array) -> tuple[_Held, Array]:
            number = time - stage
            h = jnp.where(stage == 0, x[number], held.h)
            h, inputs = forward(layers, numbers, h, rows[number], key)
            inputs = held.inputs.at[number % slots].set(inputs)
            onward = [(i, i + 1) for i in range(last)]
            received = jax.lax.ppermute(h, "stage", onward)
            return held._replace(h=received, inputs=inputs), h

        def turn_back(held: _Held, h: Array, number: Array) -> _Held:
            its_target = jax.tree.map(lambda leaf: leaf[number], target)
            loss, (grads, dh) = eqx.filter_value_and_grad(_sum_losses)(
                (head, h), loss_fn, its_target, share[number], rows[number], head_key
            )
            of_layers, of_head = held.grads
            of_head = _add_if(stage == last, of_head, grads)
            return held._replace(
                dh=jnp.where(stage == last, dh, held.dh),
                loss=_add_if(stage == last, held.loss, loss),
                grads=(of_layers, of_head),
            )

        def go_backward(held: _Held, time: Array) -> tuple[_Held, Array]:
            number = time - 2 * last + stage
            busy = (number >= 0) & (number < microbatches)
            of_layers, of_head = held.grads
            inputs = held.inputs[number % slots]
            dh, of_layers = _backward(
                layers, numbers, inputs, held.dh, rows[number], key, of_layers, busy
            )
            back = [(i + 1, i) for i in range(last)]
            received = jax.lax.ppermute(dh, "stage", back)
            return held._replace(dh=received, grads=(of_layers, of_head)), dh

        def both(held: _Held, time: Array) -> tuple[_Held, Array]:
            held, h = go_forward(held, time)
            return go_backward(turn_back(held, h, time - last), time)

        held = _Held(
            h=jnp.zeros_like(x[0]),
            dh=jnp.zeros_like(x[0]),
            inputs=jnp.zeros_like(x, shape=(slots, len(numbers), *x.shape[1:])),
            loss=jnp.zeros((), share.dtype),
            grads=jax.tree.map(
                jnp.zeros_like, eqx.filter((layers, head), eqx.is_inexact_array)
            ),
        )
        # The first microbatch reaches the last stage, all turn back, the last one returns.
        times = jnp.arange(microbatches + 2 * last)
        there, turns, back = jnp.split(times, (last, last + microbatches))
        held, _ = jax.lax.scan(lambda *now: (go_forward(*now)[0], None), held, there)
        held, early = jax.lax.scan(both, held, turns)
        held, late = jax.lax.scan(go_backward, held, back)
        dx = join(jnp.concatenate([early, late])[last:])
        dx = jnp.where(stage == 0, dx, 0)
        return jax.tree.map(lambda leaf: leaf[None], (held.loss, (*held.grads, dx)))

    by_stage, by_batch = PartitionSpec("stage"), PartitionSpec(batch_axes)
    in_specs = (by_stage, by_stage, PartitionSpec(), by_batch, PartitionSpec())
    everywhere = PartitionSpec(("stage", *batch_axes))
    of_layers, of_x = PartitionSpec(batch_axes, "stage"), PartitionSpec("stage", batch_axes)
    out_specs = (everywhere, (of_layers, everywhere, of_x))
    run = per_device(one_f_one_b, batch_axes, in_specs, out_specs)
    return add_copies(run(layers, numbers, head, (x, target, share, rows), keys))


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
    busy: Array,
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
        here = jax.tree.map(lambda total: total[index], grads)
        here = _add_if(busy, here, grad)
        grads = jax.tree.map(lambda total, new: total.at[index].set(new), grads, here)
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


def _add_if(condition: Array, total: PyTree, new: PyTree) -> PyTree:
    """Add, or not: what was computed in vain may be nan."""
    return jax.tree.map(lambda total, new: total + jnp.where(condition, new, 0), total, new)
