"""Type annotations of fields, read and resolved.

A *hint* is a type expression: the annotation of a field, or a part of one.
"""

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Union

from jaxtyping import AbstractArray, PyTree


class AnnotationError(ValueError):
    """An annotation that is wrong: an error for the rules that need it.

    - `words`: what it says, dims and all.
    - `dims`: those of the array as if the annotation were not there.
    - `is_read`: whether its dims are among the words; they are not if it has names that
        nothing defines.
    """

    def __init__(
        self,
        message: str,
        words: Iterable[str],
        dims: tuple[str | None, ...] | None = None,
        is_read: bool = True,
    ):
        super().__init__(message)
        self.words = frozenset(word for text in words for word in re.findall(r"\w+", text))
        self.dims, self.is_read = dims, is_read


class Hint(NamedTuple):
    """A type expression, the field it comes from, and the words of `Annotated`."""

    type: Any
    field: str
    words: str | None = None

    def __str__(self) -> str:
        return f"{self.field}: {format_hint(self.type)}"


def unwrap_hint(hint: Hint) -> Iterator[Hint]:
    """A hint without aliases and `Annotated`; every member of a union."""
    kind, origin, args = hint.type, typing.get_origin(hint.type), typing.get_args(hint.type)
    if origin is Annotated:
        words = [word for word in kind.__metadata__ if isinstance(word, str)]
        args, hint = args[:1], hint._replace(words=(words or [hint.words])[-1])
    elif is_pytree(kind):
        yield hint
        args, hint = (kind.leaftype,), hint._replace(words=None)
    elif type(kind).__name__ == "TypeAliasType":  # `type Up = Float[Array, "mlp embed"]`
        try:
            args = (kind.__value__,)
        except Exception as error:
            args = (_unresolved(str(hint), kind.__module__, error),)
    elif origin not in (Union, types.UnionType, Final, ClassVar):
        yield hint
        return
    for arg in args:
        yield from unwrap_hint(hint._replace(type=arg))


@lru_cache(maxsize=4096)
def annotation_of(cls: type, name: str | None) -> tuple[type, Any] | None:
    """The class that annotates a field, and the annotation, or what is wrong with it."""
    for owner in cls.__mro__:
        annotations = inspect.get_annotations(owner)
        if name in annotations:
            text = f"{owner.__name__}.{name}: {format_hint(annotations[name])}"
            return owner, _resolve(owner, annotations[name], text)
    return None


def _resolve(owner: type, annotation: Any, where: str) -> Any:
    """An annotation without strings, independent of the other fields of its class.

    What is wrong with it, if it cannot be resolved.
    """
    module = sys.modules.get(owner.__module__)
    params = getattr(owner, "__type_params__", ())
    # As in `typing`, the module comes before the class, whose defaults may hide types.
    inner = {owner.__name__: owner, **vars(owner)}
    outer = {**(vars(module) if module else {}), **{var.__name__: var for var in params}}
    lone = type(owner.__name__, (), {"__annotations__": {"field": annotation}})
    try:
        return typing.get_type_hints(lone, inner, outer, include_extras=True)["field"]
    except Exception as error:
        return _unresolved(where, owner.__module__, error)


def _unresolved(where: str, module: str, error: Exception) -> AnnotationError:
    return AnnotationError(
        f"{where} cannot be resolved ({error}); import or define its names at the top "
        f"of {module}, outside of TYPE_CHECKING.",
        [where],
        is_read=False,
    )


def is_jaxtyping(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def is_pytree(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, PyTree) and hasattr(hint, "leaftype")


def allows_any_dims(hint: Any) -> bool:
    """Whether a hint allows arrays of any dims."""
    speaks = is_jaxtyping(hint) or is_pytree(hint)
    return not speaks and hint is not types.NoneType


def format_hint(hint: Any) -> str:
    """A hint as one writes it."""
    if isinstance(hint, str):
        return hint
    text = re.sub(r"~|\b(\w+\.)+(?=\w)", "", inspect.formatannotation(hint))
    return text.replace("'", '"')
