"""Mistakes in a user's functions: a note on the batch they got, and a short traceback."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._errors import ON_PURPOSE, UsageTypeError
from ..compiled._causes import is_ours
from ..sharding._leaves import array_leaves, format_array
from ..sharding._text import comma_list, did_you_mean
from ..transforms._compiles import function_name

#: The folders of JAX and Equinox.
_THEIRS = tuple(os.path.join(Path(str(x.__file__)).parent, "") for x in (jax, eqx))


class short_traceback:
    """A context that shortens the tracebacks of errors, as `shorten_traceback` does."""

    def __enter__(self) -> None:
        """Nothing is done before."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Shorten the traceback of an error."""
        if isinstance(error, Exception):
            shorten_traceback(error)


def shorten_traceback(error: Exception) -> None:
    """Leave the frames of this library, JAX and Equinox out of a traceback.

    The frames of the user's code and of other libraries stay. All stay where this library
    failed by a bug of its own, and under `JAX_TRACEBACK_FILTERING=off`.
    """
    if jax.config.values["jax_traceback_filtering"] == "off":
        return
    others, step, is_bug = list[TracebackType](), error.__traceback__, False
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith(_THEIRS):
            is_bug = is_ours(file) and not isinstance(error, ON_PURPOSE)
            others += [] if is_ours(file) else [step]
        step = step.tb_next
    if is_bug:
        return
    short = None
    for step in reversed(others):
        short = TracebackType(short, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = short


def check_takes(fn: Callable[..., Any], name: str, *arguments: str) -> None:
    """Refuse a function that does not take the arguments that a step gives it.

    **Arguments:**

    - `fn`: the function.
    - `name`: its role, such as `loss_fn`.
    - `arguments`: their names.

    **Raises:**

    `TypeError` that says how the function is called.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # It has none.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageTypeError(
            f"{function_name(fn)}{signature} is called as "
            f"{name}({', '.join(arguments)}), which it does not take ({error}); write "
            "such a function."
        ) from None


def add_advice(error: Exception, batch: PyTree, *, stateful: bool) -> None:
    """Note on an error of a loss or metric function what batch it was given.

    An error that is meant for users says what to do itself, and gets no note.

    **Arguments:**

    - `error`: caught where the function was called.
    - `batch`: what the function got.
    - `stateful`: whether the model has state, such as that of BatchNorm.
    """
    if isinstance(error, ON_PURPOSE):
        return
    entries = (f"{name} {format_array(leaf)}" for name, leaf in array_leaves(batch))
    error.add_note(f"The batch was: {comma_list(entries)}.")
    if stateful and isinstance(error, TypeError | AttributeError):
        error.add_note(
            "The model has state: loss_fn and metric_fn get the pair (model, state), and "
            "eval_step and predict are given (state.model, state.model_state)."
        )
    if isinstance(error, KeyError) and isinstance(batch, Mapping):
        name = error.args[0] if error.args else None
        if isinstance(name, str) and name not in batch:
            hint = did_you_mean(name, batch)
            error.add_note(f"The batch has no {name!r}; {hint}it has {comma_list(batch)}.")
