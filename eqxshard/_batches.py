"""Batches for several steps in one dispatch: stacked, or as rows of what is on devices."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from .mesh import batch_sharding
from .sharding import filter_shard

_Carry = TypeVar("_Carry")

#: What a step is called with: a batch, several stacked, or rows.
Kind = Literal["one", "stacked", "device"]


class DeviceBatches(eqx.Module):
    """Batches that a step gathers for itself, from a dataset that is on its devices.

    [`eqxshard.Loader.stacked`][] makes these, for `train_step.many` and `eval_step.many`.
    `examples` is the dataset, whole on each device; `rows` says which of them each step
    takes, and `weight`, if the loader pads, which of these count. Steps from `count` on
    are not taken.
    """

    examples: dict[str, Array]
    rows: Int[Array, "steps batch"]
    weight: Float[Array, "steps batch"] | None
    count: Int[np.ndarray | Array, ""]

    def batch(self, step: Int[Array, ""], mesh: Mesh) -> dict[str, Array]:
        """The batch of one of the steps."""
        rows = self.rows[step]
        batch = {name: jnp.take(x, rows, axis=0) for name, x in self.examples.items()}
        if self.weight is not None:
            weight = self.weight[step]
            if "weight" in batch:
                # Where there is padding, whatever the weight of the row in its place.
                weight = jnp.where(weight == 0, weight, batch["weight"])
            batch["weight"] = weight
        return filter_shard(batch, batch_sharding(mesh))


def kind_of(batches: PyTree) -> Kind:
    """Which kind of several batches these are."""
    return "device" if isinstance(batches, DeviceBatches) else "stacked"


def batch_place(mesh: Mesh, kind: Kind) -> NamedSharding | None:
    """Where a step's batches are to lie; `None`: where they are."""
    return None if kind == "device" else batch_sharding(mesh, stacked=kind == "stacked")


def scan_batches(
    step: Callable[[_Carry, PyTree], tuple[_Carry, PyTree]],
    carry: _Carry,
    batches: PyTree,
    mesh: Mesh,
) -> tuple[_Carry, Any]:
    """`jax.lax.scan` over batches, of either kind."""
    if not isinstance(batches, DeviceBatches):
        return jax.lax.scan(step, carry, batches)
    room = batches.rows.shape[0]
    out = jax.eval_shape(lambda c: step(c, batches.batch(jnp.int32(0), mesh))[1], carry)
    # A loop of as many turns as there are steps to take, so that any number up to what
    # there is room for shares one compiled program.
    zeros = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape), leaf.dtype), out)

    def body(loop: tuple[Array, _Carry, PyTree]) -> tuple[Array, _Carry, PyTree]:
        index, carry, outs = loop
        carry, out = step(carry, batches.batch(index, mesh))
        outs = jax.tree.map(lambda all, one: all.at[index].set(one), outs, out)
        return index + 1, carry, outs

    start = jnp.int32(0), carry, zeros
    _, carry, outs = jax.lax.while_loop(lambda loop: loop[0] < batches.count, body, start)
    return carry, outs
