"""`Precision`: the types that parameters are kept in and computed with."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from .sharding import is_array


@dataclass(frozen=True)
class Precision:
    """Mixed precision: parameters are kept in one type and computed with in another.

    The step casts the model and the batch before the loss function sees them, and the
    gradients back before anything is done with them: gradients over several parts of a
    batch are added up, clipped and given to the optimizer in the type of the parameters.
    Means of losses and metrics are taken in float32, so that there is no type of outputs to
    choose. (Micikevicius et al. 2018,
    https://arxiv.org/abs/1710.03740.)

    With `compute=jnp.float16` the loss is scaled so that gradients do not vanish: the
    scale doubles after some steps in a row were finite and halves after one that was not,
    which is skipped.

    - `compute`: of the model, and of the batch's floating-point entries but its
        `"weight"`, inside the loss function.
    - `params`: of the parameters between steps, and so of gradients and optimizer state.
    - `initial_scale`, `scale_every`: where the scale of float16 starts, and after how many
        finite steps it doubles.

    !!! Example

        ```python
        precision = eqxshard.Precision(compute=jnp.bfloat16)
        state = eqxshard.init_state(..., precision=precision)
        train_step = eqxshard.make_train_step(..., precision=precision)
        ```
    """

    compute: DTypeLike = jnp.bfloat16
    params: DTypeLike = jnp.float32
    initial_scale: float = 2.0**15
    scale_every: int = 2000

    def __post_init__(self):
        for name, dtype in (("compute", self.compute), ("params", self.params)):
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"Precision({name}={dtype!r}) is no floating-point type; use one such "
                    "as jnp.bfloat16."
                )
        if self.initial_scale < 1 or self.scale_every < 1:
            raise ValueError(
                f"Precision(initial_scale={self.initial_scale}, scale_every="
                f"{self.scale_every}) does not scale; use numbers of 1 or more."
            )

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would vanish if the loss were not scaled."""
        return jnp.dtype(self.compute) == jnp.float16


class LossScale(eqx.Module):
    """What the loss is multiplied by, and since how many finite steps."""

    scale: Float[Array, ""]
    steps: Int[Array, ""]

    @staticmethod
    def init(precision: Precision) -> "LossScale":
        """Before the first step."""
        scale = jnp.asarray(precision.initial_scale, jnp.float32)
        return LossScale(scale, jnp.zeros((), jnp.int32))

    def after(self, finite: Bool[Array, ""], precision: Precision) -> "LossScale":
        """After a step that was finite, or was not."""
        steps = jnp.where(finite, self.steps + 1, 0)
        doubles = steps == precision.scale_every
        # No less than 1, or a run of steps that no scale can help would make it 0; and
        # no infinity, from which there is no way back.
        smaller = jnp.maximum(self.scale / 2, 1)
        larger = jnp.minimum(self.scale * 2, 2.0**24)
        scale = jnp.where(finite, jnp.where(doubles, larger, self.scale), smaller)
        return LossScale(scale, jnp.where(doubles, 0, steps))


def widen(x: Array) -> Array:
    """In float32, unless it is as precise already."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Cast the floating-point arrays of a PyTree."""

    def one(leaf: Any) -> Any:
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.astype(dtype)
        return leaf

    return jax.tree.map(one, tree)
