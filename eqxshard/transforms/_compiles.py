"""Every compile of a step or function after the first is explained, or refused.

JAX says when it starts to trace, lower or compile a function, and how long that took. Each
call leaves a note of itself for the listeners here. Its arguments are looked at only if it
compiles.
"""

import contextlib
import dataclasses
import logging
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import PyTree

from ..distributed import is_main_process
from ..sharding._leaves import is_array, leaf_path
from ..sharding._mesh import format_sharding
from ..sharding._text import first_few

_LOG = logging.getLogger(__name__)

_EVENTS = "/jax/core/compile/"
_COMPILED = _EVENTS + "backend_compile_duration"
#: How many characters of a static value's text are shown.
_MAX_TEXT = 80

_REMEDIES = {
    "structure": "Pass the same arguments, of the same structure.",
    "shape": "Keep shapes the same.",
    "batch": "Loader(remainder=...) pads or drops the last batch.",
    "dtype": "Convert to one dtype.",
    "weak_type": "Make it with a dtype, such as jnp.float32(2).",
    "sharding": "Place it with filter_shard.",
    "static": (
        "Pass a number that changes as an array; make other objects once, or give them "
        "__eq__ and __hash__."
    ),
}
_NO_DIFFERENCE = (
    "No argument differs; a JAX setting or the mesh in context may have changed."
)


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
        self._compiles: list[tuple[str, _Description]] = []
        _listen()

    @property
    def is_full(self) -> bool:
        """Whether the allowed compiles are used up."""
        # Threads that compile at the same time may use up more.
        return self._max_compiles is not None and self._max_compiles <= len(self._compiles)

    def refusal(self, program: str, description: "_Description") -> str:
        """The error message for one more."""
        return (
            f"{program} would have to compile, and max_compiles={self._max_compiles} "
            f"allows no more. {self._explain(program, description)}"
        )

    def add(self, program: str, description: "_Description", seconds: float) -> None:
        """Remember a compile, and report it if it is not the first of the program."""
        again = any(program == name for name, _ in self._compiles)
        if again and self._max_compiles is None and is_main_process():
            _LOG.warning(
                "%s compiled again, in %.2g s. %s If you expect this, say so with "
                "max_compiles=%d.",
                program,
                seconds,
                self._explain(program, description),
                len(self._compiles) + 1,
            )
        self._compiles.append((program, description))

    def _explain(self, program: str, description: "_Description") -> str:
        """How arguments differ from those of the nearest compile, and what to do."""
        same = [each for name, each in self._compiles if name == program]
        # Of equally near ones, the last: a function may be made anew for each call.
        earlier = reversed(same or [each for _, each in self._compiles])
        nearest = min(([*_differences(each, description)] for each in earlier), key=len)
        if not nearest:
            return _NO_DIFFERENCE
        kinds = {difference.kind for difference in nearest}
        if any(each.kind == "shape" and _is_of_batch(each.path) for each in nearest):
            kinds.add("batch")
        changed = first_few([str(difference) for difference in nearest], "; ")
        remedies = [text for kind, text in _REMEDIES.items() if kind in kinds]
        return " ".join([f"Changed: {changed}.", *remedies])


def function_name(fn: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    return getattr(fn, "__name__", type(fn).__name__)


class Watch(NamedTuple):
    """What the compiles of a compiled function are reported as.

    - `log`: where they are counted.
    - `name`: the function's name in JAX.
    - `name_arguments`: from the arguments of a call to the name of the program, whose
        first compile is expected, and the arguments by name.
    """

    log: CompileLog
    name: str
    name_arguments: Callable[..., tuple[str, Mapping[str, PyTree]]]

    def add(self, args: tuple[Any, ...], seconds: Mapping[str, float]) -> None:
        """Log the compile of a call that succeeded, if it compiled, and its phases."""
        if _COMPILED in seconds:
            self.log.add(*self._described(args), sum(seconds.values()))

    def refusal(self, args: tuple[Any, ...]) -> str:
        """The error message for a call that has to compile once too often."""
        return self.log.refusal(*self._described(args))

    def _described(self, args: tuple[Any, ...]) -> tuple[str, "_Description"]:
        try:
            program, arguments = self.name_arguments(*args)
        except Exception:  # It makes the user's objects, whose code may raise anything.
            return self.name, {}
        return program, _description(arguments)


class _Thread(threading.local):
    """The call that a thread is in.

    It is how to report the call's compiles, its arguments, and the seconds of each phase
    of its compile, by event.
    """

    def __init__(self):
        self.call: tuple[Watch | None, tuple[Any, ...], dict[str, float]] = None, (), {}


#: Set `call` around each call, and back after it: it keeps the arguments alive. If seconds
#: were noted and the call returned, give them to `Watch.add`: JAX times what fails, too.
#: (A context manager would cost several times as much.)
THREAD = _Thread()


def _listen() -> None:
    """Register the listeners again: somebody may have cleared all."""
    with contextlib.suppress(AssertionError, ValueError):
        jax.monitoring.unregister_scalar_listener(_on_start)
    with contextlib.suppress(AssertionError, ValueError):
        jax.monitoring.unregister_event_duration_listener(_on_end)
    jax.monitoring.register_scalar_listener(_on_start)
    jax.monitoring.register_event_duration_secs_listener(_on_end)


def _on_start(event: str, value: float, **info: Any) -> None:
    """Refuse to compile once too often."""
    watch, args, _ = THREAD.call
    if event != _COMPILED or watch is None or not watch.log.is_full:
        return
    if _is_of(watch, args, info):
        # Before XLA compiles and arrays are donated, and after errors of tracing and
        # lowering, which say more.
        raise ValueError(watch.refusal(args))


def _on_end(event: str, duration_secs: float, **info: Any) -> None:
    """Note the seconds of a phase."""
    watch, args, seconds = THREAD.call
    if watch is not None and event.startswith(_EVENTS) and _is_of(watch, args, info):
        seconds[event] = duration_secs


def _is_of(watch: Watch, args: tuple[Any, ...], info: Mapping[str, Any]) -> bool:
    """Whether an event is about the function that is called."""
    # Other functions may compile while this one is traced.
    if info.get("fun_name") not in (watch.name, f"jit({watch.name})"):
        return False
    # A transform of it, such as by jax.vmap, is a function of its own.
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))


class _Array(NamedTuple):
    """The part of an array that a program depends on."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Sharding | None

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class _Value:
    """A static value; or, of kind `structure`, the type and data of an inner node."""

    value: Any
    kind: str = "static"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:  # The value's own code may raise anything.
            return False

    def __str__(self) -> str:
        if self.kind == "structure":
            node, data = self.value
            return node.__name__ if data is None else f"{node.__name__} {_value_text(data)}"
        return _value_text(self.value)


_Description = dict[str, _Array | _Value]


class _Difference(NamedTuple):
    """A change at a path, and its kind, which the remedy depends on."""

    kind: str
    path: str
    before: str
    now: str

    def __str__(self) -> str:
        what = f" {self.kind}" if self.kind in _Array._fields else ""
        return f"{self.path}:{what} {self.before} -> {self.now}"


def _description(arguments: Mapping[str, PyTree]) -> _Description:
    found: _Description = {}
    for name, argument in arguments.items():
        try:
            found.update(_entries(argument, (), name))
        except Exception:  # The fields of the user's objects may raise anything.
            found[name] = _Value(type(argument))
    return found


def _entries(
    node: PyTree, path: tuple[Any, ...], root: str
) -> Iterator[tuple[str, _Array | _Value]]:
    """The leaves of a PyTree, its inner nodes, and the static fields of its modules."""
    here = leaf_path(path, root)
    if is_array(node):
        aval = jax.typeof(node)
        committed = not isinstance(node, jax.Array) or node.committed
        sharding = getattr(node, "sharding", None) if committed else None
        yield here, _Array(aval.shape, aval.dtype, aval.weak_type, sharding)
        return
    is_child = lambda x: x is not node  # noqa: E731
    data = jax.tree.structure(node, is_leaf=is_child).node_data()
    if data is None or node is None:
        yield here, _Value(node)
        return
    kind, aux = data
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_child)
    fields = _static_fields(node, [key for (key,), _ in children])
    if fields or type(node) is dict:
        aux = None  # The fields or the keys, which have paths of their own.
    yield here, _Value((kind, aux), "structure")
    for name, value in fields.items():
        yield f"{here}.{name}", _Value(value)
    for (key,), child in children:
        yield from _entries(child, (*path, key), root)


def _static_fields(node: PyTree, keys: list[Any]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(node):
        return {}
    if not all(isinstance(key, jax.tree_util.GetAttrKey) for key in keys):
        return {}
    names = {field.name for field in dataclasses.fields(node)} - {key.name for key in keys}
    return {name: getattr(node, name) for name in sorted(names) if hasattr(node, name)}


def _differences(before: _Description, now: _Description) -> Iterator[_Difference]:
    reported: list[str] = []
    for path in {**before, **now}:
        old, new = before.get(path), now.get(path)
        if isinstance(old, _Array) and isinstance(new, _Array):
            for kind, was, is_now in zip(_Array._fields, old, new):
                if was != is_now:
                    yield _Difference(kind, path, *_property_texts(was, is_now))
        elif old != new:
            # Below a node that came or went, all did.
            if (old is None or new is None) and path.startswith(tuple(reported)):
                continue
            reported.append(f"{path}.")
            kinds = {getattr(old, "kind", None), getattr(new, "kind", None)}
            kind = "static" if kinds == {"static"} else "structure"
            was, is_now = str(old or "absent"), str(new or "absent")
            yield _Difference(kind, path, was, _again(old) if is_now == was else is_now)


def _again(value: _Array | _Value | None) -> str:
    """What differs from a value, and has the same text."""
    is_node = isinstance(value, _Value) and value.kind == "structure"
    # As if the cell of a notebook that defines it ran again.
    return "another class of this name" if is_node else "another object like it"


def _property_texts(was: Any, now: Any) -> tuple[str, str]:
    """Two values of a property of an array, which differ."""
    before, after = _property_text(was), _property_text(now)
    if before != after:
        return before, after
    # Shardings, over other devices or in another order; or else in other memories.
    pairs = zip(_device_ids(was), _device_ids(now))
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    if not changed:
        return repr(was), repr(now)
    ids_before, ids_now = (first_few([*map(str, ids)]) for ids in zip(*changed))
    return f"{before}, devices {ids_before}", f"devices {ids_now}"


def _property_text(value: Any) -> str:
    if isinstance(value, Sharding):
        return format_sharding(value)
    return "uncommitted" if value is None else str(value)


def _device_ids(sharding: Sharding) -> list[int]:
    """The devices, in the order of the mesh if there is one."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return [device.id for device in sharding.mesh.devices.flat]
    return sorted(device.id for device in sharding.device_set)


def _is_of_batch(path: str) -> bool:
    return path.partition(".")[0] == "batch"


class _Repr(reprlib.Repr):
    """The `repr` of the first entries only, of containers of any size."""

    def __init__(self):
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = _MAX_TEXT

    def repr_instance(self, x: Any, level: int) -> str:
        # Unlike its base, which names the address of an object whose own code raises.
        try:
            text = repr(x)
        except Exception:
            return type(x).__name__
        return text if len(text) <= self.maxother else f"{text[: self.maxother]}..."


_REPR = _Repr()


def _value_text(value: Any) -> str:
    """A static value in a few words."""
    try:
        name = getattr(value, "__qualname__", None)
        if name is not None:  # A function, or what `jax.jit` and others made of one.
            return f"{value.__module__}.{name}"
        text = " ".join(_REPR.repr(value).split())
    except Exception:  # The value's own code may raise anything.
        return type(value).__name__
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
