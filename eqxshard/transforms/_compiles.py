"""Every compile of a step or function after the first is explained in the log, or refused.

A function under `jax.jit` runs as Python only while JAX traces it. There it gives its
arguments to its `CompileLog`. (On Auto axes, JAX does not trace a function again if only
the shardings differ.)
"""

import contextlib
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from .._errors import UsageError
from .._jax import Tracer
from ..distributed import is_main_process
from ..sharding._leaves import format_array, is_array, leaf_path
from ..sharding._mesh import format_sharding
from ..sharding._spec import format_spec
from ..sharding._text import first_few

_LOG = logging.getLogger(__name__)

#: How many programs a step or a function keeps: those that were used last.
MAX_PROGRAMS = 64

_REMEDY = (
    "Keep shapes, dtypes, shardings and structures the same (Loader(remainder=...) pads or "
    "drops the last batch), and pass a number that changes as an array."
)
_NO_DIFFERENCE = (
    "No array and no number in its arguments differs. Another object does (make it once, "
    "or give it __eq__ and __hash__), or a JAX setting, or the mesh in context."
)


class CompileLog:
    """Explains each compile of a program but the first.

    **Arguments:**

    - `max_compiles`: how many compiles of all programs are allowed; `None` for any number.

    **Raises:**

    `ValueError` if `max_compiles` is not positive.
    """

    def __init__(self, max_compiles: int | None = None):
        if max_compiles is not None and max_compiles < 1:
            raise UsageError(
                f"max_compiles={max_compiles} must be at least 1, or None for any number."
            )
        self._max_compiles = max_compiles
        self._count = 0
        #: The arguments of the last compile of each program, by its name and `made_for`.
        self._last: dict[tuple[str, Any], Mapping[str, str]] = {}

    @contextlib.contextmanager
    def compiling(
        self, program: str, arguments: Mapping[str, PyTree], made_for: Any = None
    ) -> Iterator[None]:
        """Log a compile. Enter it in the function that is traced, around the user's code.

        A trace that raises compiles nothing, and is not remembered.

        **Arguments:**

        - `program`: its name. The first compile of each is expected.
        - `arguments`: its arguments, by name.
        - `made_for`: what the program is made for, such as a mesh and a rule. The first
            compile for each is expected, too.

        **Raises:**

        `ValueError` if no more compiles are allowed; nothing is donated then.
        """
        arrays = [x for x in jax.tree.leaves(arguments) if is_array(x)]
        if arrays and not any(isinstance(x, Tracer) for x in arrays):
            yield  # Under jax_debug_nans, JAX calls functions without tracing them.
            return
        now = _describe(arguments)
        key = program, made_for
        before = self._last.get(key)
        if self._max_compiles is not None and self._count >= self._max_compiles:
            # Or the last compile of another program, such as that for several batches.
            last = before or next(reversed(self._last.values()), {})
            raise UsageError(
                f"{program} would have to compile, and max_compiles={self._max_compiles} "
                f"allows no more. {_explain(last, now)}"
            )
        yield
        self._count += 1
        self._last.pop(key, None)
        self._last[key] = now
        if len(self._last) > MAX_PROGRAMS:
            del self._last[next(iter(self._last))]
        if before is not None and is_main_process():
            _LOG.warning("%s compiles again. %s", program, _explain(before, now))


def function_name(fn: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    return getattr(fn, "__name__", type(fn).__name__)


def _describe(arguments: Mapping[str, PyTree]) -> dict[str, str]:
    """Each leaf of the arguments in a few words, by path.

    Texts outlive the trace, as its tracers must not.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        dict(arguments), is_leaf=lambda leaf: leaf is None
    )
    return {leaf_path(path): _text(leaf) for path, leaf in leaves}


def _text(leaf: Any) -> str:
    if is_array(leaf):
        kind = jax.typeof(leaf)
        split = format_spec(kind.sharding.spec) if any(kind.sharding.spec) else ""
        return " ".join(
            filter(None, [format_array(leaf), split, "(weak type)" * kind.weak_type])
        )
    if isinstance(leaf, jax.sharding.Sharding):
        return format_sharding(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | complex | str):
        return reprlib.repr(leaf)
    # The text of another object may be anything.
    return type(leaf).__name__


def _explain(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """How arguments differ from those of the compile before, and what to do."""
    changes = [
        f"{path}: {before.get(path, 'absent')} -> {now.get(path, 'absent')}"
        for path in {**before, **now}
        if before.get(path) != now.get(path)
    ]
    if not changes:
        return _NO_DIFFERENCE
    return f"Changed: {first_few(changes, '; ')}. {_REMEDY}"
