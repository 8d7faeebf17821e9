"""The settings of a train step."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._errors import UsageError
from ..sharding._mesh import check_mesh
from ..sharding._rule import Rule
from ._inputs import mesh_of
from ._precision import Precision
from ._state import TrainState, flatten_state

Nonfinite = Literal["skip", "raise", "ignore"]


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
            raise UsageError(f"accumulate={self.accumulate} must be at least 1.")
        if self.nonfinite not in ("skip", "raise", "ignore"):
            raise UsageError(
                f"nonfinite={self.nonfinite!r} is not 'skip', 'raise' or 'ignore'."
            )
        scales_loss = self.precision is not None and self.precision.scales_loss
        if scales_loss and self.nonfinite != "skip":
            raise UsageError(
                "float16 finds its loss scale by steps that are not finite, and "
                f"nonfinite={self.nonfinite!r} does not skip them; use 'skip', or "
                "bfloat16."
            )

    def following(self, state: TrainState) -> "StepConfig":
        """These settings; in place of those that were not given, the state's."""
        made = state.made_with
        if self.rule is None and made is None:
            raise UsageError(
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
