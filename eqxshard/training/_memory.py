"""Out of memory: what a step needs on each device, and what to try."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..pages._format import format_bytes
from ..sharding._combinators import HOST_MEMORY
from ..sharding._leaves import array_leaves
from ..sharding._mesh import batch_axes
from ..sharding._text import comma_list
from ._device_batches import DeviceBatches
from ._jit import Program

if TYPE_CHECKING:
    from ._step import Call

#: How the allocators of JAX's backends say it, besides RESOURCE_EXHAUSTED.
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
    """Whether an error says that a device, or the host, is out of memory."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return isinstance(error, MemoryError)
    said = str(error)
    # Tensorstore says it of a full disk, and gRPC of a long message.
    exhausted = "RESOURCE_EXHAUSTED" in said and "No space left" not in said
    return exhausted or any(words in said for words in _WORDS)


def says_what_it_needs(error: BaseException) -> bool:
    """Whether an error for want of memory has a note of `Memory` or `explaining_state`."""
    notes: list[str] = getattr(error, "__notes__", [])
    return any(note.endswith((REMEDY, _STATE_REMEDY)) for note in notes)


@dataclass(frozen=True)
class Memory:
    """What a program needs on each device, in bytes.

    - `name`: of the program.
    - `mesh`: the mesh that it runs on.
    - `parts`: of what it is given, by name.
    - `temporaries`, `peak`: of what exists only while it runs, and the most at once, as
        XLA says; `None` if that is not known.
    """

    name: str
    mesh: Mesh
    parts: Mapping[str, int]
    temporaries: int | None
    peak: int | None

    @staticmethod
    def of(
        name: str, call: "Call", batch: PyTree, program: Program | None = None
    ) -> "Memory":
        """What the program of a step needs, called with these arguments.

        **Arguments:**

        - `name`: of the program.
        - `call`, `batch`: what it is called with. Arrays may be donated.
        - `program`: what was compiled, if it is at hand.
        """
        mesh = call.variant.mesh
        parts = {each: _bytes(tree) for each, tree in arguments_of(call).items()}
        examples = batch.examples if isinstance(batch, DeviceBatches) else batch
        devices = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
        of_batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(examples))
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
        """What this needs, what the devices have, and what to do."""
        stats: Mapping[str, int] = next(
            (device.memory_stats() or {} for device in self.mesh.local_devices), {}
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
    """Say of an error for want of memory what the arrays that are made take.

    **Arguments:**

    - `state`: arrays, or `jax.ShapeDtypeStruct`s, by what they are called.
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
    """The arrays that a step is given, but for the batch, by what they are called."""
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
