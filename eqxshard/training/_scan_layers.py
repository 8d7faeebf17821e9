"""`scan_layers`: stacked layers, gathered and compiled one at a time."""

import functools as ft
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._errors import UsageError, UsageTypeError
from ..sharding._leaves import stacked_depth

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


def scan_layers(
    layers: PyTree,
    x: PyTree,
    *args: Any,
    key: PRNGKeyArray | None = None,
    remat: Remat = "full",
) -> PyTree:
    """Apply stacked layers in turn: one layer is compiled, whatever the depth.

    Inside a step, under FSDP, the parameters of one layer at a time are gathered, freed
    before the next layer, and gathered again in the backward pass. (`jax.lax.scan` of
    layers that are not in `jax.checkpoint` would gather all of them at the start of the
    step and keep them to its end.) If the rule splits the dim of layers itself, all are
    gathered at once. Optimizers that look at shapes, such as Muon, go with stacked layers
    through [`eqxshard.per_layer`][].

    **Arguments:**

    - `layers`: a module whose arrays have a leading dim of layers, as made by
        `eqx.filter_vmap(make_layer)(keys)`. Inside a step these must be the model's own
        arrays; change them (cast them, say) inside the layer. Of others, all layers are
        gathered at once, which lint finds.
    - `x`: the input of the first layer. Each layer returns the input of the next, of the
        same shapes and types.
    - `args`: more arguments, the same for all layers.
    - `key`: a random key; each layer gets one of its own as `key=`.
    - `remat`: what of the inside of each layer to keep for the backward pass. The rest is
        computed again.
        `"full"`: nothing. `"none"`: everything but gathered parameters. `"dots"`: the
        products with weights and the arrays named `"attention"`, as
        [`eqxshard.nn.attention`][] names its output. `"offload"`: the same, in the host's
        memory. (JAX 0.10.1 cannot compile that for several CPU devices.) Or a policy of
        [`jax.checkpoint`][], such as `jax.checkpoint_policies.dots_saveable`.

    **Returns:**

    The output of the last layer.

    **Raises:**

    `TypeError` if the layers cannot be called, such as a list of them; `ValueError` if the
    arrays do not all have the same leading dim, or if `remat` is another text.

    !!! Example

        ```python
        class Model(eqx.Module):
            blocks: Block

            def __init__(self, depth, *, key):
                self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, depth))

            def __call__(self, x, key=None):
                return eqxshard.scan_layers(self.blocks, x, key=key)
        ```
    """
    if not callable(layers):
        raise UsageTypeError(
            f"the layers are a {type(layers).__name__}, which cannot be called; stack them "
            "in one module with eqx.filter_vmap(make_layer)(keys)."
        )
    depth = stacked_depth(layers)
    arrays, static = eqx.partition(layers, eqx.is_array)
    # As a pipeline does, so that dropout is the same in both.
    numbers = jnp.arange(depth)
    keys = None if key is None else jax.vmap(ft.partial(jax.random.fold_in, key))(numbers)

    def body(x: PyTree, layer: tuple[PyTree, Array | None]) -> tuple[PyTree, None]:
        arrays, key = layer
        module = eqx.combine(arrays, static)
        return (module(x, *args) if key is None else module(x, *args, key=key)), None

    return jax.lax.scan(_rematerialize(body, remat), x, (arrays, keys))[0]


def _rematerialize(fn: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A function that recomputes what it does not keep for the backward pass.

    It is for the body of a scan, which keeps XLA from undoing it.
    """
    named: dict[Any, Any] = {
        "none": _keep_all_but_gathered,
        "dots": _keep_products,
        "full": None,
        "offload": _offload,
    }
    if not callable(remat) and remat not in named:
        raise UsageError(
            f"unknown remat={remat!r}; use one of 'none', 'dots', 'full' and 'offload', "
            "or a policy of jax.checkpoint."
        )
    policy = remat if callable(remat) else named[remat]
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)


def _keep_all_but_gathered(prim: Any, *avals: Any, **params: Any) -> bool:
    # Weights are gathered by these. To keep them would be to gather all layers at once.
    return prim.name not in ("sharding_constraint", "reshard")


def _keep_products(prim: Any, *avals: Any, **params: Any) -> bool:
    # To go backward, cuDNN's attention needs more of its results than the output.
    cudnn = prim.name.startswith("dot_product_attention_fwd")
    return cudnn or _PRODUCTS(prim, *avals, **params)


def _offload(prim: Any, *avals: Any, **params: Any) -> Any:
    """Keep the same in the host's memory."""
    return _TO_HOST if _keep_products(prim, *avals, **params) else False
