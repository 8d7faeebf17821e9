"""What a layer keeps for the backward pass, and what it computes again."""

from collections.abc import Callable
from typing import Any, Literal

import jax

#: A policy of `jax.checkpoint`, or the name of one of these.
Remat = Literal["none", "dots", "full", "offload"] | Callable[..., Any]

#: Products with weights, but not the scores of each pair of tokens; and attention's output.
_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names("attention"),
)
#: As a policy says it of one operation. There is no public name for the value itself.
_TO_HOST = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")(
    jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ()))
)


def rematerialize(fn: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A function that computes again what it does not keep for the backward pass.

    It is for the body of a scan, which keeps XLA from undoing it.
    """
    named: dict[Any, Any] = {
        "none": _keep_all_but_gathered,
        "dots": _keep_products,
        "full": None,
        "offload": _offload,
    }
    if not callable(remat) and remat not in named:
        raise ValueError(
            f"remat={remat!r} says nothing about what to keep; use 'none', 'dots', 'full', "
            "'offload', or a policy of jax.checkpoint."
        )
    policy = remat if callable(remat) else named[remat]
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)


def _keep_all_but_gathered(prim: Any, *avals: Any, **params: Any) -> bool:
    # Weights are gathered by these. To keep them would be to gather all layers at once.
    return prim.name != "sharding_constraint"


def _keep_products(prim: Any, *avals: Any, **params: Any) -> bool:
    # To go backward, cuDNN's attention needs more of its results than the output.
    cudnn = prim.name.startswith("dot_product_attention_fwd")
    return cudnn or _PRODUCTS(prim, *avals, **params)


def _offload(prim: Any, *avals: Any, **params: Any) -> Any:
    """Keep the same in the host's memory."""
    return _TO_HOST if _keep_products(prim, *avals, **params) else False
