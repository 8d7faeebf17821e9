"""Type annotations of fields, read and resolved.

A *hint* is a type expression: the annotation of a field, or a part of one.
"""

import inspect
import sys
import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Union

from jaxtyping import AbstractArray


class Hint(NamedTuple):
    """A type expression, the field it comes from, and the words of `Annotated`."""

    type: Any
    field: str
    words: str | None = None


class Unresolved(NamedTuple):
    """An annotation that cannot be resolved: a sentence that says why, and its text."""

    sentence: str
    text: str


def unwrap_hint(hint: Hint) -> Iterator[Hint]:
    """A hint without `Annotated`, aliases and `None`; every member of a union."""
    kind, origin = hint.type, typing.get_origin(hint.type)
    if origin is Annotated:
        words = [word for word in kind.__metadata__ if isinstance(word, str)]
        yield from unwrap_hint(
            Hint(kind.__origin__, hint.field, words[-1] if words else hint.words)
        )
    elif origin in (Union, types.UnionType):
        for member in typing.get_args(kind):
            yield from unwrap_hint(hint._replace(type=member))
    elif type(kind).__name__ == "TypeAliasType":  # `type Up = Float[Array, "mlp embed"]`
        yield from unwrap_hint(hint._replace(type=kind.__value__))
    elif kind is not types.NoneType:
        yield hint


@lru_cache(maxsize=4096)
def annotation_of(cls: type, name: str | None) -> tuple[type, Any] | None:
    """The class that annotates a field, and the annotation, or that it is `Unresolved`."""
    for owner in cls.__mro__:
        annotations = inspect.get_annotations(owner)
        if name in annotations:
            return owner, _resolve(owner, f"{owner.__name__}.{name}", annotations[name])
    return None


def _resolve(owner: type, field: str, annotation: Any) -> Any:
    """An annotation without strings, independent of the other fields of its class."""
    module = sys.modules.get(owner.__module__)
    # As in `typing`, the module comes before the class, whose defaults may hide types.
    inner, outer = {owner.__name__: owner, **vars(owner)}, vars(module) if module else {}
    lone = type(owner.__name__, (), {"__annotations__": {"field": annotation}})
    try:
        return typing.get_type_hints(lone, inner, outer, include_extras=True)["field"]
    except Exception as error:
        return Unresolved(
            f"{field}: {annotation} cannot be resolved ({error}); import or define its "
            f"names at the top of {owner.__module__}, outside of TYPE_CHECKING.",
            str(annotation),
        )


def is_jaxtyping(hint: Any) -> bool:
    """Whether a hint names the dims of an array: `Float[Array, "mlp embed"]`."""
    return isinstance(hint, type) and issubclass(hint, AbstractArray)
