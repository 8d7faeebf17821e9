"""The settings of a train step."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..data._weights import LOSS_WEIGHT
from ..sharding._mesh import check_mesh
from ..sharding._rule import Rule
from ._precision import Precision
from ._state import TrainState

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


def mesh_of(
    arrays: Iterable[Any],
    given: Mesh | None,
    what: str,
    more: str = ", or give the step mesh= and rule=",
) -> Mesh:
    """The mesh that was given, or else the one that arrays are on."""
    if given is not None:
        return given
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    raise ValueError(
        f"the arrays of this {what} are not on a mesh; place them with filter_shard{more}."
    )


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
    grad_norms: bool | Mapping[str, str]
    #: The scalars that a warning has named.
    _warned: set[str] = dataclasses.field(default_factory=set)

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

    def warn_of_scalars(self, names: Iterable[str]) -> None:
        """Say once which results the step takes the mean of over microbatches."""
        new = sorted({*names} - self._warned)
        if new:
            self._warned.update(new)
            warnings.warn(
                f"{', '.join(new)}: one number for a batch, of which accumulate="
                f"{self.accumulate} takes the mean over microbatches. That is the number "
                "for the whole batch only if it is a plain mean over examples; otherwise, "
                "such as for a mean over tokens, return one value per example, and what "
                f"each counts in the batch's {LOSS_WEIGHT!r}.",
                stacklevel=2,
            )

    def of(self, state: TrainState, arrays: Iterable[Any]) -> "ResolvedConfig":
        """The settings for a state, whose own stand in for those that were not given."""
        made, rule, trainable = state.made_with, self.rule, self.trainable
        if rule is None and made is None:
            raise ValueError(
                "this TrainState was not made by init_state; give make_train_step rule=."
            )
        if trainable is None:
            trainable = True if made is None else made.trainable(state.model)
        given = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        followed = {
            "mesh": mesh_of(arrays, self.mesh, "TrainState"),
            "rule": rule or (made and made.rule),
            "trainable": trainable,
            "precision": self.precision or (made and made.precision),
        }
        return ResolvedConfig(**(given | followed))


@dataclasses.dataclass(frozen=True)
class ResolvedConfig(StepConfig):
    """The settings of a step for one state: nothing is left open."""

    mesh: Mesh
    rule: Rule
