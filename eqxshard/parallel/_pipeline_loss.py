"""Pipeline parallelism in less memory: each microbatch goes backward after its loss.

The terms are those of `_pipeline.py`.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from ..sharding._leaves import stacked_depth
from ..transforms._dtypes import accumulation_dtype
from ._one_f_one_b import Examples, Work, run_schedule, sum_losses
from ._pipeline import (
    check_rows,
    fold_in_if_given,
    per_device,
    pipeline,
    split_axes,
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
        target = jax.tree.map(ft.partial(_constant, "target"), target)
        args = jax.tree.map(ft.partial(_constant, "args"), args)
        counts = _constant("weight", counts)
    total = jnp.sum(counts)
    share = counts / jnp.where(total == 0, 1, total)
    loss = _loss if stages == 1 else _one_f_one_b_loss
    examples = Examples(args, target, share)
    return loss((layers, head, x), loss_fn, examples, microbatches, key)


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name: str, x: Array) -> Array:
    """`x`, which must not depend on what is differentiated."""
    del name
    return x


@_constant.defjvp
def _(name: str, *_: Any) -> tuple[Array, Array]:
    # Called only if there is something to differentiate.
    raise ValueError(
        f"pipeline_loss has no gradient of {name}, which depends here on what is "
        f"differentiated; use jax.lax.stop_gradient({name}), or "
        "eqxshard.parallel.pipeline where you need the gradient."
    )


def _loss(
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    examples: Examples,
    microbatches: int,
    key: PRNGKeyArray | None,
) -> Float[Array, ""]:
    layers, head, x = params
    h = pipeline(layers, x, *examples.args, microbatches=microbatches, key=key)
    key = fold_in_if_given(key, stacked_depth(layers))
    return sum_losses((head, h), loss_fn, examples, jnp.arange(len(x)), key)


_one_f_one_b_loss = eqx.filter_custom_vjp(_loss)


@_one_f_one_b_loss.def_fwd
def _(
    perturbed: PyTree,
    params: tuple[PyTree, PyTree, Array],
    loss_fn: Callable[..., Array],
    examples: Examples,
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
        stage = jax.lax.axis_index("stage")
        batch = to_microbatches(batch, microbatches)
        work = Work(stages, stage, layers, layer_ids, head, loss_fn, *batch, *keys)
        sums = run_schedule(work)
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
