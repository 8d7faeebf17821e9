"""A mixture of experts: tokens travel to the devices of their experts, and back.

Glossary:

- a *choice* is one of a token's `k` experts, counted from the most probable;
- a device's *queue* for an expert holds those of its choices that the expert keeps;
- each *round* of the exchange has a number of *slots* per expert, which the next choices
  in the queue fill.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..sharding._leaves import array_leaves
from ..sharding._mesh import BATCH_AXES
from ..sharding._text import nearest_multiples
from ..transforms._dtypes import at_least_float32
from ..transforms._shard_map import filter_shard_map

#: The slots of a round, as a multiple of an even load. Longer queues take further rounds:
#: with fewer slots these are more common, with more slots more is sent and computed for
#: nothing.
_SLOTS_PER_EVEN_LOAD = 2


class Mixture(NamedTuple):
    """The result of [`eqxshard.parallel.mixture_of_experts`][].

    - `output`: for each token the sum of its experts' outputs, weighted by their gates.
    - `balance_loss`: the load-balancing loss: 1 if the load is even, and up to the number
        of experts if it is not. Add a little of it (Switch: 0.01 times) to the loss of the
        model.
    - `dropped`: the fraction of the tokens' choices that exceeded the capacity.
    """

    output: Float[Array, "*batch tokens out"]
    balance_loss: Float[Array, "*batch"]
    dropped: Float[Array, "*batch"]


def mixture_of_experts(
    experts: PyTree,
    x: Float[Array, "*batch tokens embed"],
    router_logits: Float[Array, "*batch tokens experts"],
    *,
    k: int = 2,
    capacity: float | None = None,
) -> Mixture:
    r"""Apply to each token the `k` experts that its router prefers.

    On a mesh with an axis `expert` each device holds some of the experts and works on
    some of the tokens: one all-to-all brings tokens to their experts, another brings the
    results back, and no device gathers either. The results, and the choices that are
    dropped, do not depend on the mesh. The mesh is the one in context, as for
    [`eqxshard.constrain`][]: inside a step of [`eqxshard.make_train_step`][] it is the
    step's. Without one, or with `expert=1`, there is no communication. In per-device code
    along `expert` this takes and returns the device's own parts.

    This is the layer of GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668)
    and of the Switch Transformer (Fedus et al. 2021, https://arxiv.org/abs/2101.03961),
    with the option to drop nothing, after MegaBlocks (Gale et al. 2022,
    https://arxiv.org/abs/2211.15841).

    *Gates.* The router's probabilities are the softmax of its logits over all experts, in
    float32 or better. A token takes the `k` most probable experts (of equals, the first).
    Their gates are their probabilities, divided by the sum of these if `k` is 2 or more.
    (With `k=1` that would always be 1, and would teach the router nothing.)

    *Capacity.* The tokens of one example are a group. With a capacity factor, each expert
    takes at most `ceil(capacity * k * tokens / experts)` tokens of a group: all first
    choices come before all second choices, and each in the order of the tokens. The rest
    is dropped: it adds zero to the output. With `capacity=None`, nothing is dropped.

    *Cost.* Shapes are static, so the exchange runs in rounds. In each round a device sends
    every expert at most twice the average, `2 * k * tokens / experts / devices` tokens. If
    no expert is chosen by more of a device's tokens than that, one round is enough, and
    buffers and computation are twice those of an even load. Further rounds run only if an
    example of the batch needs them: up to `experts / (2 * k)` in all, when all tokens want
    the same expert. They take no more memory than one round, because the backward pass
    recomputes each of them. A capacity bounds their number, too.

    **Arguments:**

    - `experts`: a module that holds all experts: each of its arrays has a leading dim of
        experts, as from `equinox.filter_vmap` over their keys. Each expert maps a token,
        an array of shape `embed`, to an array of rank 1. Store them with the spec
        `P("expert")`.
    - `x`: the tokens, usually those of one example, under `jax.vmap` over the batch;
        leading batch dims do the same.
    - `router_logits`: the router's score of each expert for each token, before the
        softmax.
    - `k`: the number of experts that each token goes to.
    - `capacity`: the capacity factor, or `None` to drop nothing.

    **Returns:**

    A named tuple of `output`, `balance_loss` and `dropped`. The balance loss is
    $E \sum_e f_e P_e$ over the $E$ experts (Switch, equation 4, without its factor), where
    $f_e$ is the fraction of a group's choices that fall on an expert, dropped or not, and
    $P_e$ the expert's mean probability. (Over several devices there are reverse-mode
    derivatives only.)

    **Raises:**

    `ValueError` if the shapes do not fit together, tokens or experts do not divide over
    the axis `expert`, `k` is not between 1 and the number of experts, or `capacity` is not
    positive.

    !!! Example

        ```python
        class MoE(eqx.Module):
            router: eqx.nn.Linear
            experts: eqx.nn.MLP

            def __init__(self, key):
                k1, k2 = jax.random.split(key)
                self.router = eqx.nn.Linear(64, 8, use_bias=False, key=k1)
                make_expert = lambda key: eqx.nn.MLP(64, 64, 256, 1, key=key)
                self.experts = eqx.filter_vmap(make_expert)(jax.random.split(k2, 8))

            def __call__(self, x):  # tokens embed
                return eqxshard.parallel.mixture_of_experts(
                    self.experts, x, jax.vmap(self.router)(x), k=2, capacity=1.25
                )


        mesh = eqxshard.make_mesh(expert=4)
        rule = eqxshard.first_match(
            eqxshard.by_path({"experts": P("expert")}), eqxshard.replicate()
        )
        ```
    """
    if x.ndim > 2:
        one = ft.partial(mixture_of_experts, experts, k=k, capacity=capacity)
        return jax.vmap(one)(x, router_logits)
    mesh = jax.sharding.get_abstract_mesh()
    devices = mesh.shape.get("expert", 1)
    parts = devices if "expert" in mesh.manual_axes else 1
    _check(experts, x, router_logits, k, capacity, devices, parts)
    tokens, count = x.shape[0] * parts, router_logits.shape[1]
    # No token chooses an expert twice.
    limit = tokens
    if capacity is not None:
        limit = min(tokens, math.ceil(capacity * k * tokens / count))
    per_device = ft.partial(_mixture, k=k, limit=limit, devices=devices)
    if devices > parts:
        split, whole = PartitionSpec("expert"), PartitionSpec()
        per_device = filter_shard_map(
            per_device, None, split, (split, whole, whole), axis_names={"expert"}
        )
    return Mixture(*per_device(experts, x, router_logits))


class _Routes(NamedTuple):
    """The routes of a device's tokens: for each token and choice,

    - `expert`: its number;
    - `gate`: its weight in the output;
    - `position`: in this device's queue for the expert, counted from 0;
    - `kept`: whether it is in the queue at all.
    """

    expert: Int[Array, "tokens k"]
    gate: Float[Array, "tokens k"]
    position: Int[Array, "tokens k"]
    kept: Bool[Array, "tokens k"]


def _mixture(
    experts: PyTree,
    x: Float[Array, "tokens embed"],
    logits: Float[Array, "tokens experts"],
    k: int,
    limit: int,
    devices: int,
) -> tuple[Float[Array, "tokens out"], Float[Array, ""], Float[Array, ""]]:
    """The mixture on one of `devices`, with its part of the experts and of the tokens."""
    tokens, count = logits.shape
    routes, longest, balance_loss, dropped = _route(logits, k, limit, devices)
    longest_possible = min(limit, tokens)
    slots = math.ceil(_SLOTS_PER_EVEN_LOAD * k * tokens / count)
    slots = min(longest_possible, slots)

    exchange = _exchange if devices > 1 else lambda rows: rows

    def run_round(number: int | Int[Array, ""]) -> Float[Array, "tokens out"]:
        slot = routes.position - number * slots
        in_round = routes.kept & (slot >= 0) & (slot < slots)
        # Unused slots hold some token, not zeros: an expert may not be differentiable at
        # zero.
        token = (jnp.arange(count * slots, dtype=jnp.int32) % tokens).reshape(count, slots)
        token = token.at[routes.expert, jnp.where(in_round, slot, slots)].set(
            jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop"
        )
        rows = exchange(x[token].reshape(devices, count // devices, slots, -1))
        rows = exchange(_apply_experts(experts, rows)).reshape(count, slots, -1)
        rows = at_least_float32(rows[routes.expert, jnp.clip(slot, 0, slots - 1)])
        gate = jnp.where(in_round, routes.gate, 0).astype(rows.dtype)
        return jnp.sum(gate[..., None] * rows, axis=1)

    def run_further_rounds(output: Array) -> Array:
        @jax.checkpoint
        def body(output: Array, number: Int[Array, ""]) -> tuple[Array, None]:
            def add_round() -> Array:
                return output + run_round(number)

            return lax.cond(longest > number * slots, add_round, lambda: output), None

        numbers = jnp.arange(1, math.ceil(longest_possible / slots))
        return lax.scan(body, output, numbers)[0]

    output = run_round(0)
    if slots < longest_possible:
        output = lax.cond(longest > slots, run_further_rounds, lambda out: out, output)
    return output.astype(x.dtype), balance_loss, dropped


def _route(
    logits: Float[Array, "tokens experts"], k: int, limit: int, devices: int
) -> tuple[_Routes, Int[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Choose experts, and keep the first `limit` choices of each in the whole group.

    Returns the routes, the length of the longest queue on any device, the balance loss,
    and the fraction dropped.
    """
    tokens, count = logits.shape
    probs = jax.nn.softmax(at_least_float32(logits))
    gate, expert = _top_k(probs, k)
    if k > 1:
        gate = gate / jnp.sum(gate, axis=1, keepdims=True)

    chosen = jax.nn.one_hot(expert, count, dtype=jnp.int32)
    device = lax.axis_index("expert") if devices > 1 else 0
    # How often each expert is chosen, by choice and device: the order of precedence.
    chosen_by = jnp.zeros((k, devices, count), jnp.int32)
    chosen_by = chosen_by.at[:, device].set(jnp.sum(chosen, axis=0))
    mean_probs = jnp.mean(probs, axis=0) / devices
    if devices > 1:
        chosen_by, mean_probs = lax.psum((chosen_by, mean_probs), "expert")
    in_order = chosen_by.reshape(k * devices, count)
    before = (jnp.cumsum(in_order, axis=0) - in_order).reshape(k, devices, count)
    kept_by = jnp.clip(limit - before, 0, chosen_by)
    kept_here = kept_by[:, device]

    # In a device's own queue, too, first choices come before second choices.
    earlier = jnp.cumsum(chosen, axis=0) - chosen
    order = jnp.take_along_axis(earlier, expert[..., None], axis=2)[..., 0]
    choice = jnp.arange(k)[None]
    start = jnp.cumsum(kept_here, axis=0) - kept_here
    kept = order < kept_here[choice, expert]
    routes = _Routes(expert, gate, order + start[choice, expert], kept)

    share = jnp.sum(chosen_by, axis=(0, 1)) / (k * tokens * devices)
    balance_loss = count * jnp.sum(share.astype(mean_probs.dtype) * mean_probs)
    dropped = 1 - jnp.sum(kept_by) / (k * tokens * devices)
    longest = _max_over_batch(jnp.max(jnp.sum(kept_by, axis=0)))
    return routes, longest, balance_loss, dropped


def _top_k(
    probs: Float[Array, "tokens experts"], k: int
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """As `jax.lax.top_k`, which would make XLA gather the rows of the batch."""
    rest, chosen = lax.stop_gradient(probs), []
    for _ in range(k):
        chosen.append(jnp.argmax(rest, axis=1).astype(jnp.int32))
        one_hot = jax.nn.one_hot(chosen[-1], probs.shape[1], dtype=jnp.bool_)
        rest = jnp.where(one_hot, -1, rest)
    expert = jnp.stack(chosen, axis=1)
    return jnp.take_along_axis(probs, expert, axis=1), expert


@custom_vmap
def _max_over_batch(value: Int[Array, ""]) -> Int[Array, ""]:
    """The maximum over all examples that `jax.vmap` runs over.

    It makes the condition of `jax.lax.cond` one for the whole batch. With a condition for
    each example, both branches would be computed.
    """
    return value


@_max_over_batch.def_vmap
def _(axis_size: int, in_batched: Any, value: Int[Array, " batch"]) -> Any:
    return _max_over_batch(jnp.max(value)), False


@jax.custom_vjp
def _exchange(rows: Float[Array, "devices ..."]) -> Float[Array, "devices ..."]:
    """Send each device its rows; the rows that arrive are in the order of the senders."""
    return _all_to_all(rows)


# The exchange is its own inverse, so it also sends the gradients back.
_exchange.defvjp(
    lambda rows: (_all_to_all(rows), None), lambda _, grad: (_all_to_all(grad),)
)


@custom_vmap
def _all_to_all(rows: Float[Array, "devices *batch experts slots _"]) -> Array:
    """An all-to-all that leaves the rows of the batch on their devices.

    If a collective is manual along only one axis of the mesh, XLA gathers arrays that are
    split along the others. So this one is manual along those of the batch, too, which
    split the outermost dim that `jax.vmap` runs over.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.auto_axes)
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def exchange(rows: Array) -> Array:
        return lax.all_to_all(rows, "expert", 0, 0)

    # From JAX 0.11 on, XLA aborts on manual axes inside manual axes here. Gathering the
    # rows instead costs time, but is correct.
    nests = jax.__version_info__ < (0, 11)
    if nests and axes and rows.ndim > 4 and rows.shape[1] % parts == 0:
        split = PartitionSpec(None, axes)
        exchange = jax.shard_map(
            exchange, in_specs=split, out_specs=split, axis_names=set(axes)
        )
    return exchange(rows)


@_all_to_all.def_vmap
def _(axis_size: int, in_batched: Any, rows: Float[Array, "batch devices ..."]) -> Any:
    return jnp.moveaxis(_all_to_all(jnp.moveaxis(rows, 0, 1)), 1, 0), True


def _apply_experts(
    experts: PyTree, rows: Float[Array, "devices experts slots embed"]
) -> Float[Array, "devices experts slots out"]:
    """Apply every expert to its rows, from all devices."""

    def apply(expert: Callable[[Array], Array], rows: Array) -> Array:
        return jax.vmap(jax.vmap(expert))(rows)

    out = eqx.filter_vmap(apply, in_axes=(eqx.if_array(0), 1), out_axes=1)(experts, rows)
    if out.ndim != rows.ndim:
        raise ValueError(
            f"an expert returns an array of shape {out.shape[3:]} for a token of shape "
            f"{rows.shape[3:]}; have it return an array of rank 1."
        )
    return out


def _check(
    experts: PyTree,
    x: Array,
    logits: Array,
    k: int,
    capacity: float | None,
    devices: int,
    parts: int,
) -> None:
    """Check the arguments, which are one of `parts` parts, for a number of devices."""
    if x.ndim != 2 or logits.ndim != 2 or x.shape[0] != logits.shape[0]:
        raise ValueError(
            f"x has shape {x.shape} and router_logits {logits.shape}; give both a row for "
            "each token, with shapes (tokens, embed) and (tokens, experts)."
        )
    tokens, count = x.shape[0] * parts, logits.shape[1]
    if not 1 <= k <= count:
        raise ValueError(f"k={k} must be between 1 and the number of experts, {count}.")
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(
            f"capacity={capacity} must be positive and finite, such as 1.25, or None to "
            "drop nothing."
        )
    for name, size in (("tokens", tokens), ("experts", count)):
        if size % devices:
            raise ValueError(
                f"{size} {name} do not divide over expert={devices}; use a multiple of "
                f"{devices}, such as {nearest_multiples(size, devices)}, or a mesh whose "
                f"axis expert divides {size}."
            )
    for path, leaf in array_leaves(experts, "experts"):
        if leaf.shape[:1] != (count // parts,):
            raise ValueError(
                f"{path} has shape {leaf.shape}, but router_logits are for {count} "
                f"experts; give each array of the experts a leading dim of "
                f"{count // parts}, as equinox.filter_vmap does over that many keys."
            )
