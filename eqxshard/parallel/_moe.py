"""A mixture of experts: tokens travel to the devices of their experts, and back.

Glossary:

- a *choice* is one of a token's `k` experts, counted from the most probable;
- a device's *queue* for an expert holds those of its choices that the expert keeps;
- a *round* of the exchange has a number of *slots* per expert, which are filled by the next
  choices in the queue.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from .._errors import UsageError
from ..sharding._explicit import on_auto_axes
from ..sharding._leaves import array_leaves
from ..sharding._mesh import automatic_axes, batch_axes
from ..sharding._text import nearest_multiples
from ..transforms._dtypes import at_least_float32
from ..transforms._shard_map import filter_shard_map
from ._moe_routes import Devices, Routes, route
from ._pipeline import copy_along, local_copy

#: The slots of a round, as a multiple of an even load. Longer queues take further rounds,
#: which are more common with fewer slots. With more slots, more is sent and computed in
#: vain.
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


@on_auto_axes(like="x")
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
    step's. Without one, or with `expert=1`, no tokens are sent. In per-device code along
    `expert` this takes and returns the device's own parts.

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
    - `x`: the tokens of a batch, or those of one example under `jax.vmap` over the batch.
        The results are the same; but under `jax.vmap`, where the mesh splits the batch, the
        compiler for GPUs gathers tokens for further rounds, which [`eqxshard.lint`][]
        finds.
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
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape.get("expert", 1)
    parts = size if "expert" in mesh.manual_axes else 1
    _check(experts, x, router_logits, k, capacity, size, parts)
    tokens, count = x.shape[-2] * parts, router_logits.shape[-1]
    # No token chooses an expert twice.
    limit = tokens
    if capacity is not None:
        limit = min(tokens, math.ceil(capacity * k * tokens / count))

    def mix(experts: PyTree, x: Array, logits: Array, devices: Devices) -> Mixture:
        def mix_one(x: Array, logits: Array) -> Mixture:
            return _mixture(experts, x, logits, devices, k, limit)

        for _ in range(x.ndim - 2):
            mix_one = jax.vmap(mix_one)
        return mix_one(x, logits)

    axes = automatic_axes(batch_axes(mesh), len(x)) if x.ndim > 2 and parts == 1 else ()
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    if not axes:
        return mix(experts, x, router_logits, Devices(size, parts, ()))

    # Left to itself, the compiler for GPUs gathers the tokens of a batch for the branch
    # that takes further rounds.
    # Gradients of experts are summed over the batch once, and not in every round. On CPUs,
    # that is outside the per-device code: XLA crashes if code that is per device along
    # only some axes sums bfloat16.
    device = mesh.abstract_device
    on_cpus = device is not None and device.platform == "cpu"

    def per_device(experts: PyTree, x: Array, logits: Array) -> tuple[Array, ...]:
        if on_cpus:
            experts = local_copy(experts)
        else:
            arrays, static = eqx.partition(experts, eqx.is_array)
            experts = eqx.combine(lax.pcast(arrays, axes, to="varying"), static)
        return tuple(mix(experts, x, logits, Devices(size, size, axes)))

    expert = "expert" if size > 1 else None
    rows, batch = P(axes, *[None] * (x.ndim - 3), expert), P(axes)
    fn = filter_shard_map(
        per_device,
        None,
        (P(axes, expert) if on_cpus else P(expert), rows, rows),
        (rows, batch, batch),
        axis_names={*axes, "expert"} if expert else {*axes},
    )
    experts = copy_along(axes, experts) if on_cpus else experts
    return Mixture(*fn(experts, x, router_logits))


def _mixture(
    experts: PyTree,
    x: Float[Array, "tokens embed"],
    logits: Float[Array, "tokens experts"],
    devices: Devices,
    k: int,
    limit: int,
) -> Mixture:
    """The mixture for one example, in per-device code except for the exchanges."""
    own, others, whole = P("expert"), P(None, "expert"), P()
    find_routes = ft.partial(route, k=k, limit=limit, devices=devices.size)
    routes, longest, balance_loss, dropped = devices.run(
        find_routes, (own,), (own, whole, whole, whole), logits
    )
    longest = devices.longest(longest)
    tokens, count = x.shape[0] * devices.parts // devices.size, logits.shape[1]
    longest_possible = min(limit, tokens)
    slots = math.ceil(_SLOTS_PER_EVEN_LOAD * k * tokens / count)
    slots = min(longest_possible, slots)
    sizes = devices.size, count // devices.size, slots
    send = ft.partial(_send, sizes=sizes)

    def run_round(given: PyTree, number: Int[Array, ""]) -> Float[Array, "tokens out"]:
        experts, routes, x = given
        rows = devices.run(send, (own, own, whole), own, routes, x, number)
        rows = devices.exchange(rows, split=1, whole=0)
        rows = devices.run(_apply_experts, (own, others), others, experts, rows)
        rows = devices.exchange(rows, split=0, whole=1)
        return devices.run(_receive, (own, own, whole), own, routes, rows, number)

    def run_further_rounds(output: Array) -> Array:
        @jax.checkpoint
        def body(output: Array, number: Int[Array, ""]) -> tuple[Array, None]:
            given = devices.constrain((experts, routes, x))

            def add_round() -> Array:
                return output + run_round(given, number)

            return lax.cond(longest > number * slots, add_round, lambda: output), None

        numbers = jnp.arange(1, math.ceil(longest_possible / slots), dtype=jnp.int32)
        return lax.scan(body, output, numbers)[0]

    output = run_round((experts, routes, x), jnp.zeros((), jnp.int32))
    if slots < longest_possible:
        output = lax.cond(longest > slots, run_further_rounds, lambda out: out, output)
    return Mixture(output.astype(x.dtype), balance_loss, dropped)


def _send(
    routes: Routes,
    x: Float[Array, "tokens embed"],
    number: Int[Array, ""],
    sizes: tuple[int, int, int],
) -> Float[Array, "1 devices experts slots embed"]:
    """A device's rows for the experts of every device, in one round."""
    tokens, (devices, experts, slots) = len(x), sizes
    slot, in_round = routes.in_round(number, slots)
    # Unused slots hold some token, not zeros: an expert may not be differentiable at zero.
    token = jnp.arange(devices * experts * slots, dtype=jnp.int32) % tokens
    token = token.reshape(devices * experts, slots)
    token = token.at[routes.expert, jnp.where(in_round, slot, slots)].set(
        jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop"
    )
    return x[token].reshape(1, *sizes, -1)


def _apply_experts(
    experts: PyTree, rows: Float[Array, "devices 1 experts slots embed"]
) -> Float[Array, "devices 1 experts slots out"]:
    """Apply every expert of a device to its rows, from all devices."""

    def apply(expert: Callable[[Array], Array], rows: Array) -> Array:
        return jax.vmap(jax.vmap(jax.vmap(expert)))(rows)

    out = eqx.filter_vmap(apply, in_axes=(eqx.if_array(0), 2), out_axes=2)(experts, rows)
    if out.ndim != rows.ndim:
        raise UsageError(
            f"an expert returns an array of shape {out.shape[4:]} for a token of shape "
            f"{rows.shape[4:]}; have it return an array of rank 1."
        )
    return out


def _receive(
    routes: Routes,
    rows: Float[Array, "1 devices experts slots out"],
    number: Int[Array, ""],
) -> Float[Array, "tokens out"]:
    """The sum of the experts' outputs in one round, for each token of a device."""
    slots = rows.shape[3]
    slot, in_round = routes.in_round(number, slots)
    rows = rows.reshape(-1, slots, rows.shape[4])
    rows = at_least_float32(rows[routes.expert, jnp.clip(slot, 0, slots - 1)])
    gate = jnp.where(in_round, routes.gate, 0).astype(rows.dtype)
    return jnp.sum(gate[..., None] * rows, axis=1)


def _check(
    experts: PyTree,
    x: Array,
    logits: Array,
    k: int,
    capacity: float | None,
    devices: int,
    parts: int,
) -> None:
    """Check the arguments, which may be one of `parts` parts, for a number of devices."""
    if x.ndim < 2 or logits.ndim != x.ndim or x.shape[:-1] != logits.shape[:-1]:
        raise UsageError(
            f"x has shape {x.shape} and router_logits {logits.shape}; give both a row for "
            "each token, with shapes (tokens, embed) and (tokens, experts)."
        )
    tokens, count = x.shape[-2] * parts, logits.shape[-1]
    if not 1 <= k <= count or (capacity is not None and not 0 < capacity < math.inf):
        raise UsageError(
            f"k={k} and capacity={capacity} do not suit {count} experts; give k from 1 to "
            f"{count}, and a positive capacity such as 1.25, or None to drop nothing."
        )
    for name, size in (("tokens", tokens), ("experts", count)):
        if size % devices:
            raise UsageError(
                f"{size} {name} do not divide over expert={devices}; use a multiple of "
                f"{devices}, such as {nearest_multiples(size, devices)}, or a mesh whose "
                f"axis expert divides {size}."
            )
    for path, leaf in array_leaves(experts, "experts"):
        if leaf.shape[:1] != (count // parts,):
            raise UsageError(
                f"{path} has shape {leaf.shape}, but router_logits are for {count} "
                f"experts; give each array of the experts a leading dim of "
                f"{count // parts}, as equinox.filter_vmap does over that many keys."
            )
