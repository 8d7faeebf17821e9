"""The settings of a train step."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..data._weights import LOSS_WEIGHT
from ..sharding._mesh import check_mesh
from ..sharding._rule import Rule
from ._precision import Precision
from ._signature import mesh_of
from ._state import TrainState, flatten_state

Nonfinite = Literal["skip", "raise", "ignore"]


def is_optimizer(given: Any) -> bool:
    """Whether this is an optax optimizer."""
    return hasattr(given, "init") and hasattr(given, "update")


def check_optim(optim: Any) -> None:
    """Raise `TypeError` unless this is an optax optimizer."""
    if not is_optimizer(optim):
        name = getattr(optim, "__name__", type(optim).__name__)
        remedy = f"call it, as {name}(1e-3)" if callable(optim) else "use optax.adamw(1e-3)"
        raise TypeError(f"optim={name} is not an optax optimizer; {remedy}.")


def takes_value(optim: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update may be given the value of the loss."""
    parameters = inspect.signature(optim.update).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return anything or "value" in parameters


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The arguments of [`eqxshard.make_train_step`][], checked.

    `mesh`, `rule`, `trainable` and `precision` are `None` to follow the state.
    """

    loss_fn: Callable[..., Any]
    optim: optax.GradientTransformationExtraArgs
    mesh: Mesh | None
    rule: Rule | None
    trainable: PyTree
    accumulate: int
    precision: Precision | None
    nonfinite: Nonfinite
    grad_norms: bool

    def __post_init__(self):
        if self.mesh is not None:
            check_mesh(self.mesh)
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

    def following(self, state: TrainState) -> "StepConfig":
        """These settings; in place of those that were not given, the state's."""
        made = state.made_with
        if self.rule is None and made is None:
            raise ValueError(
                "this TrainState was not made by init_state; give make_train_step rule=."
            )
        trainable = self.trainable
        if trainable is None:
            trainable = True if made is None else made.trainable(state.model)
        remedy = ", or give the step mesh= and rule="
        return dataclasses.replace(
            self,
            mesh=self.mesh or mesh_of(flatten_state(state)[0], "TrainState", remedy),
            rule=self.rule or (made and made.rule),
            trainable=trainable,
            precision=self.precision or (made and made.precision),
        )

    def warn_of_scalars(self, names: Iterable[str]) -> None:
        """Say of which results the step takes the mean over microbatches."""
        names = sorted(names)
        if names and self.accumulate > 1:
            warnings.warn(
                f"{', '.join(names)}: one number for a batch, of which accumulate="
                f"{self.accumulate} takes the mean over microbatches. That is the number "
                "for the whole batch only if it is a plain mean over examples; otherwise, "
                "such as for a mean over tokens, return one value per example, and what "
                f"each counts in the batch's {LOSS_WEIGHT!r}.",
                stacklevel=2,
            )
