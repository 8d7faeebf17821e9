"""The names of an array's dims, read from the type annotation of its field.

The dims are found by a walk from the root of a PyTree to the array. Each value on the way
has a class, whose annotations say what types its fields have; the last annotation names
the dims. The *dims* of an array are a name or `None` for each. A *hint* is a type
expression: the annotation of a field, or a part of one.
"""

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Union

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import AbstractArray, PyTree

from .._errors import UsageError
from ._layer_dims import known_layer
from ._leaves import format_array, leaf_path
from ._text import comma_list

Dims = tuple[str | None, ...]

#: Stands for any number of dims in an annotation.
_REST = "..."


class AnnotationError(UsageError):
    """An annotation that is wrong: an error for the rules that need it.

    - `words`: the words of the annotation, each of which may be the name of a dim.
    - `dims`: the dims of the array without this annotation, if others name them.
    """

    def __init__(self, message: str, words: frozenset[str], dims: Dims | None):
        super().__init__(message)
        self.words, self.dims = words, dims


class _Fault(NamedTuple):
    """A mistake in an annotation: a sentence about it, and the text that may name dims."""

    sentence: str
    text: str


class _Hint(NamedTuple):
    """A type expression, the field it comes from, and the words of `Annotated`."""

    type: Any
    field: str
    words: str | None = None


def logical_dims(tree: PyTree, path: tuple[Any, ...], leaf: Any) -> Dims | None:
    """The names of the dims of one array of a PyTree.

    **Arguments:**

    - `tree`: any PyTree, of arrays or of `jax.ShapeDtypeStruct`s.
    - `path`: the path of the array, from `jax.tree_util.tree_flatten_with_path`.
    - `leaf`: the array.

    **Returns:**

    A name for each dim of the array, or `None` for a dim without one. The first dim
    beyond those of the annotation is called `layers`: modules are stacked along it.
    `None` if no annotation names dims.

    **Raises:**

    `AnnotationError` if an annotation on the way cannot be resolved, or the last one does
    not fit the array.
    """
    faults: list[_Fault] = []
    dims = _walk(tree, path, leaf, faults)
    if faults:
        words = frozenset(re.findall(r"\w+", " ".join(fault.text for fault in faults)))
        raise AnnotationError(faults[0].sentence, words, dims)
    return dims


def _walk(node: Any, path: tuple[Any, ...], leaf: Any, faults: list[_Fault]) -> Dims | None:
    """The dims of the array at a path in a node."""
    hints: list[_Hint] = []
    in_layer = None
    for depth, key in enumerate(path):
        inside = leaf_path(path[depth:])
        layer, known = known_layer(node)
        annotated = _annotation_of(type(node), getattr(key, "name", None))
        if layer is not None and inside in known:
            in_layer = _dims_in_layer(layer, known, inside, leaf, hints, faults)
            # A subclass's own annotation takes precedence over what we know of its base.
            if annotated is None or annotated[0] is layer:
                return in_layer
        below = _hints_below(node, hints, key, annotated, faults)
        hints = [plain for hint in below for plain in _unwrap(hint)]
        node = _child(node, key)
    dims = _dims_of_array(leaf, hints, faults)
    return in_layer if dims is None else dims


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, SequenceKey) and isinstance(node, list | tuple):
        return node[key.idx]  # Without flattening all of them: layers may be hundreds.
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return next(child for path, child in below if path == (key,))


def _hints_below(
    node: Any,
    hints: Sequence[_Hint],
    key: Any,
    annotated: tuple[type, Any] | None,
    faults: list[_Fault],
) -> list[_Hint]:
    """The hints that describe the child of a node at `key`."""
    if not isinstance(key, GetAttrKey):
        items = [(hint.field, _item_type(hint.type, node, key)) for hint in hints]
        return [_Hint(item, field) for field, item in items if item is not None]
    if annotated is None:
        return []
    owner, annotation = annotated
    if isinstance(annotation, _Fault):
        faults.append(annotation)
        return []
    return [_Hint(annotation, f"{owner.__name__}.{key.name}")]


def _item_type(kind: Any, node: Any, key: Any) -> Any:
    """The type of a container's item, if the type of the container says it."""
    container, args = typing.get_origin(kind), typing.get_args(kind)
    if not isinstance(container, type):
        return None
    if issubclass(container, Mapping):
        return args[1] if isinstance(key, DictKey) else None
    if not issubclass(container, Sequence) or not isinstance(key, SequenceKey):
        return None
    if container is not tuple or args[1:] == (...,):
        return args[0]
    return args[key.idx] if len(args) == len(node) else None


def _unwrap(hint: _Hint) -> Iterator[_Hint]:
    """A hint without `Annotated`, aliases and `None`; every member of a union."""
    kind, origin = hint.type, typing.get_origin(hint.type)
    if origin is Annotated:
        words = [word for word in kind.__metadata__ if isinstance(word, str)]
        inner = _Hint(kind.__origin__, hint.field, words[-1] if words else hint.words)
        yield from _unwrap(inner)
    elif origin in (Union, types.UnionType):
        for member in typing.get_args(kind):
            yield from _unwrap(hint._replace(type=member))
    elif type(kind).__name__ == "TypeAliasType":  # `type Up = Float[Array, "mlp embed"]`
        yield from _unwrap(hint._replace(type=kind.__value__))
    elif kind is not types.NoneType:
        yield hint


@lru_cache(maxsize=4096)
def _annotation_of(cls: type, name: str | None) -> tuple[type, Any] | None:
    """The class that annotates a field, and the annotation, or the mistake in it."""
    for owner in cls.__mro__:
        annotations = inspect.get_annotations(owner)
        if name in annotations:
            return owner, _resolve(owner, name, annotations[name])
    return None


def _resolve(owner: type, name: str, annotation: Any) -> Any:
    """An annotation with its strings evaluated, without the other fields of its class."""
    module = sys.modules.get(owner.__module__)
    # As in `typing`, the module comes before the class, whose defaults may hide types.
    inner, outer = {owner.__name__: owner, **vars(owner)}, vars(module) if module else {}
    lone = type(owner.__name__, (), {"__annotations__": {"field": annotation}})
    try:
        return typing.get_type_hints(lone, inner, outer, include_extras=True)["field"]
    except Exception as error:
        sentence = (
            f"{owner.__name__}.{name}: {annotation} cannot be resolved ({error}); import "
            f"or define its names at the top of {owner.__module__}, outside of "
            "TYPE_CHECKING."
        )
        return _Fault(sentence, str(annotation))


def _dims_of_array(leaf: Any, hints: Sequence[_Hint], faults: list[_Fault]) -> Dims | None:
    """The dims of the hint that fits the array best, the first of equals."""
    kinds = [hint.type for hint in hints]
    texts = [
        kind.dim_str
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, AbstractArray)
    ]
    fits = [fit for text in texts if (fit := _fit(text, len(leaf.shape)))]
    if fits:
        return min(fits, key=lambda fit: fit[0])[1]
    # In a union, a type without names of dims may allow any array.
    if texts and len(texts) == len(hints):
        sentence = (
            f"{hints[0].field}: {' and '.join(map(repr, texts))} has more dims than the "
            f"array, which is {format_array(leaf)}; name each of its dims once, or write "
            "`...` for any number of them."
        )
        faults.append(_Fault(sentence, " ".join(texts)))
    return None


def _dims_in_layer(
    layer: type,
    known: Mapping[str, str],
    inside: str,
    leaf: Any,
    hints: Sequence[_Hint],
    faults: list[_Fault],
) -> Dims | None:
    """The dims at a path inside a layer, as the field that holds the layer calls them.

    A field renames them as in `up: Annotated[nn.Linear, "mlp embed"]`.
    """
    renamed: dict[str | None, str | None] = {}
    for hint in hints:
        kind = typing.get_origin(hint.type) or hint.type
        if not hint.words or not (isinstance(kind, type) and issubclass(kind, layer)):
            continue
        names = [name for text in known.values() for name in _parse(text)]
        own = [*dict.fromkeys(name for name in names if name is not None)]
        new = _parse(hint.words)
        if len(new) == len(own):
            renamed = dict(zip(own, new))
            break
        sentence = (
            f"{hint.field}: {hint.words!r} names {len(new)} dims, and {layer.__name__} has "
            f"{len(own)} with names ({comma_list(own)}); write one word for each, in this "
            "order."
        )
        faults.append(_Fault(sentence, " ".join([hint.words, *own])))
    fit = _fit(known[inside], len(leaf.shape))
    return fit and tuple(renamed.get(dim, dim) for dim in fit[1])


def _fit(text: str, ndim: int) -> tuple[int, Dims] | None:
    """How many dims an array has beyond those of a text, and a name for each of its dims.

    `None` if it has fewer.
    """
    dims = _parse(text)
    extra = ndim - len(dims)
    if _REST in dims:
        at = dims.index(_REST)
        rest = [None] * (extra + 1)
        return None if extra < -1 else (0, (*dims[:at], *rest, *dims[at + 1 :]))
    if extra < 0:
        return None
    stacked = [None if "layers" in dims else "layers", *[None] * (extra - 1)]
    return extra, (*stacked[:extra], *dims)


def _parse(text: str) -> list[str | None]:
    """The dims in a jaxtyping string such as `"*batch 3 mlp embed=16"`."""
    return [_parse_dim(token) for token in text.split()]


def _parse_dim(token: str) -> str | None:
    name = token.lstrip("#?*_")
    modifiers = token[: len(token) - len(name)]
    if token == _REST or "*" in modifiers:
        return _REST
    if "_" in modifiers or name.lstrip("-").isdigit():
        return None
    return name.partition("=")[0]
