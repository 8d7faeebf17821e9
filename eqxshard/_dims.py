"""The names of an array's dims, as the annotation of its field says them.

A walk from the root of a PyTree to the array. The values that it meets tell their
classes, the annotations of the fields that it passes tell what these are filled with,
and the last one names the dims.

Glossary: a *hint* is a type expression, the annotation of a field or a part of one. An
*argument* is what stands in a hint for a type variable: `Float[Array, "mlp embed"]` in
`Box[Float[Array, "mlp embed"]]`. The *dims* of an array are names, or `None`.
"""

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, reduce
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeVar, Union

import equinox as eqx
import jax
from equinox import nn
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import AbstractArray, PyTree

Dims = tuple[str | None, ...]


class _Hint(NamedTuple):
    """A type expression, the field that it is from, and the words of `Annotated`."""

    type: Any
    field: str
    words: str | None = None

    def __str__(self) -> str:
        return f"{self.field}: {_text(self.type)}"


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
    return _walk(tree, [_Hint(Any, "")], path, leaf)


def _walk(node: Any, hints: list[_Hint], path: tuple[Any, ...], leaf: Any) -> Dims | None:
    """The dims of `leaf` at `path` in `node`, which one or more of `hints` describe."""
    hints = [plain for hint in hints for plain in _plain(hint)]
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
    annotated = _annotation(type(node), name)
    if annotated and annotated[0] is not layer and issubclass(annotated[0], layer):
        dims = _walk(*below)
        if dims is not None:
            return dims
    known = _LAYERS[layer](node)
    for inside in (jax.tree_util.keystr(path, simple=True, separator="."), f"{name}.*"):
        if inside in known:
            return _dims_in_layer(layer, known, inside, hints, leaf)
    return _walk(*below)


def _hints_below(node: Any, hints: list[_Hint], key: Any) -> list[_Hint]:
    """What is said of the child of a node at `key`."""
    if isinstance(key, GetAttrKey):
        below = _hints_of_field(node, hints, key.name)
    elif isinstance(key, SequenceKey | DictKey):
        below = [h for hint in hints for h in _hints_of_item(node, hint, key)]
    else:
        below = []
    return below or [_Hint(Any, "")]


def _hints_of_item(node: Any, hint: _Hint, key: Any) -> list[_Hint]:
    kind, args = typing.get_origin(hint.type) or hint.type, typing.get_args(hint.type)
    if isinstance(kind, TypeVar) or _is_pytree(kind):
        return [hint]
    if isinstance(key, DictKey) and typing.is_typeddict(kind):
        return _substituted(kind, hint.type, key.key)
    if not isinstance(kind, type) or kind.__module__ not in _CONTAINERS or not args:
        return []
    if issubclass(kind, Mapping) != isinstance(key, DictKey):
        return []
    if kind is not tuple or args[1:] == (...,):
        return [_Hint(args[-1 if isinstance(key, DictKey) else 0], hint.field)]
    return [_Hint(args[key.idx], hint.field)] if len(args) == len(node) else []


_CONTAINERS = ("builtins", "collections", "collections.abc")


def _hints_of_field(node: Any, hints: list[_Hint], name: str) -> list[_Hint]:
    cls = type(node)
    below: list[_Hint] = []
    for hint in hints:
        kind = typing.get_origin(hint.type) or hint.type
        if kind in (nn.WeightNorm, nn.SpectralNorm) and name == "layer" and hint.words:
            # These have no names of their own.
            return [hint._replace(type=type(node.layer))]
        if kind in cls.__mro__:
            below += _substituted(cls, hint.type, name)
    return below or _substituted(cls, Any, name)


def _dims_of_array(hints: list[_Hint], leaf: Any) -> Dims | None:
    """Of the hints for an array, those that fit it best, which must agree."""
    named = [hint for hint in hints if _is_jaxtyping(hint.type)]
    if not named:
        for hint in hints:
            if isinstance(hint.type, TypeVar):
                raise ValueError(
                    f"{hint} names no dims, because {_text(hint.type)} is given no "
                    "argument; write it where the class is a base or in an annotation: "
                    f'{hint.field.partition(".")[0]}[Float[Array, "mlp embed"]].'
                )
        return None
    ndim = len(leaf.shape)
    fits = {h: _fit(_parse(h.type.dim_str), ndim) for h in named}
    fits = {hint: dims for hint, dims in fits.items() if dims is not None}
    if not fits:
        if any(_is_silent(hint.type) for hint in hints):
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
        both = " and ".join(_text(hint.type) for hint in best.values())
        raise ValueError(
            f"{named[0].field}: {both} both fit the array, which is {_shape(leaf)}; give "
            "their dims the same names, or leave one of them."
        )
    return next(iter(best))


def _dims_of_norm(node: nn.WeightNorm, hints: list[_Hint], leaf: Any) -> Dims | None:
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


def _is_of_rank(hint: _Hint, ndim: int) -> bool:
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


# What annotations say


def _plain(hint: _Hint) -> Iterator[_Hint]:
    """A hint without aliases and `Annotated`; each of the members of a union."""
    kind, origin = hint.type, typing.get_origin(hint.type)
    args = typing.get_args(kind)
    alias = kind if origin is None else origin
    if origin is Annotated:
        words = [word for word in kind.__metadata__ if isinstance(word, str)]
        yield from _plain(hint._replace(type=args[0], words=(words or [hint.words])[-1]))
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from _plain(hint._replace(type=arg))
    elif origin in (Final, ClassVar, typing.Required, typing.NotRequired):
        yield from _plain(hint._replace(type=args[0]))
    elif isinstance(kind, typing.NewType):
        yield from _plain(hint._replace(type=kind.__supertype__))
    elif isinstance(kind, TypeVar):
        yield hint
        yield from _plain(hint._replace(type=_fallback(kind)))
    elif _is_pytree(kind):
        yield hint
        yield from _plain(_Hint(kind.leaftype, hint.field))
    elif type(alias).__name__ == "TypeAliasType":  # of typing, or its extensions
        try:
            value = alias.__value__
        except Exception as error:
            raise _unresolved(str(hint), alias.__module__, error) from None
        value = _substitute(value, dict(zip(alias.__type_params__, args)))
        yield from _plain(hint._replace(type=value))
    else:
        yield hint


def _substituted(cls: type, hint: Any, name: str) -> list[_Hint]:
    """The hint of a field of a class that is described by `hint`."""
    annotated = _annotation(cls, name)
    if annotated is None:
        return []
    owner, annotation = annotated
    arguments = _arguments(cls, hint)
    inherited = _inherited(cls).get(owner, {})
    arguments = {var: _substitute(arg, arguments) for var, arg in inherited.items()}
    return [_Hint(_substitute(annotation, arguments), f"{owner.__name__}.{name}")]


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
    # Equinox itself leaves the arguments of its classes out.
    optional = params if cls.__module__.startswith("equinox.") else ()
    return dict.fromkeys(optional, Any) | dict(zip(params, args))


def _substitute(hint: Any, arguments: Mapping[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return arguments.get(hint, hint)
    if _is_pytree(hint):
        return typing.cast(Any, PyTree)[_substitute(hint.leaftype, arguments)]
    params = getattr(hint, "__parameters__", ())
    if isinstance(hint, type) or not params:
        return hint
    return hint[tuple(arguments.get(var, var) for var in params)]


def _fallback(var: Any) -> Any:
    """What a type variable stands for that is given no argument."""
    if getattr(var, "has_default", lambda: False)():
        return var.__default__
    return getattr(var, "__bound__", None) or Any


@lru_cache(maxsize=4096)
def _annotation(cls: type, name: str | None) -> tuple[type, Any] | None:
    """Which class annotates a field, and what it says."""
    for owner in cls.__mro__:
        annotations = inspect.get_annotations(owner)
        if name in annotations:
            text = f"{owner.__name__}.{name}: {_text(annotations[name])}"
            return owner, _resolve(owner, annotations[name], text)
    return None


def _resolve(owner: type, annotation: Any, where: str) -> Any:
    """An annotation without strings, whatever the other fields of its class say."""
    module = sys.modules.get(owner.__module__)
    params = (*getattr(owner, "__parameters__", ()), *getattr(owner, "__type_params__", ()))
    # As `typing` does, the module goes before the class, whose defaults may hide types.
    inner = {owner.__name__: owner, **vars(owner)}
    outer = {**(vars(module) if module else {}), **{var.__name__: var for var in params}}
    lone = type(owner.__name__, (), {"__annotations__": {"field": annotation}})
    try:
        return typing.get_type_hints(lone, inner, outer, include_extras=True)["field"]
    except Exception as error:
        raise _unresolved(where, owner.__module__, error) from None


def _unresolved(where: str, module: str, error: Exception) -> ValueError:
    return ValueError(
        f"{where} cannot be resolved ({error}); import or define what it names at the top "
        f"of {module}, and not for type checkers alone."
    )


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, GetAttrKey) and hasattr(node, key.name):
        return getattr(node, key.name)
    if isinstance(key, SequenceKey) and isinstance(node, list | tuple):
        return node[key.idx]
    if isinstance(key, DictKey) and isinstance(node, dict):
        return node[key.key]
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return next(child for path, child in below if path == (key,))


def _is_jaxtyping(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _is_pytree(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, PyTree) and hasattr(hint, "leaftype")


def _is_silent(hint: Any) -> bool:
    """Whether a hint allows arrays of any dims."""
    speaks = _is_jaxtyping(hint) or _is_pytree(hint) or isinstance(hint, TypeVar)
    return not speaks and hint is not types.NoneType


def _text(hint: Any) -> str:
    """A hint as one would write it."""
    if isinstance(hint, str):
        return hint
    text = re.sub(r"~|\b(\w+\.)+(?=\w)", "", inspect.formatannotation(hint))
    return text.replace("'", '"')


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}{[*leaf.shape]}"


# The layers of equinox.nn, whose own annotations say `Array`


def _dims_in_layer(
    layer: type, known: Mapping[str, str], inside: str, hints: list[_Hint], leaf: Any
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
    layer: type, known: Mapping[str, str], hints: list[_Hint]
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
