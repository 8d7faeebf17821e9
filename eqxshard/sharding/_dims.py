"""The names of an array's dims, read from the type annotation of its field.

A walk from the root of a PyTree to the array. The values on the way give their classes,
the annotations of the fields on the way say what those are filled with, and the last one
names the dims.

The vocabulary is that of `_hints.py`. The *dims* of an array are names, or `None`.
"""

import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import PyTree

from ._hints import Hint, Unresolved, annotation_of, is_jaxtyping, unwrap_hint
from ._layer_dims import layer_class, layer_dims
from ._leaves import format_array, leaf_path
from ._text import comma_list

Dims = tuple[str | None, ...]

#: Stands for any number of dims in what an annotation says.
_REST = "..."


class AnnotationError(ValueError):
    """An annotation that is wrong: an error for the rules that need it.

    - `words`: what it says, among them the dims that it may have meant.
    - `dims`: those that the array has without it.
    """

    def __init__(self, message: str, words: frozenset[str], dims: Dims | None):
        super().__init__(message)
        self.words, self.dims = words, dims


def logical_dims(tree: PyTree, path: tuple[Any, ...], leaf: Any) -> Dims | None:
    """The names of the dims of one array of a PyTree.

    **Arguments:**

    - `tree`: any PyTree, of arrays or of `jax.ShapeDtypeStruct`s.
    - `path`: the array's, from `jax.tree_util.tree_flatten_with_path`.
    - `leaf`: the array.

    **Returns:**

    A name for each dim of the array, or `None` for a dim without one. The first dim
    beyond those of the annotation is called `layers`: modules are stacked along it.
    `None` if no annotation names dims.

    **Raises:**

    `AnnotationError` if an annotation on the way cannot be resolved, or the last one does
    not fit the array.
    """
    walk = _Walk(leaf)
    dims = walk.dims_at(tree, [], path)
    if walk.faults:
        sentences, texts = zip(*walk.faults)
        words = frozenset(re.findall(r"\w+", " ".join(texts)))
        raise AnnotationError(sentences[0], words, dims)
    return dims


class _Walk:
    """The way to one array, and what is wrong with the annotations on it.

    - `faults`: for each wrong one, a sentence, and the text that may name dims.
    """

    def __init__(self, leaf: Any):
        self.faults: list[tuple[str, str]] = []
        self._leaf = leaf

    def dims_at(
        self, node: Any, hints: Sequence[Hint], path: tuple[Any, ...]
    ) -> Dims | None:
        """The dims of the array at a path in a node, which these hints describe."""
        hints = [plain for hint in hints for plain in unwrap_hint(hint)]
        if not path:
            return self._dims_of_array(hints)
        key, inside = path[0], leaf_path(path)
        layer = layer_class(node)
        known = layer_dims(node, layer) if layer else {}
        annotated = annotation_of(type(node), getattr(key, "name", None))
        dims = None
        # A subclass's own annotation takes precedence over what we know of its base.
        if inside not in known or (annotated and annotated[0] is not layer):
            below = self._hints_below(node, hints, key, annotated)
            dims = self.dims_at(_child(node, key), below, path[1:])
        if dims is None and layer and inside in known:
            dims = self._dims_in_layer(layer, known, inside, hints)
        return dims

    def _hints_below(
        self, node: Any, hints: Sequence[Hint], key: Any, annotated: tuple[type, Any] | None
    ) -> list[Hint]:
        """The hints that describe the child of a node at `key`."""
        if not isinstance(key, GetAttrKey):
            items = [(hint.field, _item_type(hint.type, node, key)) for hint in hints]
            return [Hint(item, field) for field, item in items if item is not None]
        if annotated is None:
            return []
        owner, annotation = annotated
        if isinstance(annotation, Unresolved):
            self.faults.append((annotation.sentence, annotation.text))
            return []
        return [Hint(annotation, f"{owner.__name__}.{key.name}")]

    def _dims_of_array(self, hints: Sequence[Hint]) -> Dims | None:
        """The dims of the hints that fit the array best, which must agree."""
        texts = [hint.type.dim_str for hint in hints if is_jaxtyping(hint.type)]
        fits = {text: _fit(text, len(self._leaf.shape)) for text in texts}
        fits = {text: dims for text, dims in fits.items() if dims is not None}
        # Those of stacked modules fit any larger rank.
        exact = {text: dims for text, dims in fits.items() if not _is_stacked(text, dims)}
        best = {*(exact or fits).values()}
        if len(best) == 1:
            return best.pop()
        # Of several types, one without names may allow any array.
        if best or (texts and len(texts) == len(hints)):
            said = "both fit" if best else "has more dims than"
            self.faults.append(
                (
                    f"{hints[0].field}: {' and '.join(map(repr, texts))} {said} the array, "
                    f"which is {format_array(self._leaf)}; name each of its dims once, or "
                    "write `...` for any number of them.",
                    " ".join(texts),
                )
            )
        return None

    def _dims_in_layer(
        self, layer: type, known: Mapping[str, str], inside: str, hints: Sequence[Hint]
    ) -> Dims | None:
        """The dims at a path inside a layer, as the field that holds the layer calls them.

        A field renames them as in `up: Annotated[nn.Linear, "mlp embed"]`.
        """
        renamed: dict[str | None, str | None] = {}
        for hint in hints:
            kind = typing.get_origin(hint.type) or hint.type
            if not hint.words or not (isinstance(kind, type) and issubclass(kind, layer)):
                continue
            own = [*dict.fromkeys(name for text in known.values() for name in _names(text))]
            new = _parse(hint.words)
            if len(new) == len(own):
                renamed = dict(zip(own, new))
                break
            sentence = (
                f"{hint.field}: {hint.words!r} names {len(new)} dims, and "
                f"{layer.__name__} has {len(own)} with names ({comma_list(own)}); write "
                "one word for each, in this order."
            )
            self.faults.append((sentence, " ".join([hint.words, *own])))
        dims = _fit(known[inside], len(self._leaf.shape))
        return dims and tuple(renamed.get(dim, dim) for dim in dims)


def _item_type(kind: Any, node: Any, key: Any) -> Any:
    """The type of a container's item, as the type of the container says; or `None`."""
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


def _fit(text: str, ndim: int) -> Dims | None:
    """One name for each of the `ndim` dims of an array; `None` if there are too few."""
    dims = _parse(text)
    extra = ndim - len(dims)
    if _REST in dims:
        at = dims.index(_REST)
        rest = [None] * (extra + 1)
        return None if extra < -1 else (*dims[:at], *rest, *dims[at + 1 :])
    if extra < 0:
        return None
    stacked = [None if "layers" in dims else "layers", *[None] * (extra - 1)]
    return (*stacked[:extra], *dims)


def _is_stacked(text: str, dims: Dims) -> bool:
    names = _parse(text)
    return _REST not in names and len(names) < len(dims)


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


def _names(text: str) -> list[str]:
    return [name for name in _parse(text) if name not in (None, _REST)]


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, SequenceKey) and isinstance(node, list | tuple):
        return node[key.idx]  # As there may be hundreds of layers.
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return next(child for path, child in below if path == (key,))
