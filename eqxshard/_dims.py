"""The names of an array's dims, as the annotation of its field says them.

A walk from the root of a PyTree to the array. The values that it meets tell their
classes, the annotations of the fields that it passes tell what these are filled with,
and the last one names the dims.

The words are those of `_hints.py`. The *dims* of an array are names, or `None`.
"""

import typing
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from equinox import nn
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import PyTree

from ._hints import (
    Hint,
    annotation_of,
    is_jaxtyping,
    is_pytree,
    is_silent,
    plain_hints,
    substituted,
    text_of,
)

Dims = tuple[str | None, ...]


class _Dim(NamedTuple):
    name: str | None
    variadic: bool


def logical_dims(tree: PyTree, path: tuple[Any, ...]) -> Dims | None:
    """The names of the dims of one array of a PyTree.

    **Arguments:**

    - `tree`: any PyTree, of arrays or of `jax.ShapeDtypeStruct`s.
    - `path`: of the array, from `jax.tree_util.tree_flatten_with_path`.

    **Returns:**

    A name for each dim of the array, or `None` for a dim without one. The first dim
    beyond those of the annotation is called `layers`: modules are stacked along it.
    `None` where no annotation says anything.

    **Raises:**

    `ValueError` if the annotation cannot be resolved, or does not fit the array.
    """
    leaf = reduce(_child, path, tree)
    return _walk(tree, [Hint(Any, "")], path, leaf)


def _walk(node: Any, hints: list[Hint], path: tuple[Any, ...], leaf: Any) -> Dims | None:
    """The dims of `leaf` at `path` in `node`, which one or more of `hints` describe."""
    hints = [plain for hint in hints for plain in plain_hints(hint)]
    if not path:
        return _dims_of_array(hints, leaf)
    name = getattr(path[0], "name", None)
    if isinstance(node, nn.WeightNorm) and name == "g":
        return _dims_of_norm(node, hints, leaf)
    below = (_child(node, path[0]), _hints_below(node, hints, path[0]), path[1:], leaf)
    layer = next((cls for cls in type(node).__mro__ if cls in _LAYERS), None)
    if layer is None:
        return _walk(*below)
    # What a subclass says of a field goes before what we know of its base.
    annotated = annotation_of(type(node), name)
    if annotated and annotated[0] is not layer and issubclass(annotated[0], layer):
        dims = _walk(*below)
        if dims is not None:
            return dims
    known = _LAYERS[layer](node)
    for inside in (jax.tree_util.keystr(path, simple=True, separator="."), f"{name}.*"):
        if inside in known:
            return _dims_in_layer(layer, known, inside, hints, leaf)
    return _walk(*below)


def _hints_below(node: Any, hints: list[Hint], key: Any) -> list[Hint]:
    """What is said of the child of a node at `key`."""
    if isinstance(key, GetAttrKey):
        below = _hints_of_field(node, hints, key.name)
    elif isinstance(key, SequenceKey | DictKey):
        below = [h for hint in hints for h in _hints_of_item(node, hint, key)]
    else:
        below = []
    return below or [Hint(Any, "")]


def _hints_of_item(node: Any, hint: Hint, key: Any) -> list[Hint]:
    kind, args = typing.get_origin(hint.type) or hint.type, typing.get_args(hint.type)
    if isinstance(kind, TypeVar) or is_pytree(kind):
        return [hint]
    if isinstance(key, DictKey) and typing.is_typeddict(kind):
        return substituted(kind, hint.type, key.key)
    if not isinstance(kind, type) or kind.__module__ not in _CONTAINERS or not args:
        return []
    if issubclass(kind, Mapping) != isinstance(key, DictKey):
        return []
    if kind is not tuple or args[1:] == (...,):
        return [Hint(args[-1 if isinstance(key, DictKey) else 0], hint.field)]
    return [Hint(args[key.idx], hint.field)] if len(args) == len(node) else []


_CONTAINERS = ("builtins", "collections", "collections.abc")


def _hints_of_field(node: Any, hints: list[Hint], name: str) -> list[Hint]:
    cls = type(node)
    below: list[Hint] = []
    for hint in hints:
        kind = typing.get_origin(hint.type) or hint.type
        if kind in (nn.WeightNorm, nn.SpectralNorm) and name == "layer" and hint.words:
            # These have no names of their own.
            return [hint._replace(type=type(node.layer))]
        if kind in cls.__mro__:
            below += substituted(cls, hint.type, name)
    return below or substituted(cls, Any, name)


def _dims_of_array(hints: list[Hint], leaf: Any) -> Dims | None:
    """Of the hints for an array, those that fit it best, which must agree."""
    named = [hint for hint in hints if is_jaxtyping(hint.type)]
    if not named:
        for hint in hints:
            if isinstance(hint.type, TypeVar):
                raise ValueError(
                    f"{hint} names no dims, because {text_of(hint.type)} is given no "
                    "argument; write it where the class is a base or in an annotation: "
                    f'{hint.field.partition(".")[0]}[Float[Array, "mlp embed"]].'
                )
        return None
    ndim = len(leaf.shape)
    fits = {h: _fit(_parse(h.type.dim_str), ndim) for h in named}
    fits = {hint: dims for hint, dims in fits.items() if dims is not None}
    if not fits:
        if any(is_silent(hint.type) for hint in hints):
            return None
        raise ValueError(
            f"{named[0]} names more dims than the array has, which is {_shape(leaf)}; "
            "name one for each dim of the array, or `...` for any number of them."
        )
    # The dtype first: the rank of stacked modules is not that of the annotation.
    typed = [hint for hint in fits if isinstance(leaf, hint.type.dtype[Any, "..."])]
    exact = [hint for hint in typed or fits if _is_of_rank(hint, ndim)]
    best = {fits[hint]: hint for hint in exact or typed or fits}
    if len(best) > 1:
        both = " and ".join(text_of(hint.type) for hint in best.values())
        raise ValueError(
            f"{named[0].field}: {both} both fit the array, which is {_shape(leaf)}; give "
            "their dims the same names, or leave one of them."
        )
    return next(iter(best))


def _dims_of_norm(node: nn.WeightNorm, hints: list[Hint], leaf: Any) -> Dims | None:
    """The norms have the dims of the weight, and size 1 where they are taken over it."""
    path = (GetAttrKey("layer"), GetAttrKey(node.weight_name))
    dims = _walk(node, hints, path, leaf)
    return dims and tuple(dim if n > 1 else None for dim, n in zip(dims, leaf.shape))


def _fit(dims: list[_Dim], ndim: int) -> Dims | None:
    """One name for each of the `ndim` dims of an array; `None` if there are too few."""
    names = tuple(dim.name for dim in dims)
    extra = ndim - len(dims)
    for i, dim in enumerate(dims):
        if dim.variadic:
            return (
                names[:i] + (None,) * (extra + 1) + names[i + 1 :] if extra > -2 else None
            )
    if extra < 0:
        return None
    layers = None if "layers" in names else "layers"
    return ((layers,) + (None,) * (extra - 1) if extra else ()) + names


def _is_of_rank(hint: Hint, ndim: int) -> bool:
    dims = _parse(hint.type.dim_str)
    return len(dims) == ndim or any(dim.variadic for dim in dims)


def _parse(text: str) -> list[_Dim]:
    """The dims that a jaxtyping string says: `"*batch 3 mlp embed=16"`."""
    return [_parse_dim(token) for token in text.split()]


def _parse_dim(token: str) -> _Dim:
    plain = token.lstrip("#?*_")
    modifiers = token[: len(token) - len(plain)]
    variadic = token == "..." or "*" in modifiers
    if variadic or "_" in modifiers or plain.lstrip("-").isdigit():
        return _Dim(None, variadic)
    return _Dim(plain.partition("=")[0] if plain.count("=") == 1 else plain, False)


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, GetAttrKey) and hasattr(node, key.name):
        return getattr(node, key.name)
    if isinstance(key, SequenceKey) and isinstance(node, list | tuple):
        return node[key.idx]
    if isinstance(key, DictKey) and isinstance(node, dict):
        return node[key.key]
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return next(child for path, child in below if path == (key,))


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}{[*leaf.shape]}"


# The layers of equinox.nn, whose own annotations say `Array`


def _dims_in_layer(
    layer: type, known: Mapping[str, str], inside: str, hints: list[Hint], leaf: Any
) -> Dims | None:
    """The dims at a path inside of a layer, as the field that holds it calls them."""
    names = _renamed(layer, known, hints)
    parsed = [_Dim(names.get(dim, dim), rest) for dim, rest in _parse(known[inside])]
    dims = _fit(parsed, len(leaf.shape))
    if dims is None:
        raise ValueError(
            f"{layer.__name__}.{inside} has the dims {known[inside]!r}, and the array "
            f"there is {_shape(leaf)}; keep it in an annotated field of your own."
        )
    return dims


def _renamed(
    layer: type, known: Mapping[str, str], hints: list[Hint]
) -> dict[str | None, str | None]:
    """What a field calls the dims of its layer: `Annotated[nn.Linear, "mlp embed"]`."""
    for hint in hints:
        kind = typing.get_origin(hint.type) or hint.type
        if hint.words is None or not (isinstance(kind, type) and issubclass(kind, layer)):
            continue
        dims = (dim.name for text in known.values() for dim in _parse(text))
        own = [*dict.fromkeys(name for name in dims if name)]
        new = [dim.name for dim in _parse(hint.words)]
        if len(new) != len(own):
            raise ValueError(
                f"{hint.field}: {hint.words!r} names {len(new)} dims, and "
                f"{layer.__name__} has {len(own)} with names ({', '.join(own)}); write one "
                "word for each, in this order."
            )
        return dict(zip(own, new))
    return {}


def _linear(layer: nn.Linear) -> dict[str, str]:
    return {"weight": "out in", "bias": "out"}


def _conv(layer: nn.Conv | nn.ConvTranspose) -> dict[str, str]:
    # Transposed or not; with groups, `in` are the inputs of one.
    kernel = " _" * layer.num_spatial_dims
    return {"weight": "out in" + kernel, "bias": "out" + kernel}


def _embedding(layer: nn.Embedding) -> dict[str, str]:
    return {"weight": "vocab embed"}


def _over_embedding(layer: nn.LayerNorm | nn.RMSNorm) -> dict[str, str]:
    dims = " ".join([*"_" * (len(layer.shape) - 1), *["embed"] * (len(layer.shape) > 0)])
    return {"weight": dims, "bias": dims}


def _over_channels(layer: nn.GroupNorm | nn.BatchNorm) -> dict[str, str]:
    state = [f"{name}.init.{i}" for name in _BATCH_NORM_STATE for i in (0, 1)]
    return dict.fromkeys(["weight", "bias", *state], "channels")


_BATCH_NORM_STATE = ("ema_state_index", "batch_state_index")


def _attention(layer: nn.MultiheadAttention) -> dict[str, str]:
    inner = ("query_proj", "key_proj", "value_proj")
    weights = {f"{name}.weight": "heads embed" for name in inner}
    biases = {f"{name}.bias": "heads" for name in inner}
    output = {"output_proj.weight": "embed heads", "output_proj.bias": "embed"}
    return weights | biases | output


def _mlp(layer: nn.MLP) -> dict[str, str]:
    # By turns columns and rows are split, so that every other activation is whole
    # (Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). Stacked
    # hidden layers cannot take turns: there the columns of each are split.
    if layer.scan and layer.depth > 0:
        names = [("mlp", "in"), ("mlp", "embed"), ("out", "mlp")]
    else:
        hidden = ["embed" if i % 2 else "mlp" for i in range(layer.depth)]
        names = [*zip([*hidden, "out"], ["in", *hidden])]
    weights = {f"layers.{i}.weight": f"{out} {in_}" for i, (out, in_) in enumerate(names)}
    biases = {f"layers.{i}.bias": out for i, (out, _) in enumerate(names)}
    # If learnt, one activation for each layer and neuron, which takes no turns either.
    return weights | biases | {"activation.*": "...", "final_activation.*": "..."}


def _recurrent(layer: nn.GRUCell | nn.LSTMCell) -> dict[str, str]:
    # The gates are stacked along the first dim. It has a name of its own, not `hidden`:
    # split over devices, the parts of one gate would not lie with those of the next.
    return {
        "weight_ih": "gates in",
        "weight_hh": "gates hidden",
        "bias": "gates",
        "bias_n": "hidden",
    }


def _prelu(layer: nn.PReLU) -> dict[str, str]:
    # One slope, or any shape that broadcasts to the input.
    return {"negative_slope": "..."}


_LAYERS: dict[type[eqx.Module], Callable[[Any], dict[str, str]]] = {
    nn.Linear: _linear,
    nn.Conv: _conv,
    nn.ConvTranspose: _conv,
    nn.Embedding: _embedding,
    nn.LayerNorm: _over_embedding,
    nn.RMSNorm: _over_embedding,
    nn.GroupNorm: _over_channels,
    nn.BatchNorm: _over_channels,
    nn.MultiheadAttention: _attention,
    nn.MLP: _mlp,
    nn.GRUCell: _recurrent,
    nn.LSTMCell: _recurrent,
    nn.PReLU: _prelu,
}
