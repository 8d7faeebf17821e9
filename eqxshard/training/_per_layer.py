"""Optimizers that look at the shapes of arrays, applied to stacked layers one by one."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from .._errors import UsageError, UsageTypeError
from ..sharding._leaves import is_array, is_key, leaf_path, stacked_depth
from ..sharding._placement import named_leaves
from ..sharding._rule import leaf_dims
from ..sharding._text import did_you_mean, first_few
from ._optimizer import LayersState, check_optim
from .rewrite._owners import map_layers

#: The scope of what looks at one layer of a stack at a time.
PER_LAYER = "eqxshard_per_layer"


def per_layer(
    optim: optax.GradientTransformation, *stacks: str
) -> optax.GradientTransformationExtraArgs:
    """Apply an optimizer to stacked layers as if each were a module of its own.

    Layers are stacked for [`eqxshard.scan_layers`][], so their arrays have one dim more
    than those of a layer. Muon, Adafactor, LAMB, LARS, Novograd, SM3, clipping by block
    and masks such as `ndim >= 2` look at shapes, and would take a stack of biases for a
    matrix, or all layers for one. Adam, Lion and the like do not need this.

    The optimizer's update runs under [`jax.vmap`][] over the dim of layers, with a state
    for each layer that is sharded like its parameters. While it multiplies or factorizes
    matrices, as Muon does, a train step splits the stack by layers, if their number
    divides: each matrix is whole on one device, to which an all-to-all brings it (Liu et
    al., https://arxiv.org/abs/2502.16982). Everything else is updated by the
    optimizer as it is. This is an `optax.partition`: each sees the whole tree of
    parameters, with `optax.MaskedNode` in the place of the others, so that masks and
    labels by path keep their meaning.

    Keep outside what looks at all parameters at once, such as clipping by the global norm,
    and [`eqxshard.ema_weights`][].

    **Arguments:**

    - `optim`: an optax optimizer.
    - `stacks`: the paths of the stacked modules, such as `"layers"` or
        `"encoder.layers"`: regular expressions that match from the start of a path to a
        dot or its end. All arrays of one module have the same leading dim.

    **Returns:**

    An optax optimizer.

    **Raises:**

    `TypeError` if `optim` is not an optimizer or no stack is named; from its `init`,
    `ValueError` if a path is that of no array, or of arrays without a common leading dim.

    !!! Example

        ```python
        optim = optax.chain(
            optax.clip_by_global_norm(1.0),
            eqxshard.per_layer(optax.contrib.muon(1e-3), "blocks"),
        )
        ```
    """
    check_optim(optim)
    patterns = _compile_patterns(stacks)
    optim = optax.with_extra_args_support(optim)

    def stack_of(path: tuple[Any, ...], _: Any) -> str:
        matches = (pattern.match(leaf_path(path)) for pattern in patterns)
        return next((match.group() for match in matches if match), "")

    def by_stack(tree: PyTree) -> optax.GradientTransformationExtraArgs:
        stacks = jax.tree_util.tree_map_with_path(stack_of, tree)
        names: list[Any] = jax.tree.leaves(stacks)
        optims = {**dict.fromkeys(names, _each_layer(optim)), "": optim}
        # A model may be callable, which would be taken for a function of labels.
        return optax.partition(optims, lambda _: stacks)

    def init(params: PyTree) -> Any:
        _check_found(patterns, params)
        state: Any = by_stack(params).init(params)
        return LayersState(*state)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        new, state = by_stack(updates).update(updates, state, params, **extra)
        return new, LayersState(*state)

    return optax.GradientTransformationExtraArgs(init, update)


def _each_layer(
    optim: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer for each of the layers that all arrays are stacks of."""

    def init(params: PyTree) -> PyTree:
        numbers = jnp.arange(stacked_depth(params))

        def own_keys(leaf: Any) -> Any:
            if not (is_array(leaf) and is_key(leaf)):
                return leaf
            return jax.vmap(jax.random.fold_in)(leaf, numbers)

        return jax.tree.map(own_keys, jax.vmap(optim.init)(params))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        shardings: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        update_layer = partial(optim.update, **extra)
        with jax.named_scope(PER_LAYER):
            return map_layers(update_layer, (updates, state, params), shardings)

    return optax.GradientTransformationExtraArgs(init, update)


def _compile_patterns(stacks: Sequence[Any]) -> list[re.Pattern[str]]:
    if not stacks or not all(isinstance(stack, str) for stack in stacks):
        raise UsageTypeError(
            f"per_layer got {stacks} for the paths of the stacked layers; give them as "
            'text, as in per_layer(optim, "layers").'
        )
    try:
        return [re.compile(rf"(?:{stack})(?=\.|$)") for stack in stacks]
    except re.error as error:
        raise UsageError(
            f"per_layer: {stacks} are not all regular expressions ({error}); escape their "
            "special characters with a backslash."
        ) from None


def _check_found(patterns: list[re.Pattern[str]], params: PyTree) -> None:
    """Each pattern must be the path of something, maybe frozen or masked."""
    is_leaf = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf)
    paths = [leaf_path(path) for path, _ in leaves]
    for pattern in patterns:
        if not any(map(pattern.match, paths)):
            stack = pattern.pattern.removeprefix("(?:").removesuffix(r")(?=\.|$)")
            words = {word for path in paths for word in path.split(".")}
            raise UsageError(
                f"per_layer: there are no layers at {stack!r}; {did_you_mean(stack, words)}"
                f"the paths are {first_few(paths)}."
            )
    for path, leaf in named_leaves(params):
        stack = next(filter(None, (pattern.match(path) for pattern in patterns)), None)
        if stack and re.match(r"\.\d+", path[stack.end() :]) and not is_stacked(leaf):
            raise UsageError(
                f"per_layer: {stack.group()!r} is a list, whose layers are not stacked; "
                f"leave it out, or name what is stacked: '{stack.group()}.0'."
            )


def is_stacked(leaf: Any) -> bool:
    """Whether an array is annotated as that of stacked layers."""
    try:
        return leaf_dims(leaf)[:1] == ("layers",)
    except ValueError:  # A wrong annotation.
        return False
