"""What a user sees of a mistake: a note on the batch it was with, a short traceback."""

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import ON_PURPOSE
from ..compiled._causes import is_ours, is_users
from ..sharding._leaves import array_leaves, format_array, is_array
from ..sharding._text import comma_list, did_you_mean

#: Packages that call what a user wrote, or check its types.
_BETWEEN = ("eqxshard", "jax", "jaxlib", "equinox", "jaxtyping", "beartype")
#: Words of errors that one dim too many can cause.
_OF_SHAPES = re.compile("(?i)shape|dim|rank|axis|axes|size|broadcast")


@contextlib.contextmanager
def short_traceback() -> Iterator[None]:
    """Leave this library's frames out of the traceback of a user's mistake.

    From where the `with` statement is, it goes on in the user's code that failed; or where
    this library raised on purpose. Other errors may be bugs of ours, and keep all frames,
    as does every error under `JAX_TRACEBACK_FILTERING=off`, which is for JAX's frames, too.
    """
    try:
        yield
    except Exception as error:
        # The first is here, the second is that of the `with` statement.
        _, *steps = traceback_steps(error)
        # An assertion of ours that fails is a bug, and a `raise` too.
        if not isinstance(error, AssertionError):
            _shorten(error, steps)
        raise


def shorten_traceback(error: Exception) -> None:
    """As `short_traceback`, where an error was caught that is raised again."""
    _shorten(error, [*traceback_steps(error)])


def _shorten(error: Exception, steps: Sequence[TracebackType]) -> None:
    if jax.config.values["jax_traceback_filtering"] == "off":
        return
    start, *inner = steps
    if any(is_users(step.tb_frame.f_code.co_filename) for step in inner):
        # A library of the user's may be between, and calls what failed.
        start.tb_next = next(step for step in inner if not _is_between(step))
    elif inner and isinstance(error, ON_PURPOSE):
        start.tb_next = inner[-1]
    # What JAX caught inside of itself says nothing to its user.
    cause = error.__cause__
    steps = [] if cause is None else [*traceback_steps(cause)]
    files = [step.tb_frame.f_code.co_filename for step in steps]
    if files and not any(is_ours(file) or is_users(file) for file in files):
        error.__cause__ = None


def _is_between(step: TracebackType) -> bool:
    """Whether a frame is of what calls a user's function: ours, or JAX's."""
    if is_users(step.tb_frame.f_code.co_filename):
        return False
    name = step.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return name in _BETWEEN or name in sys.stdlib_module_names


def traceback_steps(error: BaseException) -> Iterator[TracebackType]:
    """The steps of a traceback, the innermost last."""
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def add_advice(error: Exception, batch: PyTree, *, stateful: bool) -> None:
    """Note on an error of a loss or metric function what batch it was given.

    One line of advice follows where the cause is known: an entry that the batch lacks, one
    key for all examples, a forgotten `vmap`, labels of the wrong dtype or rank. An error
    that this library raised says what to do itself, and gets no note.

    **Arguments:**

    - `error`: caught where the function was called.
    - `batch`: what the function got.
    - `stateful`: whether the model has state, such as that of BatchNorm.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    if not frames or frames[-1].f_globals.get("__name__", "").startswith("eqxshard."):
        if isinstance(error, TypeError) and "positional argument" in str(error):
            words = "loss_fn takes (model, batch, key), and metric_fn (model, batch)."
            error.add_note(words)
        return
    entries = (f"{name} {format_array(leaf)}" for name, leaf in array_leaves(batch))
    error.add_note(f"The batch was: {comma_list(entries)}.")
    if stateful and isinstance(error, TypeError | AttributeError):
        error.add_note(
            "The model has state: loss_fn and metric_fn get the pair (model, state), and "
            "eval_step and predict are given (state.model, state.model_state)."
        )
    advice = (
        _missing_entry(error, batch)
        or _labels(frames)
        or _one_key(error, frames)
        or _forgotten_vmap(error, frames)
    )
    if advice is not None:
        error.add_note(advice)


def _missing_entry(error: Exception, batch: PyTree) -> str | None:
    if not isinstance(error, KeyError) or not isinstance(batch, Mapping):
        return None
    name = error.args[0] if error.args else None
    if not isinstance(name, str) or name in batch:
        return None
    hint = did_you_mean(name, batch)
    return f"The batch has no {name!r}; {hint}it has {comma_list(batch)}."


def _labels(frames: list[FrameType]) -> str | None:
    """Of labels that optax's cross-entropy of classes cannot take."""
    for frame in frames:
        if frame.f_code.co_name != "softmax_cross_entropy_with_integer_labels":
            continue
        labels: Any = frame.f_locals.get("labels")
        logits: Any = frame.f_locals.get("logits")
        # They may be anything, and this must not hide the user's error.
        if not (is_array(labels) and is_array(logits)):
            continue
        if labels.shape == logits.shape:
            return (
                "The labels are one-hot; use optax.softmax_cross_entropy(logits, labels)."
            )
        if labels.shape == (*logits.shape[:-1], 1):
            return f"The labels have the shape {labels.shape}; write labels[..., 0]."
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            return f"The labels are {labels.dtype}; write labels.astype(jnp.int32)."
    return None


def _one_key(error: Exception, frames: list[FrameType]) -> str | None:
    """Of a dropout that got no key, or a `vmap` that got the one key of all examples."""
    lacks_key = isinstance(error, RuntimeError) and "requires a key" in str(error)
    if not lacks_key and "but is only 0" in str(error):
        mapped = [f.f_locals.get("args") for f in frames if f.f_code.co_name == "vmap_f"]
        arrays = filter(is_array, jax.tree.leaves(mapped))
        lacks_key = any(
            x.ndim == 0 and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays
        )
    if not lacks_key:
        return None
    return (
        "loss_fn gets one key; give each example its own: "
        "jax.vmap(model)(x, jax.random.split(key, len(x)))."
    )


def _forgotten_vmap(error: Exception, frames: list[FrameType]) -> str | None:
    """Of a model of one example that was called with all of them."""
    if not isinstance(error, TypeError | ValueError) or not _OF_SHAPES.search(str(error)):
        return None
    # That of `jax.vmap`, which `eqx.filter_vmap` calls, too.
    if any(frame.f_code.co_name == "vmap_f" for frame in frames):
        return None
    for frame in frames:
        model = frame.f_locals.get("self")
        if frame.f_code.co_name == "__call__" and isinstance(model, eqx.Module):
            return (
                f"{type(model).__name__} got the whole batch; if it takes one example, "
                "write jax.vmap(model)(...)."
            )
    return None
