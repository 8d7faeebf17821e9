"""Find arrays of a trace that a model keeps where JAX does not see them."""

import dataclasses
import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ..sharding._leaves import format_array, is_array, leaf_path

#: What holds no arrays, or too much to look through.
_PLAIN = (type, ModuleType, str, bytes, int, float, complex, np.ndarray, jax.Array)


def check_no_tracers(model: PyTree) -> None:
    """Refuse a model that is traced, with traced arrays in its static parts.

    They have no values, and a step that uses one fails far from where it was made.
    """
    for path, part in _static_parts(model, ()):
        tracer = _find_tracer(part)
        if tracer is not None:
            raise ValueError(
                f"{leaf_path(path)} keeps an array, {format_array(tracer)}, that was made "
                "in make_model, which init_state runs under jit, where arrays have no "
                "values; keep arrays in fields of the model, or make the model first and "
                "write make_model=lambda key: model (it is then whole on one device before "
                "it is split)."
            )


def _static_parts(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """What of a PyTree is not its arrays: leaves, and what nodes keep beside theirs."""
    below = lambda x: x is not node  # noqa: E731
    children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=below)
    if jax.tree_util.treedef_is_leaf(treedef):
        if not is_array(node):
            yield path, node
        return
    if dataclasses.is_dataclass(node):
        names = {f.name for f in dataclasses.fields(node)}
        names -= {getattr(keys[0], "name", None) for keys, _ in children}
        for name in names:
            at = (*path, jax.tree_util.GetAttrKey(name))
            yield at, getattr(node, name, None)
    else:
        yield path, treedef.node_data()
    for keys, child in children:
        yield from _static_parts(child, (*path, *keys))


def _find_tracer(whole: Any) -> Tracer | None:
    """A traced array that an object refers to, however deep."""
    stack, seen = [whole], set()
    while stack:
        part = stack.pop()
        if isinstance(part, Tracer):
            return part
        if id(part) not in seen and not isinstance(part, _PLAIN):
            seen.add(id(part))
            stack += _refers_to(part)
    return None


def _refers_to(part: Any) -> list[Any]:
    if isinstance(part, FunctionType):  # Whose globals are not its own.
        return [part.__closure__, part.__defaults__, part.__kwdefaults__, part.__dict__]
    # JAX's own objects also refer to its caches. What they wrap is in `__dict__`.
    is_jax = type(part).__module__.startswith("jax")
    own = [] if is_jax else gc.get_referents(part)
    return [*own, getattr(part, "__dict__", None)]
