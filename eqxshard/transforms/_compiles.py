"""Every compile of a step or function after the first is explained, or refused.

What `jax.jit` compiles runs as Python only while JAX traces it. There it tells its
`CompileLog` the arguments. (JAX traces nothing again if shardings alone differ.)
"""

import contextlib
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from .._errors import UsageError
from ..distributed import is_main_process
from ..sharding._leaves import format_array, is_array, leaf_path
from ..sharding._text import first_few

_LOG = logging.getLogger(__name__)

_REMEDY = (
    "Keep shapes, dtypes and structures the same (Loader(remainder=...) pads or drops the "
    "last batch); pass a number that changes as an array, and make other objects once, or "
    "give them __eq__ and __hash__."
)
_NO_DIFFERENCE = (
    "No argument differs in its shapes, dtypes or static parts; a JAX setting, the mesh in "
    "context, or the mesh that an array is on may have changed."
)

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80

#: What compiled functions depend on, by path: types of arrays, classes of inner nodes, and
#: static values.
_Description = Mapping[str, Any]


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
            raise UsageError(
                f"max_compiles={max_compiles} must be at least 1, or None for any number."
            )
        self._max_compiles = max_compiles
        self._count = 0
        #: By program, and what it is made for, the arguments of its last compile.
        self._last: dict[tuple[str, Any], _Description] = {}

    @contextlib.contextmanager
    def compiling(
        self, program: str, arguments: Mapping[str, PyTree], made_for: Any = None
    ) -> Iterator[None]:
        """Count a compile. Enter it in the function that is traced, around the user's code.

        A trace that raises compiles nothing, and does not count.

        **Arguments:**

        - `program`: its name. The first compile of each is expected.
        - `arguments`: by name.
        - `made_for`: what the program is made for, such as a mesh and a rule. The first
            compile for each is expected, too.

        **Raises:**

        `ValueError` if no more compiles are allowed; nothing is donated then.
        """
        arrays = [x for x in jax.tree.leaves(arguments) if is_array(x)]
        if arrays and not any(isinstance(x, Tracer) for x in arrays):
            yield  # Under jax_debug_nans, JAX calls functions without tracing them.
            return
        found = {
            path: _without_arrays(part)
            for name, argument in arguments.items()
            for path, part in tree_parts(argument, name)
        }
        key = program, made_for
        again = key in self._last
        # Or of another program, such as that of several batches.
        last = self._last.get(key, next(reversed(self._last.values()), {}))
        if self._max_compiles is not None and self._count >= self._max_compiles:
            raise UsageError(
                f"{program} would have to compile, and max_compiles={self._max_compiles} "
                f"allows no more. {_explain(last, found)}"
            )
        yield
        self._count += 1
        self._last[key] = found
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


class absent:
    """Stands for what one of two calls does not have."""


def tree_parts(
    node: PyTree, root: str = "", path: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """The parts of a PyTree, each with its path.

    Of an array, that is its type; of an inner node, its class and its static parts.
    """
    here = leaf_path(path, root)
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    if is_array(node):
        weak = jax.typeof(node).weak_type
        yield here, jax.ShapeDtypeStruct(node.shape, node.dtype, weak_type=weak)
    elif node is None or any(child is node for _, child in children):
        yield here, node
    else:
        yield here, type(node)
        yield from _static_parts(node, here, [keys[0] for keys, _ in children])
        for keys, child in children:
            yield from tree_parts(child, root, (*path, *keys))


def _static_parts(node: Any, here: str, keys: list[Any]) -> Iterator[tuple[str, Any]]:
    """The static fields of a dataclass; of another node, all that is not its children."""
    if isinstance(node, dict | list | tuple):
        return  # The keys of a dict are in the paths of its entries.
    fields = {field.name for field in getattr(node, "__dataclass_fields__", {}).values()}
    children = {getattr(key, "name", None) for key in keys}
    # Classes that are registered without keys do not say which fields are children.
    if fields and children <= fields:
        for name in sorted(fields - children):
            yield f"{here}.{name}".lstrip("."), getattr(node, name, None)
        return
    structure = jax.tree.structure(node, is_leaf=lambda x: x is not node)
    static: Any = structure.node_data()
    if static[1] is not None:
        yield f"{here} (static)".lstrip(), static[1]


def _without_arrays(part: Any) -> Any:
    """A part of a PyTree with the types of its arrays in their places.

    It outlives the trace, which its tracers must not: to compare them would trace, too.
    """
    try:
        leaves, structure = jax.tree.flatten(part)
        if not any(isinstance(leaf, jax.Array) for leaf in leaves):
            return part
        types = [jax.typeof(x) if isinstance(x, jax.Array) else x for x in leaves]
        return jax.tree.unflatten(structure, types)
    except Exception:  # The part's own code may raise anything.
        return type(part)


def _explain(before: _Description, now: _Description) -> str:
    """How arguments differ from those of an earlier compile, and what to do."""
    changes: dict[str, str] = {}
    for path in {**before, **now}:
        # Below a node that came or went, all did.
        if path.startswith(tuple(f"{above}." for above in changes)):
            continue
        old, new = before.get(path, absent), now.get(path, absent)
        if not _is_same(old, new):
            was, is_now = _text(old), _text(new)
            is_now = "another like it" if was == is_now else is_now
            changes[path] = f"{path}: {was} -> {is_now}"
    if not changes:
        return _NO_DIFFERENCE
    return f"Changed: {first_few([*changes.values()], '; ')}. {_REMEDY}"


def _is_same(old: Any, new: Any) -> bool:
    try:
        return old is new or (type(old) is type(new) and bool(old == new))
    except Exception:  # The value's own code may raise anything.
        return False


def _text(value: Any) -> str:
    """A type, or a static value, in a few words."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return format_array(value) + (" (weak type)" if value.weak_type else "")
    try:
        name = getattr(value, "__qualname__", None)
        if name is not None:  # A class, a function, or what `jax.jit` made of one.
            return name if isinstance(value, type) else f"{value.__module__}.{name}"
        return " ".join(_REPR.repr(value).split())
    except Exception:  # The value's own code may raise anything.
        return type(value).__name__
