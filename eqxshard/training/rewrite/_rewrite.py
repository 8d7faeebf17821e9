"""Rewrites of the program that a user wrote: the one door to all of them.

A rewrite never makes a program fail, or differ beyond rounding, where plain JAX runs it.
What a rewrite does not understand, it leaves alone. If what it made does not trace, the
program runs as it was, and a warning says so.

`EQXSHARD_REWRITE=off` in the environment turns all rewriting off. A check by
`equinox.error_if` is then left to Equinox, and if it fails on several devices, the step
does not return.
"""

import functools as ft
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax

from ..._errors import UsageError, UsageTypeError
from ._jaxprs import call_whole, open_jaxpr


def is_rewriting() -> bool:
    """Whether programs are rewritten.

    **Raises:**

    `ValueError` if `EQXSHARD_REWRITE` is neither `on` nor `off`.
    """
    switch = os.environ.get("EQXSHARD_REWRITE", "on")
    if switch not in ("on", "off"):
        raise UsageError(f"EQXSHARD_REWRITE is {switch!r}; set it to 'on' or 'off'.")
    is_jit_on = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return switch == "on" and is_jit_on


def looks_for_nan() -> bool:
    """Whether JAX looks for nan, or infinity, in each operation of a program that made one.

    It does not look into jaxprs, so the loss function must be left as the user wrote it.
    """
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def run_rewritten(
    rewrite: Callable[[Any], Any], jaxpr: Any, out: Any, args: Any
) -> tuple[Any, list[Any]]:
    """Rewrite a function that was traced, and call it.

    The function is traced by who calls this: a mistake in the user's code is raised there,
    and is not one of the rewrite.

    **Arguments:**

    - `rewrite`: from a closed jaxpr to another, which computes the same, and may return
        more after it.
    - `jaxpr`, `out`: the function, and what it returns, as from `jax.make_jaxpr` with
        `return_shape`.
    - `args`: what to call it with.

    **Returns:**

    The outputs of the function, and those of the rewritten jaxpr after them.
    """
    leaves, structure = jax.tree.leaves(args), jax.tree.structure(out)
    flat = call_whole(_rewrite_or_leave(rewrite, jaxpr), leaves)
    count = structure.num_leaves
    return jax.tree.unflatten(structure, flat[:count]), flat[count:]


def _rewrite_or_leave(rewrite: Callable[[Any], Any], jaxpr: Any) -> Any:
    """A jaxpr rewritten, if that works and returns the same types."""
    try:
        rewritten = rewrite(jaxpr)
        ours, wanted = _types(rewritten), _types(jaxpr)
        if ours[: len(wanted)] != wanted:
            raise UsageTypeError(f"it returns {ours} in place of {wanted}")
        return rewritten
    except Exception as error:
        warn_once(f"{type(error).__name__}: {error}")
        return jaxpr


def _types(jaxpr: Any) -> list[Any]:
    return [(x.aval.shape, x.aval.dtype) for x in open_jaxpr(jaxpr).outvars]


@ft.cache
def warn_once(error: str) -> None:
    warnings.warn(
        f"eqxshard could not rewrite a step, which runs as plain JAX runs it ({error}); "
        "please report this, and set EQXSHARD_REWRITE=off until it is mended.",
        RuntimeWarning,
        stacklevel=2,
    )
