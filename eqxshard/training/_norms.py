"""Norms of gradients, as metrics of a step."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from ..sharding._leaves import array_leaves
from ..transforms._dtypes import at_least_float32


def norms(grads: PyTree, wanted: bool | Mapping[str, str]) -> dict[str, Float[Array, ""]]:
    """The global norm of gradients, and that of each group of them.

    **Arguments:**

    - `grads`: the gradients.
    - `wanted`: as `grad_norms` of [`eqxshard.make_train_step`][].

    **Returns:**

    The norms by metric name.

    **Raises:**

    `ValueError` if the expression of a group is found in no path.
    """
    if wanted is False:
        return {}
    grads = jax.tree.map(at_least_float32, grads)
    found = [optax.tree.norm(grads)]
    for group, pattern in _groups(wanted).items():
        leaves = [leaf for path, leaf in array_leaves(grads) if re.search(pattern, path)]
        if not leaves:
            raise ValueError(
                f"grad_norms={{{group!r}: {pattern!r}}} is found in no path of a trained "
                f"parameter, such as {array_leaves(grads)[0][0]}."
            )
        found.append(optax.tree.norm(leaves))
    return {name: jnp.asarray(norm) for name, norm in zip(norm_names(wanted), found)}


def norm_names(wanted: bool | Mapping[str, str]) -> tuple[str, ...]:
    """The names of the metrics that `norms` returns."""
    if wanted is False:
        return ()
    return ("grad_norm", *(f"grad_norm/{group}" for group in _groups(wanted)))


def _groups(wanted: bool | Mapping[str, str]) -> Mapping[str, str]:
    return wanted if isinstance(wanted, Mapping) else {}
