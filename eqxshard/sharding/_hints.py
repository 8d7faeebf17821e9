"""Type annotations of fields: read, resolved, with their arguments filled in.

Glossary: a *hint* is a type expression, the annotation of a field or a part of one. An
*argument* fills in a type variable: `Float[Array, "mlp embed"]` in
`Box[Float[Array, "mlp embed"]]`.
"""

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeVar, Union

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
    kind, origin = hint.type, typing.get_origin(hint.type)
    args = typing.get_args(kind)
    alias = kind if origin is None else origin
    if origin is Annotated:
        words = [word for word in kind.__metadata__ if isinstance(word, str)]
        yield from unwrap_hint(
            hint._replace(type=args[0], words=(words or [hint.words])[-1])
        )
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from unwrap_hint(hint._replace(type=arg))
    elif origin in (Final, ClassVar, typing.Required, typing.NotRequired):
        yield from unwrap_hint(hint._replace(type=args[0]))
    elif isinstance(kind, typing.NewType):
        yield from unwrap_hint(hint._replace(type=kind.__supertype__))
    elif isinstance(kind, TypeVar):
        yield hint
        yield from unwrap_hint(hint._replace(type=_fallback(kind)))
    elif is_pytree(kind):
        yield hint
        yield from unwrap_hint(Hint(kind.leaftype, hint.field))
    elif type(alias).__name__ == "TypeAliasType":  # of typing, or its extensions
        try:
            value = alias.__value__
        except Exception as error:
            yield hint._replace(type=_unresolved(str(hint), alias.__module__, error))
            return
        value = _substitute(value, dict(zip(alias.__type_params__, args)))
        yield from unwrap_hint(hint._replace(type=value))
    else:
        yield hint


def field_hints(cls: type, hint: Any, name: str) -> list[Hint]:
    """The hints of a field of a class that `hint` describes."""
    annotated = annotation_of(cls, name)
    if annotated is None:
        return []
    owner, annotation = annotated
    field = f"{owner.__name__}.{name}"
    variables = getattr(annotation, "__parameters__", ())
    if not (variables or is_pytree(annotation) or isinstance(annotation, TypeVar)):
        return [Hint(annotation, field)]
    try:
        arguments = _arguments(cls, hint)
        inherited = _inherited(cls).get(owner, {})
    except AnnotationError as error:
        return [Hint(error, field)]
    arguments = {var: _substitute(arg, arguments) for var, arg in inherited.items()}
    return [Hint(_substitute(annotation, arguments), field)]


def _arguments(cls: type, hint: Any) -> dict[Any, Any]:
    """The arguments of a class, from a hint that names it or a base of it."""
    base, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if base not in cls.__mro__:
        return {var: _fallback(var) for var in getattr(cls, "__parameters__", ())}
    given = zip(_inherited(cls)[base].values(), args)
    return _bind(cls, ()) | {var: arg for var, arg in given if isinstance(var, TypeVar)}


@lru_cache(maxsize=1024)
def _inherited(cls: type) -> dict[type, dict[Any, Any]]:
    """The arguments of a class and of each of its bases, by their type variables."""
    found = {cls: {var: var for var in getattr(cls, "__parameters__", ())}}
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin, args = typing.get_origin(base) or base, typing.get_args(base)
        if not isinstance(origin, type) or origin is typing.Generic:
            continue
        if args:
            args = typing.get_args(_resolve(cls, base, f"class {cls.__name__}"))
        arguments = _bind(origin, args)
        for owner, inner in _inherited(origin).items():
            inner = {var: _substitute(arg, arguments) for var, arg in inner.items()}
            found.setdefault(owner, inner)
    return found


def _bind(cls: type, args: tuple[Any, ...]) -> dict[Any, Any]:
    params = getattr(cls, "__parameters__", ())
    # Equinox itself omits the arguments of its classes.
    optional = params if cls.__module__.startswith("equinox.") else ()
    return dict.fromkeys(optional, Any) | dict(zip(params, args))


def _substitute(hint: Any, arguments: Mapping[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return arguments.get(hint, hint)
    if is_pytree(hint):
        return typing.cast(Any, PyTree)[_substitute(hint.leaftype, arguments)]
    params = getattr(hint, "__parameters__", ())
    if isinstance(hint, type) or not params:
        return hint
    return hint[tuple(arguments.get(var, var) for var in params)]


def _fallback(var: Any) -> Any:
    """The meaning of a type variable without an argument."""
    if getattr(var, "has_default", lambda: False)():
        return var.__default__
    return getattr(var, "__bound__", None) or Any


@lru_cache(maxsize=4096)
def annotation_of(cls: type, name: str | None) -> tuple[type, Any] | None:
    """The class that annotates a field, and the annotation, or what is wrong with it."""
    for owner in cls.__mro__:
        annotations = inspect.get_annotations(owner)
        if name in annotations:
            text = f"{owner.__name__}.{name}: {format_hint(annotations[name])}"
            try:
                return owner, _resolve(owner, annotations[name], text)
            except AnnotationError as error:
                return owner, error
    return None


def _resolve(owner: type, annotation: Any, where: str) -> Any:
    """An annotation without strings, independent of the other fields of its class."""
    module = sys.modules.get(owner.__module__)
    params = (*getattr(owner, "__parameters__", ()), *getattr(owner, "__type_params__", ()))
    # As in `typing`, the module comes before the class, whose defaults may hide types.
    inner = {owner.__name__: owner, **vars(owner)}
    outer = {**(vars(module) if module else {}), **{var.__name__: var for var in params}}
    lone = type(owner.__name__, (), {"__annotations__": {"field": annotation}})
    try:
        return typing.get_type_hints(lone, inner, outer, include_extras=True)["field"]
    except Exception as error:
        raise _unresolved(where, owner.__module__, error) from None


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
    speaks = is_jaxtyping(hint) or is_pytree(hint) or isinstance(hint, TypeVar)
    return not speaks and hint is not types.NoneType


def format_hint(hint: Any) -> str:
    """A hint as one writes it."""
    if isinstance(hint, str):
        return hint
    text = re.sub(r"~|\b(\w+\.)+(?=\w)", "", inspect.formatannotation(hint))
    return text.replace("'", '"')
