"""`Precision`: the types that parameters are stored and computed with."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._errors import UsageError, UsageTypeError
from ..sharding._batch_weights import LOSS_WEIGHT, WEIGHT
from ..sharding._leaves import is_array, leaf_path
from ..sharding._text import did_you_mean, first_few

#: Weights are summed, which needs float32.
_WEIGHTS = tuple(f"batch.{name}" for name in (WEIGHT, LOSS_WEIGHT))


@dataclass(frozen=True)
class Precision:
    """Mixed precision: store parameters in one type, compute with them in another.

    The step casts the model and the batch before the loss function sees them, and casts
    gradients back before anything uses them: they are accumulated, clipped and given to
    the optimizer in the type of the parameters. Means of losses and metrics are taken in
    float32. (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.)

    Before that, the gradients of a batch are summed over devices in their own type, as XLA
    has it: in 16 bits, if they are computed so. The error of a sum in bfloat16 grows with
    the number of devices. For random gradients it is 1.4 % at 128 devices and 2.7 % at 512,
    where the rounding of the gradients of one device is 0.17 %. Microbatches (`accumulate=`
    of [`eqxshard.make_train_step`][]) are summed in the type of the parameters, float32 by
    default.

    With `compute=jnp.float16` the loss is scaled so that gradients do not underflow: the
    scale doubles after a number of finite steps in a row, and halves after a step that is
    not finite, which is skipped.

    - `compute`: the type of the model, and of the batch's floating-point entries other
        than `"__weight__"` and `"__loss_weight__"`, inside the loss function; `None` to
        leave each as it is, such as a frozen base in bfloat16 beside trained parameters in
        float32.
    - `compute_except`: regular expressions. Arrays in whose paths one is found are left in
        their own type, gathered in it, and their gradients summed in it: those of the model
        (`rotary.table`, as [`eqxshard.explain`][] prints them), the batch (`batch.time`)
        and `extra` (`extra.scale`). Name times, positions and ids here, which bfloat16
        rounds beyond 256.
    - `params`: the type of trained parameters between steps, and so of gradients and
        optimizer state. Frozen arrays keep their own.
    - `initial_scale`, `scale_every`: the initial loss scale of float16, and the number of
        finite steps after which it doubles.

    **Raises:**

    `ValueError` if a type is not floating-point, a number is less than 1, or a text of
    `compute_except` is not a regular expression; `TypeError` if that is a single text.

    !!! Example

        ```python
        precision = eqxshard.Precision(compute=jnp.bfloat16)
        state = eqxshard.init_state(..., precision=precision)
        train_step = eqxshard.make_train_step(loss_fn, optim)
        ```
    """

    compute: DTypeLike | None = jnp.bfloat16
    params: DTypeLike = jnp.float32
    initial_scale: float = 2.0**15
    scale_every: int = 2000
    compute_except: Sequence[str] = ()

    def __post_init__(self):
        for name, dtype in (("compute", self.compute), ("params", self.params)):
            if name == "compute" and dtype is None:
                continue
            # To NumPy, None is float64.
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise UsageError(
                    f"Precision({name}={dtype!r}) is not a floating-point type; use one "
                    "such as jnp.bfloat16."
                )
        object.__setattr__(self, "compute_except", _patterns(self.compute_except))
        if self.initial_scale < 1 or self.scale_every < 1:
            raise UsageError(
                f"Precision(initial_scale={self.initial_scale}, scale_every="
                f"{self.scale_every}) must be at least 1 each."
            )

    @property
    def scales_loss(self) -> bool:
        """True if gradients would underflow without a loss scale."""
        return self.computes_in(jnp.float16)

    def compute_type(self, path: str) -> DTypeLike | None:
        """The type to compute with an array in; `None` for its own.

        **Arguments:**

        - `path`: `model.layers.0.weight`, `batch.time` or `extra.scale`.
        """
        name = _name(path)
        is_named = any(re.search(pattern, name) for pattern in self.compute_except)
        return None if is_named or path in _WEIGHTS else self.compute

    def cast(self, tree: PyTree, root: str) -> PyTree:
        """Cast the floating-point arrays of the `model`, or of the `batch`, for use."""

        def one(path: tuple[Any, ...], leaf: Any) -> Any:
            return cast(leaf, self.compute_type(leaf_path(path, root)))

        return jax.tree_util.tree_map_with_path(one, tree)

    def computes_in(self, dtype: DTypeLike) -> bool:
        """True if this is the type to compute in."""
        return self.compute is not None and jnp.dtype(self.compute) == dtype


def _patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """The regular expressions of `compute_except`, as a tuple; refuses other things."""
    if isinstance(patterns, str):
        raise UsageTypeError(
            f"Precision(compute_except={patterns!r}) is a text; give a tuple of regular "
            "expressions."
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(
                f"Precision(compute_except=...): {pattern!r} is not a regular expression "
                f"({error}); escape its special characters with a backslash."
            ) from None
    return tuple(patterns)


def _name(path: str) -> str:
    """A path such as `model.layers.0.weight`, as `explain` prints it."""
    return path.removeprefix("model.")


def check_patterns(patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Refuse a pattern of `compute_except` that matches no path: it may be misspelt."""
    names = [*map(_name, paths)]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise UsageError(
                f"Precision(compute_except=...): {pattern!r} matches no parameter or entry "
                f"of the batch; {did_you_mean(pattern, names)}the paths are "
                f"{first_few(names)}."
            )


class LossScale(eqx.Module):
    """The factor on the loss, and the number of finite steps since it changed."""

    scale: Float[Array, ""]
    steps: Int[Array, ""]

    @staticmethod
    def init(precision: Precision) -> "LossScale":
        """The scale before the first step."""
        scale = jnp.asarray(precision.initial_scale, jnp.float32)
        return LossScale(scale, jnp.zeros((), jnp.int32))

    def after(self, finite: Bool[Array, ""], precision: Precision) -> "LossScale":
        """The scale after a step, given whether it was finite."""
        steps = jnp.where(finite, self.steps + 1, 0)
        doubles = steps == precision.scale_every
        # Bounded below by 1, as steps that no scale can help would bring it to 0, and
        # above, as infinity never comes down.
        smaller = jnp.maximum(self.scale / 2, 1)
        larger = jnp.minimum(self.scale * 2, 2.0**24)
        scale = jnp.where(finite, jnp.where(doubles, larger, self.scale), smaller)
        return LossScale(scale, jnp.where(doubles, 0, steps))


def cast(tree: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Cast the floating-point arrays of a PyTree; `None` leaves them as they are."""
    if dtype is None:
        return tree

    def one(leaf: Any) -> Any:
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.astype(dtype)
        return leaf

    return jax.tree.map(one, tree)
