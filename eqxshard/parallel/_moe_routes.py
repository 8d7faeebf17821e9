"""The routes of tokens to experts, and back; the words are those of `_moe.py`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..transforms._dtypes import at_least_float32


class Routes(NamedTuple):
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

    def in_round(
        self, number: Int[Array, ""], slots: int
    ) -> tuple[Int[Array, "tokens k"], Bool[Array, "tokens k"]]:
        """The slot of each choice in a round of so many, and whether it has one."""
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
    routes = Routes(expert, gate, order + start[choice, expert], kept)

    share = jnp.sum(chosen_by, axis=(0, 1)) / (k * tokens * devices)
    balance_loss = count * jnp.sum(share.astype(mean_probs.dtype) * mean_probs)
    dropped = 1 - jnp.sum(kept_by) / (k * tokens * devices)
    longest = jnp.max(jnp.sum(kept_by, axis=0))
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
