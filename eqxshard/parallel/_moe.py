"""A mixture of experts: tokens travel to the devices of their experts, and back."""

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

from .._shard_map import filter_shard_map
from ..mesh import BATCH_AXES
from ..sharding import leaf_path

#: Room in a round of exchange for each device's tokens of each expert, in units of what
#: falls to it on average. An expert that a device has more tokens for takes further
#: rounds: less room makes them common, and more is sent and computed in vain.
_ROOM = 2


class Mixture(NamedTuple):
    """What [`eqxshard.parallel.mixture_of_experts`][] returns.

    - `output`: for each token the sum of its experts' outputs, weighted by their gates.
    - `balance_loss`: the load-balancing loss, 1 where the load is even and up to the
        number of experts where it is not. Add a little of it (Switch: 0.01 times) to the
        loss of the model.
    - `dropped`: the share of the tokens' choices that found no room, from 0 to 1.
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

    On a mesh with an axis `expert` each device holds some of the experts, and works on
    some of the tokens: an all-to-all brings tokens to their experts, a second one brings
    the results back, and no device gathers either. What is computed, and what is
    dropped, does not depend on the mesh. The mesh is that of the context, as for
    [`eqxshard.constrain`][]: inside a step of [`eqxshard.make_train_step`][] it is the
    step's. Without one, or with `expert=1`, there is no communication. In per-device code
    along `expert` this takes and returns the device's own parts.

    This is the layer of GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668)
    and of the Switch Transformer (Fedus et al. 2021, https://arxiv.org/abs/2101.03961),
    with the choice not to drop, after MegaBlocks (Gale et al. 2022,
    https://arxiv.org/abs/2211.15841).

    *Gates.* The router's probabilities are the softmax of its logits over all experts, in
    float32 at least. A token takes the `k` experts of the highest (of equals, the first),
    and their gates are these probabilities, divided by their sum where `k` is 2 or more.
    With `k=1` that would always be 1, and would teach the router nothing.

    *Capacity.* The tokens of one example are a group. With a capacity factor each expert
    takes at most `ceil(capacity * k * tokens / experts)` of a group: all first choices
    come before all second choices, and in each the tokens come in their order. What does
    not fit is dropped: it adds zero to the output. With `capacity=None` nothing is.

    *Cost.* Shapes are static, and so the exchange runs in rounds. In each round a device
    sends every expert at most twice the average, `2 * k * tokens / experts / devices`
    tokens. While no expert is chosen by more of a device's tokens than that, one round is
    all, and buffers and computation are twice those of an even load. Further rounds run
    only when an example of the batch needs them: up to `experts / (2 * k)` in all, when
    all tokens want the same expert. Together they take the memory of one, for the backward
    pass computes each again. A capacity bounds their number, too.

    **Arguments:**

    - `experts`: a module that stands for all experts: each of its arrays has a leading dim
        of experts, as from `equinox.filter_vmap` over their keys. Each expert maps a token,
        an array of shape `embed`, to an array of rank 1. Store them split, with the spec
        `P("expert")`.
    - `x`: the tokens. Usually those of one example, under `jax.vmap` over the batch;
        leading dims of batch do the same.
    - `router_logits`: for each token how much it wants each expert, before the softmax.
    - `k`: the number of experts that each token goes to.
    - `capacity`: the capacity factor, or `None` to drop nothing.

    **Returns:**

    A named tuple of `output`, `balance_loss` and `dropped`. The balance loss is
    $E \sum_e f_e P_e$ over the $E$ experts (Switch, equation 4, without its factor), with
    $f_e$ the share of all `k` choices of a group that wants an expert, whether or not it
    is dropped, and $P_e$ the expert's mean probability. (Over several devices there are
    reverse-mode derivatives, and no forward-mode ones.)

    **Raises:**

    `ValueError` if the shapes do not fit each other, tokens or experts do not divide over
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
        rule = eqxshard.by_path({"experts": P("expert")})
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
    most = tokens
    if capacity is not None:
        most = min(tokens, math.ceil(capacity * k * tokens / count))
    per_device = ft.partial(_mixture, k=k, most=most, devices=devices)
    if devices > parts:
        split, whole = PartitionSpec("expert"), PartitionSpec()
        per_device = filter_shard_map(
            per_device, None, split, (split, whole, whole), axis_names={"expert"}
        )
    return Mixture(*per_device(experts, x, router_logits))


class _Routes(NamedTuple):
    """Where a device's tokens go: for each token and choice, an expert and a place."""

    expert: Int[Array, "tokens k"]
    gate: Float[Array, "tokens k"]
    place: Int[Array, "tokens k"]
    """The place in this device's queue for that expert, counted from 0."""
    kept: Bool[Array, "tokens k"]


def _mixture(
    experts: PyTree,
    x: Float[Array, "tokens embed"],
    logits: Float[Array, "tokens experts"],
    k: int,
    most: int,
    devices: int,
) -> tuple[Float[Array, "tokens out"], Float[Array, ""], Float[Array, ""]]:
    """What one of `devices` does, with its part of the experts and of the tokens."""
    tokens, count = logits.shape
    routes, longest, balance_loss, dropped = _route(logits, k, most, devices)
    longest_possible = min(most, tokens)
    room = min(longest_possible, math.ceil(_ROOM * k * tokens / count))

    exchange = _exchange if devices > 1 else lambda rows: rows

    def take_round(number: int | Int[Array, ""]) -> Float[Array, "tokens out"]:
        place = routes.place - number * room
        here = routes.kept & (place >= 0) & (place < room)
        # A place that nobody takes holds a token all the same, and not zeros, where an
        # expert may not be differentiable.
        token = (jnp.arange(count * room, dtype=jnp.int32) % tokens).reshape(count, room)
        token = token.at[routes.expert, jnp.where(here, place, room)].set(
            jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop"
        )
        rows = exchange(x[token].reshape(devices, count // devices, room, -1))
        rows = exchange(_apply(experts, rows)).reshape(count, room, -1)
        rows = _float32_at_least(rows[routes.expert, jnp.clip(place, 0, room - 1)])
        gate = jnp.where(here, routes.gate, 0).astype(rows.dtype)
        return jnp.sum(gate[..., None] * rows, axis=1)

    def take_rest(output: Array) -> Array:
        @jax.checkpoint
        def body(output: Array, number: Int[Array, ""]) -> tuple[Array, None]:
            def more() -> Array:
                return output + take_round(number)

            return lax.cond(longest > number * room, more, lambda: output), None

        numbers = jnp.arange(1, math.ceil(longest_possible / room))
        return lax.scan(body, output, numbers)[0]

    output = take_round(0)
    if room < longest_possible:
        output = lax.cond(longest > room, take_rest, lambda output: output, output)
    return output.astype(x.dtype), balance_loss, dropped


def _route(
    logits: Float[Array, "tokens experts"], k: int, most: int, devices: int
) -> tuple[_Routes, Int[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Choose experts, and keep the first `most` choices of each in the whole group.

    Besides the routes: the longest of all devices' queues, the balance loss, and the
    share that is dropped.
    """
    tokens, count = logits.shape
    probs = jax.nn.softmax(_float32_at_least(logits))
    gate, expert = _top(probs, k)
    if k > 1:
        gate = gate / jnp.sum(gate, axis=1, keepdims=True)

    chosen = jax.nn.one_hot(expert, count, dtype=jnp.int32)
    here = lax.axis_index("expert") if devices > 1 else 0
    # How often each is chosen, by order of choice and device: the order of the queue.
    chosen_by = jnp.zeros((k, devices, count), jnp.int32)
    chosen_by = chosen_by.at[:, here].set(jnp.sum(chosen, axis=0))
    mean_probs = jnp.mean(probs, axis=0) / devices
    if devices > 1:
        chosen_by, mean_probs = lax.psum((chosen_by, mean_probs), "expert")
    queued = chosen_by.reshape(k * devices, count)
    before = (jnp.cumsum(queued, axis=0) - queued).reshape(k, devices, count)
    kept_by = jnp.clip(most - before, 0, chosen_by)
    kept_here = kept_by[:, here]

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
    longest = _largest_of_batch(jnp.max(jnp.sum(kept_by, axis=0)))
    return routes, longest, balance_loss, dropped


def _top(
    probs: Float[Array, "tokens experts"], k: int
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """As `jax.lax.top_k`, for which XLA would gather the rows of the batch."""
    rest, chosen = lax.stop_gradient(probs), []
    for _ in range(k):
        chosen.append(jnp.argmax(rest, axis=1).astype(jnp.int32))
        one_hot = jax.nn.one_hot(chosen[-1], probs.shape[1], dtype=jnp.bool_)
        rest = jnp.where(one_hot, -1, rest)
    expert = jnp.stack(chosen, axis=1)
    return jnp.take_along_axis(probs, expert, axis=1), expert


@custom_vmap
def _largest_of_batch(value: Int[Array, ""]) -> Int[Array, ""]:
    """The largest of all examples that `jax.vmap` runs over.

    What it decides is then one decision for the batch: with one for each example,
    `jax.lax.cond` would compute both sides.
    """
    return value


@_largest_of_batch.def_vmap
def _(axis_size: int, in_batched: Any, value: Int[Array, " batch"]) -> Any:
    return _largest_of_batch(jnp.max(value)), False


@jax.custom_vjp
def _exchange(rows: Float[Array, "devices ..."]) -> Float[Array, "devices ..."]:
    """Send to each device its rows; what arrives is in the order of the senders."""
    return _all_to_all(rows)


# Gradients go back to where the rows came from, which is where the rows went.
_exchange.defvjp(
    lambda rows: (_all_to_all(rows), None), lambda _, grad: (_all_to_all(grad),)
)


@custom_vmap
def _all_to_all(rows: Float[Array, "devices *batch experts room _"]) -> Array:
    """An all-to-all that leaves the rows of the batch on their devices.

    Where a collective is manual along one axis of the mesh only, XLA gathers what is
    split along others. So it is manual along those of the batch, too: that is the
    outermost dim that `jax.vmap` runs over.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.auto_axes)
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def exchange(rows: Array) -> Array:
        return lax.all_to_all(rows, "expert", 0, 0)

    # From JAX 0.11 on, XLA aborts on manual axes inside of manual axes here; what it
    # gathers then costs time, and is right.
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


def _apply(
    experts: PyTree, rows: Float[Array, "devices experts room embed"]
) -> Float[Array, "devices experts room out"]:
    """Every expert to its rows, from all devices."""

    def one(expert: Callable[[Array], Array], rows: Array) -> Array:
        return jax.vmap(jax.vmap(expert))(rows)

    out = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), 1), out_axes=1)(experts, rows)
    if out.ndim != rows.ndim:
        raise ValueError(
            f"an expert makes an array of shape {out.shape[3:]} of a token of shape "
            f"{rows.shape[3:]}; let it return an array of rank 1."
        )
    return out


def _float32_at_least(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def _check(
    experts: PyTree,
    x: Array,
    logits: Array,
    k: int,
    capacity: float | None,
    devices: int,
    parts: int,
) -> None:
    """Of `parts` parts of the tokens and the experts, for `devices` devices."""
    if x.ndim != 2 or logits.ndim != 2 or x.shape[0] != logits.shape[0]:
        raise ValueError(
            f"x has shape {x.shape} and router_logits {logits.shape}; give both a row for "
            "each token, of shapes (tokens, embed) and (tokens, experts)."
        )
    tokens, count = x.shape[0] * parts, logits.shape[1]
    if not 1 <= k <= count:
        raise ValueError(f"k={k} is not from 1 to the {count} experts; choose such a k.")
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(
            f"capacity={capacity} is not a positive factor; use one such as 1.25, or None "
            "to drop nothing."
        )
    for what, size in (("tokens", tokens), ("experts", count)):
        if size % devices:
            above = -(-size // devices) * devices
            raise ValueError(
                f"{size} {what} do not divide over expert={devices}; use a multiple of "
                f"{devices}, such as {above}, or a mesh whose axis expert divides {size}."
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(experts):
        if eqx.is_array(leaf) and leaf.shape[:1] != (count // parts,):
            name = leaf_path(path, "experts")
            raise ValueError(
                f"{name} has shape {leaf.shape}, and router_logits are for {count} "
                f"experts; give each array of the experts a leading dim of "
                f"{count // parts}, as equinox.filter_vmap does over as many keys."
            )
