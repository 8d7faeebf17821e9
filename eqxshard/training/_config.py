"""The settings of a train step."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..sharding._rule import Rule
from ._precision import Precision

Nonfinite = Literal["skip", "raise", "ignore"]


def check_optim(optim: Any) -> None:
    """Raise `TypeError` unless this is an optax optimizer."""
    if not (hasattr(optim, "init") and hasattr(optim, "update")):
        name = getattr(optim, "__name__", type(optim).__name__)
        remedy = f"call it, as {name}(1e-3)" if callable(optim) else "use optax.adamw(1e-3)"
        raise TypeError(f"optim={name} is not an optax optimizer; {remedy}.")


def takes_value(optim: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update may be given the value of the loss."""
    parameters = inspect.signature(optim.update).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return anything or "value" in parameters


@dataclass(frozen=True)
class StepConfig:
    """The arguments of [`eqxshard.make_train_step`][], checked."""

    loss_fn: Callable[[Any, Any, Any], Any]
    optim: optax.GradientTransformationExtraArgs
    mesh: Mesh
    rule: Rule
    trainable: PyTree
    accumulate: int
    precision: Precision | None
    nonfinite: Nonfinite

    def __post_init__(self):
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate} must be at least 1.")
        if self.nonfinite not in ("skip", "raise", "ignore"):
            raise ValueError(
                f"nonfinite={self.nonfinite!r} is not 'skip', 'raise' or 'ignore'."
            )
        scales_loss = self.precision is not None and self.precision.scales_loss
        if scales_loss and self.nonfinite != "skip":
            raise ValueError(
                "float16 finds its loss scale by steps that are not finite, and "
                f"nonfinite={self.nonfinite!r} does not skip them; use 'skip', or "
                "bfloat16."
            )
