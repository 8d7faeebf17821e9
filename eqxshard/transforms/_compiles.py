"""Every compile of a step or function after the first is explained, or refused.

What `jax.jit` compiles runs as Python only while JAX traces it. There it tells its
`CompileLog` the arguments. (JAX traces nothing again if shardings alone differ.)
"""

import dataclasses
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from ..distributed import is_main_process
from ..sharding._leaves import format_array, is_array, leaf_path
from ..sharding._text import first_few

_LOG = logging.getLogger(__name__)

_REMEDIES = {
    "structure": "Pass the same arguments, of the same structure.",
    "array": "Keep shapes and dtypes the same.",
    "batch": "Loader(remainder=...) pads or drops the last batch.",
    "static": (
        "Pass a number that changes as an array; make other objects once, or give them "
        "__eq__ and __hash__."
    ),
}
_NO_DIFFERENCE = (
    "No argument differs; a JAX setting or the mesh in context may have changed."
)

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class CompileLog:
    """The compiles of a step or function.

    **Arguments:**

    - `max_compiles`: how many are allowed; none of them is reported. `None` for any
        number; then each is reported unless it is the first of its program.

    **Raises:**

    `ValueError` if `max_compiles` is not positive.
    """

    def __init__(self, max_compiles: int | None):
        if max_compiles is not None and max_compiles < 1:
            raise ValueError(
                f"max_compiles={max_compiles} must be at least 1, or None for any number."
            )
        self._max_compiles = max_compiles
        self._count = 0
        #: By program, the arguments of its last compile.
        self._last: dict[str, _Description] = {}

    def add(self, program: str, arguments: Mapping[str, PyTree]) -> None:
        """Note that a program is compiled. Call it in the function that is traced.

        **Arguments:**

        - `program`: its name. The first compile of each is expected.
        - `arguments`: by name.

        **Raises:**

        `ValueError` if no more compiles are allowed; nothing is donated then.
        """
        arrays = [x for x in jax.tree.leaves(arguments) if is_array(x)]
        if arrays and not any(isinstance(x, Tracer) for x in arrays):
            return  # Under jax_debug_nans, JAX calls functions without tracing them.
        found = _describe(arguments)
        again = program in self._last
        # Or of another program, such as that of several batches.
        last = self._last.get(program, next(reversed(self._last.values()), {}))
        if self._max_compiles is not None and self._count >= self._max_compiles:
            raise ValueError(
                f"{program} would have to compile, and max_compiles={self._max_compiles} "
                f"allows no more. {_explain(last, found)}"
            )
        self._count += 1
        self._last[program] = found
        if again and self._max_compiles is None and is_main_process():
            _LOG.warning(
                "%s compiles again. %s If you expect this, say so with max_compiles=%d.",
                program,
                _explain(last, found),
                self._count,
            )


def function_name(fn: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    return getattr(fn, "__name__", type(fn).__name__)


class _Part(NamedTuple):
    """A part of an argument, of one of the kinds `array`, `static` and `structure`.

    The value of an array is its type as text; that of an inner node, its class.
    """

    kind: str
    value: Any

    def __str__(self) -> str:
        return self.value if self.kind == "array" else _text(self.value)

    def is_same(self, other: "_Part | None") -> bool:
        if other is None or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:  # The value's own code may raise anything.
            return False


_Description = Mapping[str, _Part]


def _describe(arguments: Mapping[str, PyTree]) -> _Description:
    found: dict[str, _Part] = {}
    for name, argument in arguments.items():
        try:
            found.update(_parts(argument, (), name))
        except Exception:  # The fields of the user's objects may raise anything.
            found[name] = _Part("static", type(argument))
    return found


def _parts(node: PyTree, path: tuple[Any, ...], root: str) -> Iterator[tuple[str, _Part]]:
    """The leaves of a PyTree, its inner nodes, and the static fields of its modules."""
    here = leaf_path(path, root)
    is_child = lambda x: x is not node  # noqa: E731
    if is_array(node):
        weak = " (weak type)" if jax.typeof(node).weak_type else ""
        yield here, _Part("array", format_array(node) + weak)
    elif jax.tree_util.treedef_is_leaf(jax.tree.structure(node)) or node is None:
        yield here, _Part("static", node)
    else:
        children = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_child)
        yield here, _Part("structure", type(node))
        if dataclasses.is_dataclass(node):
            names = {field.name for field in dataclasses.fields(node)}
            names -= {getattr(keys[0], "name", None) for keys, _ in children}
            for name in sorted(names):
                yield f"{here}.{name}", _Part("static", getattr(node, name, None))
        for keys, child in children:
            yield from _parts(child, (*path, *keys), root)


def _explain(before: _Description, now: _Description) -> str:
    """How arguments differ from those of an earlier compile, and what to do."""
    changes: dict[str, str] = {}
    kinds = set[str]()
    for path in {**before, **now}:
        old, new = before.get(path), now.get(path)
        # Below a node that came or went, all did.
        if path.startswith(tuple(f"{above}." for above in changes)):
            continue
        if old is None or not old.is_same(new):
            was, is_now = str(old or "absent"), str(new or "absent")
            is_now = "another like it" if was == is_now else is_now
            changes[path] = f"{path}: {was} -> {is_now}"
            kind = old.kind if old and new and old.kind == new.kind else "structure"
            kinds.add(kind)
            if kind == "array" and path.partition(".")[0] == "batch":
                kinds.add("batch")
    if not changes:
        return _NO_DIFFERENCE
    remedies = [text for kind, text in _REMEDIES.items() if kind in kinds]
    return " ".join([f"Changed: {first_few([*changes.values()], '; ')}.", *remedies])


def _text(value: Any) -> str:
    """A static value, or a type, in a few words."""
    try:
        name = getattr(value, "__qualname__", None)
        if name is not None:  # A class, a function, or what `jax.jit` made of one.
            return name if isinstance(value, type) else f"{value.__module__}.{name}"
        return " ".join(_REPR.repr(value).split())
    except Exception:  # The value's own code may raise anything.
        return type(value).__name__
