"""Notes on errors: on those of a user's functions, and on those of memory.

The first also get a short traceback. The others say how much a step needs on each device,
and what to try.
"""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from .._errors import ON_PURPOSE, UsageTypeError
from ..compiled._causes import is_ours
from ..sharding._combinators import HOST_MEMORY
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import batch_axes
from ..sharding._spec import AnyMesh
from ..sharding._text import comma_list, did_you_mean, format_bytes
from ..transforms._compiles import function_name
from ._inputs import DeviceBatches
from ._jit import Program

if TYPE_CHECKING:
    from ._step import Call


#: The folders of JAX and Equinox.
_THEIRS = tuple(os.path.join(Path(str(x.__file__)).parent, "") for x in (jax, eqx))


class short_traceback:
    """A context that shortens the tracebacks of errors, as `shorten_traceback` does."""

    def __enter__(self) -> None:
        """Nothing is done before."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Shorten the traceback of an error."""
        if isinstance(error, Exception):
            shorten_traceback(error)


def shorten_traceback(error: Exception) -> None:
    """Leave the frames of this library, JAX and Equinox out of a traceback.

    The frames of the user's code and of other libraries stay. All stay if the error is a
    bug of this library, and under `JAX_TRACEBACK_FILTERING=off`.
    """
    if jax.config.values["jax_traceback_filtering"] == "off":
        return
    others, step, is_bug = list[TracebackType](), error.__traceback__, False
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith(_THEIRS):
            is_bug = is_ours(file) and not isinstance(error, ON_PURPOSE)
            others += [] if is_ours(file) else [step]
        step = step.tb_next
    if is_bug:
        return
    short = None
    for step in reversed(others):
        short = TracebackType(short, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = short


def check_takes(fn: Callable[..., Any], name: str, *arguments: str) -> None:
    """Refuse a function that does not take the arguments that a step gives it.

    **Arguments:**

    - `fn`: the function.
    - `name`: its role, such as `loss_fn`.
    - `arguments`: their names.

    **Raises:**

    `TypeError` that says how the function is called.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # Some built-in functions have none.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageTypeError(
            f"{function_name(fn)}{signature} is called as "
            f"{name}({', '.join(arguments)}), which it does not take ({error}); write a "
            "function of these arguments."
        ) from None


def add_advice(error: Exception, batch: PyTree, *, stateful: bool) -> None:
    """Note on an error of a loss or metric function which batch it was given.

    An error that is meant for users says what to do itself, and gets no note.

    **Arguments:**

    - `error`: caught where the function was called.
    - `batch`: the batch that the function got.
    - `stateful`: whether the model has state, such as that of BatchNorm.
    """
    if isinstance(error, ON_PURPOSE):
        return
    entries = (f"{name} {format_array(leaf)}" for name, leaf in array_leaves(batch))
    error.add_note(f"The batch was: {comma_list(entries)}.")
    if stateful and isinstance(error, TypeError | AttributeError):
        error.add_note(
            "The model has state: loss_fn and metric_fn get the pair (model, state), and "
            "eval_step and predict are given (state.model, state.model_state)."
        )
    if isinstance(error, KeyError) and isinstance(batch, Mapping):
        name = error.args[0] if error.args else None
        if isinstance(name, str) and name not in batch:
            hint = did_you_mean(name, batch)
            error.add_note(f"The batch has no {name!r}; {hint}it has {comma_list(batch)}.")


# Out of memory

#: What the allocators of JAX's backends say, besides RESOURCE_EXHAUSTED.
_WORDS = ("CUDA_ERROR_OUT_OF_MEMORY", "Out of memory", "Ran out of memory")

#: What to do if a step does not fit on its devices.
REMEDY = (
    "use a smaller batch, Precision('bfloat16'), or a rule and a mesh that split the "
    "state, such as fsdp(); in training also accumulate= (the same batch in parts) or "
    "remat (activations computed again)."
)
#: What to do if not even the state fits.
_STATE_REMEDY = "Split it over more devices with fsdp(), or use a smaller model."


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that a device, or the host, is out of memory."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return isinstance(error, MemoryError)
    said = str(error)
    # TensorStore says RESOURCE_EXHAUSTED of a full disk.
    exhausted = "RESOURCE_EXHAUSTED" in said and "No space left" not in said
    return exhausted or any(words in said for words in _WORDS)


def says_what_it_needs(error: BaseException) -> bool:
    """True if an out-of-memory error has a note of `Memory` or `explaining_state`."""
    notes: list[str] = getattr(error, "__notes__", [])
    return any(note.endswith((REMEDY, _STATE_REMEDY)) for note in notes)


@dataclass(frozen=True)
class Memory:
    """The memory that a program needs on each device, in bytes.

    - `name`: the name of the program.
    - `mesh`: the mesh that it runs on.
    - `parts`: the sizes of its arguments, by name.
    - `temporaries`, `peak`: the size of what exists only while it runs, and the most that
        it needs at a time, as XLA says; `None` if that is not known.
    """

    name: str
    mesh: AnyMesh
    parts: Mapping[str, int]
    temporaries: int | None
    peak: int | None

    @staticmethod
    def of(
        name: str, call: "Call", batch: PyTree, program: Program | None = None
    ) -> "Memory":
        """The memory that the program of a step needs for some arguments.

        **Arguments:**

        - `name`: the name of the program.
        - `call`, `batch`: its arguments, whose arrays may be donated.
        - `program`: the compiled program, if it is at hand.
        """
        mesh = call.variant.mesh
        parts = {each: _bytes(tree) for each, tree in arguments_of(call).items()}
        if isinstance(batch, DeviceBatches):
            # Unlike a batch, it is whole on each device.
            parts["dataset"] = _bytes(batch.examples)
        else:
            devices = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
            of_batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch))
            parts["batch"] = of_batch // devices
        analysis = program and program.compiled.memory_analysis()
        return Memory(
            name=name,
            mesh=mesh,
            parts={each: size for each, size in parts.items() if size},
            temporaries=analysis and analysis.temp_size_in_bytes,
            peak=analysis
            and analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes,
        )

    def describe(self) -> str:
        """The memory that the program needs, that the devices have, and what to do."""
        stats: Mapping[str, int] = next(
            (device.memory_stats() or {} for device in _local_devices(self.mesh)), {}
        )
        limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
        parts = dict(self.parts)
        if self.temporaries is not None:
            parts["temporaries"] = self.temporaries
        listed = comma_list(f"{name} {format_bytes(size)}" for name, size in parts.items())
        needs = "more than there is" if self.peak is None else format_bytes(self.peak)
        has = ""
        if limit is not None:
            has = f"; a device has {format_bytes(limit)}"
            has += "" if used is None else f", of which {format_bytes(used)} are in use"
        return f"{self.name} needs {needs} on each device: {listed}{has}. To fit, {REMEDY}"


@contextlib.contextmanager
def explaining_state(state: Mapping[str, PyTree]) -> Iterator[None]:
    """Note on an out-of-memory error how much the arrays take that are being made.

    **Arguments:**

    - `state`: arrays, or `jax.ShapeDtypeStruct`s, by the names that the note gives them.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            parts = {name: format_bytes(_bytes(tree)) for name, tree in state.items()}
            listed = comma_list(f"{name} {size}" for name, size in parts.items())
            error.add_note(
                f"The state could not be made: it takes {listed} on each device. "
                f"{_STATE_REMEDY}"
            )
        raise


def arguments_of(call: "Call") -> dict[str, PyTree]:
    """The arrays that a step is given, but for the batch, by the names in notes."""
    if call.state is None:
        return {"model": call.kept}
    state = {"parameters": call.state.model, "optimizer state": call.state.opt_state}
    return state | {"extra": call.kept} if call.kept else state


def _bytes(tree: PyTree) -> int:
    """The bytes of a PyTree on each device, but for what is in the host's memory."""
    return sum(
        math.prod(_shape(leaf)) * leaf.dtype.itemsize
        for _, leaf in array_leaves(tree)
        if getattr(getattr(leaf, "sharding", None), "memory_kind", None) != HOST_MEMORY
    )


def _shape(leaf: Any) -> tuple[int, ...]:
    """The shape of an array's part on each device."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def _local_devices(mesh: AnyMesh) -> Sequence[Any]:
    return () if isinstance(mesh, AbstractMesh) else mesh.local_devices or ()
