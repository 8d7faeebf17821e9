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
    out = {"grad_norm": optax.tree.norm(grads)}
    for group, pattern in (wanted if isinstance(wanted, Mapping) else {}).items():
        found = [leaf for path, leaf in array_leaves(grads) if re.search(pattern, path)]
        if not found:
            raise ValueError(
                f"grad_norms={{{group!r}: {pattern!r}}} is found in no path of a trained "
                f"parameter, such as {array_leaves(grads)[0][0]}."
            )
        out[f"grad_norm/{group}"] = optax.tree.norm(found)
    return {name: jnp.asarray(norm) for name, norm in out.items()}


def norm_names(wanted: bool | Mapping[str, str]) -> tuple[str, ...]:
    """The names of the metrics that `norms` returns."""
    if wanted is False:
        return ()
    groups = wanted if isinstance(wanted, Mapping) else ()
    return ("grad_norm", *(f"grad_norm/{group}" for group in groups))
