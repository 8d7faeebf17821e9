"""The names of an array's dims, read from the type annotation of its field.

A walk from the root of a PyTree to the array. The values on the way give their classes,
the annotations of the fields on the way say what those are filled with, and the last one
names the dims.

The vocabulary is that of `_hints.py`. The *dims* of an array are names, or `None`.
"""

import typing
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax
from equinox import nn
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import PyTree

from ._hints import (
    AnnotationError,
    Hint,
    allows_any_dims,
    annotation_of,
    format_hint,
    is_jaxtyping,
    is_pytree,
    unwrap_hint,
)
from ._layer_dims import layer_class, layer_dims
from ._leaves import format_array, leaf_path

Dims = tuple[str | None, ...]


class _Dim(NamedTuple):
    name: str | None
    variadic: bool


def logical_dims(tree: PyTree, path: tuple[Any, ...]) -> Dims | None:
    """The names of the dims of one array of a PyTree.

    **Arguments:**

    - `tree`: any PyTree, of arrays or of `jax.ShapeDtypeStruct`s.
    - `path`: the array's, from `jax.tree_util.tree_flatten_with_path`.

    **Returns:**

    A name for each dim of the array, or `None` for a dim without one. The first dim
    beyond those of the annotation is called `layers`: modules are stacked along it.
    `None` if no annotation names dims.

    **Raises:**

    `AnnotationError` if an annotation on the way cannot be resolved, or the last one does
    not fit the array.
    """
    leaf = reduce(_child, path, tree)
    return _walk(tree, [Hint(Any, "")], path, leaf)


def _walk(node: Any, hints: list[Hint], path: tuple[Any, ...], leaf: Any) -> Dims | None:
    """The dims of `leaf` at `path` in `node`, which one or more of `hints` describe."""
    hints = [plain for hint in hints for plain in unwrap_hint(hint)]
    for wrong in (hint.type for hint in hints):
        if isinstance(wrong, AnnotationError):
            raise _without(wrong, node, hints, path, leaf)
    if not path:
        return _dims_of_array(hints, leaf)
    name = getattr(path[0], "name", None)
    if isinstance(node, nn.WeightNorm) and name == "g":
        return _dims_of_norm(node, hints, leaf)
    below = (_child(node, path[0]), _hints_below(node, hints, path[0]), path[1:], leaf)
    layer = layer_class(node)
    if layer is None:
        return _walk(*below)
    # A subclass's own annotation takes precedence over what we know of its base.
    annotated = annotation_of(type(node), name)
    if annotated and annotated[0] is not layer and issubclass(annotated[0], layer):
        dims = _walk(*below)
        if dims is not None:
            return dims
    known = layer_dims(node, layer)
    for inside in (leaf_path(path), f"{name}.*"):
        if inside in known:
            return _dims_in_layer(layer, known, inside, hints, leaf)
    return _walk(*below)


def _without(
    wrong: AnnotationError, node: Any, hints: list[Hint], path: tuple[Any, ...], leaf: Any
) -> AnnotationError:
    """A wrong annotation, with the dims that the array has without it."""
    others = [hint for hint in hints if hint.type is not wrong] or [Hint(Any, "")]
    words = wrong.words
    try:
        dims = _walk(node, others, path, leaf)
    except AnnotationError as another:
        words, dims = words | another.words, another.dims
    return AnnotationError(str(wrong), words, dims, wrong.is_read)


def _hints_below(node: Any, hints: list[Hint], key: Any) -> list[Hint]:
    """The hints that describe the child of a node at `key`."""
    if isinstance(key, GetAttrKey):
        below = _hints_of_field(node, hints, key.name)
    elif isinstance(key, SequenceKey | DictKey):
        below = [h for hint in hints for h in _hints_of_item(node, hint, key)]
    else:
        below = []
    return below or [Hint(Any, "")]


def _hints_of_item(node: Any, hint: Hint, key: Any) -> list[Hint]:
    kind, args = typing.get_origin(hint.type) or hint.type, typing.get_args(hint.type)
    if is_pytree(kind):
        return [hint]
    if not isinstance(kind, type) or kind.__module__ not in _CONTAINERS or not args:
        return []
    if issubclass(kind, Mapping) != isinstance(key, DictKey):
        return []
    if kind is not tuple or args[1:] == (...,):
        return [Hint(args[-1 if isinstance(key, DictKey) else 0], hint.field)]
    return [Hint(args[key.idx], hint.field)] if len(args) == len(node) else []


_CONTAINERS = ("builtins", "collections", "collections.abc")


def _hints_of_field(node: Any, hints: list[Hint], name: str) -> list[Hint]:
    for hint in hints:
        kind = typing.get_origin(hint.type) or hint.type
        if kind in (nn.WeightNorm, nn.SpectralNorm) and name == "layer" and hint.words:
            # The wrappers have no dims of their own: the words are the layer's.
            return [hint._replace(type=type(node.layer))]
    annotated = annotation_of(type(node), name)
    if annotated is None:
        return []
    owner, annotation = annotated
    return [Hint(annotation, f"{owner.__name__}.{name}")]


def _dims_of_array(hints: list[Hint], leaf: Any) -> Dims | None:
    """The dims of the hints that fit an array best, which must agree."""
    named = [hint for hint in hints if is_jaxtyping(hint.type)]
    if not named:
        return None
    ndim = len(leaf.shape)
    fits = {h: _fit(_parse(h.type.dim_str), ndim) for h in named}
    fits = {hint: dims for hint, dims in fits.items() if dims is not None}
    if not fits:
        if any(allows_any_dims(hint.type) for hint in hints):
            return None
        raise AnnotationError(
            f"{named[0]} names more dims than the array has, which is "
            f"{format_array(leaf)}; name one per dim of the array, or write `...` for any "
            "number of them.",
            [hint.type.dim_str for hint in named],
        )
    # The dtype decides before the rank, because stacked modules have a rank of their own.
    typed = [hint for hint in fits if isinstance(leaf, hint.type.dtype[Any, "..."])]
    exact = [hint for hint in typed or fits if _is_of_rank(hint, ndim)]
    best = {fits[hint]: hint for hint in exact or typed or fits}
    if len(best) > 1:
        both = " and ".join(format_hint(hint.type) for hint in best.values())
        raise AnnotationError(
            f"{named[0].field}: {both} both fit the array, which is {format_array(leaf)}; "
            "give their dims the same names, or remove one of them.",
            [hint.type.dim_str for hint in named],
        )
    return next(iter(best))


def _dims_of_norm(node: nn.WeightNorm, hints: list[Hint], leaf: Any) -> Dims | None:
    """The norms have the dims of the weight, of size 1 where they are taken over it."""
    path = (GetAttrKey("layer"), GetAttrKey(node.weight_name))
    dims = _walk(node, hints, path, leaf)
    return dims and tuple(dim if n > 1 else None for dim, n in zip(dims, leaf.shape))


def _dims_in_layer(
    layer: type, known: Mapping[str, str], inside: str, hints: list[Hint], leaf: Any
) -> Dims | None:
    """The dims at a path inside a layer, as the field that holds the layer calls them."""
    names = _renamed(layer, known, hints)
    parsed = [_Dim(names.get(dim, dim), rest) for dim, rest in _parse(known[inside])]
    dims = _fit(parsed, len(leaf.shape))
    if dims is None:
        raise AnnotationError(
            f"{layer.__name__}.{inside} has the dims {known[inside]!r}, and the array "
            f"there is {format_array(leaf)}; keep it in an annotated field of your own.",
            filter(None, (dim.name for dim in parsed)),
        )
    return dims


def _renamed(
    layer: type, known: Mapping[str, str], hints: list[Hint]
) -> dict[str | None, str | None]:
    """A field's names for the dims of its layer: `Annotated[nn.Linear, "mlp embed"]`."""
    for hint in hints:
        kind = typing.get_origin(hint.type) or hint.type
        if hint.words is None or not (isinstance(kind, type) and issubclass(kind, layer)):
            continue
        dims = (dim.name for text in known.values() for dim in _parse(text))
        own = [*dict.fromkeys(name for name in dims if name)]
        new = [dim.name for dim in _parse(hint.words)]
        if len(new) != len(own):
            raise AnnotationError(
                f"{hint.field}: {hint.words!r} names {len(new)} dims, and "
                f"{layer.__name__} has {len(own)} with names ({', '.join(own)}); write one "
                "word for each, in this order.",
                [hint.words, *own],
            )
        return dict(zip(own, new))
    return {}


def _fit(dims: list[_Dim], ndim: int) -> Dims | None:
    """One name for each of the `ndim` dims of an array; `None` if there are too few."""
    names = tuple(dim.name for dim in dims)
    extra = ndim - len(dims)
    for i, dim in enumerate(dims):
        if dim.variadic:
            filled = names[:i] + (None,) * (extra + 1) + names[i + 1 :]
            return filled if extra > -2 else None
    if extra < 0:
        return None
    layers = None if "layers" in names else "layers"
    return ((layers,) + (None,) * (extra - 1) if extra else ()) + names


def _is_of_rank(hint: Hint, ndim: int) -> bool:
    dims = _parse(hint.type.dim_str)
    return len(dims) == ndim or any(dim.variadic for dim in dims)


def _parse(text: str) -> list[_Dim]:
    """The dims in a jaxtyping string: `"*batch 3 mlp embed=16"`."""
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
