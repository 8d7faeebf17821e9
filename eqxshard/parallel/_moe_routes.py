"""The routes of tokens to experts, and the devices that they lead to.

The words are those of `_moe.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..sharding._placement import constrain
from ..transforms._dtypes import at_least_float32
from ..transforms._shard_map import filter_shard_map


class Routes(NamedTuple):
    """The routes of a device's tokens: for each token and choice,

    - `expert`: the index of the expert;
    - `gate`: the weight of the expert in the output;
    - `position`: the position in this device's queue for the expert, from 0;
    - `kept`: whether it is in the queue at all.
    """

    expert: Int[Array, "tokens k"]
    gate: Float[Array, "tokens k"]
    position: Int[Array, "tokens k"]
    kept: Bool[Array, "tokens k"]

    def in_round(
        self, number: Int[Array, ""], slots: int
    ) -> tuple[Int[Array, "tokens k"], Bool[Array, "tokens k"]]:
        """The slot of each choice in a round with `slots` per expert, if it has one there.

        Returns the slots, and which choices have one.
        """
        slot = self.position - number * slots
        return slot, self.kept & (slot >= 0) & (slot < slots)


def route(
    logits: Float[Array, "tokens experts"], k: int, limit: int, devices: int
) -> tuple[Routes, Int[Array, ""], Float[Array, ""], Float[Array, ""]]:
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
    # How often each expert is chosen, by choice and then by device: in the order of
    # precedence.
    chosen_by = jnp.zeros((k, devices, count), jnp.int32)
    chosen_by = chosen_by.at[:, device].set(jnp.sum(chosen, axis=0, dtype=jnp.int32))
    mean_probs = jnp.mean(probs, axis=0) / devices
    if devices > 1:
        chosen_by, mean_probs = lax.psum((chosen_by, mean_probs), "expert")
    in_order = chosen_by.reshape(k * devices, count)
    before = (_cumsum(in_order) - in_order).reshape(k, devices, count)
    kept_by = jnp.clip(limit - before, 0, chosen_by)
    kept_here = kept_by[:, device]

    # In a device's own queue, too, first choices come before second choices.
    earlier = _cumsum(chosen) - chosen
    order = jnp.take_along_axis(earlier, expert[..., None], axis=2)[..., 0]
    choice = jnp.arange(k)[None]
    start = _cumsum(kept_here) - kept_here
    kept = order < kept_here[choice, expert]
    routes = Routes(expert, gate, order + start[choice, expert], kept)

    share = jnp.sum(chosen_by, axis=(0, 1)) / (k * tokens * devices)
    balance_loss = count * jnp.sum(share.astype(mean_probs.dtype) * mean_probs)
    dropped = (1 - jnp.sum(kept_by) / (k * tokens * devices)).astype(mean_probs.dtype)
    longest = jnp.max(jnp.sum(kept_by, axis=0, dtype=jnp.int32))
    return routes, longest, balance_loss, dropped


def _cumsum(counts: Int[Array, "rows ..."]) -> Int[Array, "rows ..."]:
    # By default, the sum would have 64 bits under `jax_enable_x64`.
    return jnp.cumsum(counts, axis=0, dtype=counts.dtype)


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


class Devices(NamedTuple):
    """The devices along the axis `expert`, and how code runs on them.

    - `size`: the number of devices.
    - `parts`: into how many parts the arrays that the code sees are split already: `size`
        in code that is per device, otherwise 1.
    - `batch_axes`: the axes that split the batch, if the code is per device along them.
    """

    size: int
    parts: int
    batch_axes: tuple[str, ...]

    def run(
        self,
        fn: Callable[..., Any],
        in_specs: tuple[P, ...],
        out_specs: PyTree,
        *args: PyTree,
    ) -> Any:
        """Call a function per device, on arguments that are split by `in_specs`."""
        if self.size > self.parts:
            fn = filter_shard_map(fn, None, in_specs, out_specs, axis_names={"expert"})
        return fn(*args)

    def constrain(self, tree: PyTree) -> PyTree:
        """Keep arrays, and so their gradients, split over the devices.

        For what goes into a branch of `jax.lax.cond` in a loop: XLA would gather its
        gradient there, which is zero in the other branch.
        """

        def split(leaf: Any) -> Any:
            if not eqx.is_array(leaf):
                return leaf
            return constrain(leaf, P("expert", *[P.UNCONSTRAINED] * (leaf.ndim - 1)))

        return jax.tree.map(split, tree) if self.size > self.parts else tree

    def exchange(self, rows: Array, split: int, whole: int) -> Array:
        """Split rows over the devices along the dim `split`, and no longer along `whole`.

        XLA turns the constraint into an all-to-all, and leaves the examples of the batch on
        their devices. It would gather them for an all-to-all in code that is per device
        along `expert` but not along the axes of the batch.
        """
        if self.size == 1:
            return rows
        if self.size == self.parts:
            return lax.all_to_all(rows, "expert", split, whole)
        spec: list[Any] = [P.UNCONSTRAINED] * rows.ndim
        spec[split], spec[whole] = "expert", None
        return constrain(rows, P(*spec))

    def longest(self, queue: Int[Array, ""]) -> Int[Array, ""]:
        """The length of the longest queue, over all examples of the batch."""
        queue = _max_over_batch(queue)
        return lax.pmax(queue, self.batch_axes) if self.batch_axes else queue


@custom_vmap
def _max_over_batch(value: Int[Array, ""]) -> Int[Array, ""]:
    """The maximum over all examples that `jax.vmap` runs over.

    With it, `jax.lax.cond` has one condition for the whole batch. With a condition for each
    example, both branches would be computed.
    """
    return value


@_max_over_batch.def_vmap
def _(axis_size: int, in_batched: Any, value: Int[Array, " batch"]) -> Any:
    return _max_over_batch(jnp.max(value)), False
