"""Out of memory: what a step needs on each device, and what would make it fit."""

import contextlib
import gc
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..data._resident import DeviceBatches
from ..pages._format import format_bytes
from ..sharding._combinators import HOST_MEMORY
from ..sharding._leaves import array_leaves, is_inexact
from ..sharding._mesh import batch_axes
from ..sharding._text import comma_list
from ._jit import Program
from .rewrite._jaxprs import equations

if TYPE_CHECKING:
    from ._step import Call

#: How the allocators of JAX's backends say it, besides RESOURCE_EXHAUSTED.
_WORDS = ("CUDA_ERROR_OUT_OF_MEMORY", "Out of memory", "Ran out of memory")
#: `fsdp` leaves smaller arrays whole.
_SMALL = 2**18
#: JAX takes 3/4 of a GPU unless one of these variables says otherwise; 0.95 is safe.
_FRACTIONS = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
_TAKEN, _SAFE = 0.75, 0.95


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, is out of memory."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return isinstance(error, MemoryError)
    said = str(error)
    # Tensorstore says it of a full disk, and gRPC of a long message.
    exhausted = "RESOURCE_EXHAUSTED" in said and "No space left" not in said
    return exhausted or any(words in said for words in _WORDS)


@dataclass(frozen=True)
class Memory:
    """What a program needs on each device, in bytes.

    - `name`: of the program.
    - `mesh`: the mesh that it runs on.
    - `parts`: of what it is given, by name.
    - `temporaries`, `peak`: of what exists only while it runs, and the most at once, as
        XLA says; `None` if it did not compile.
    - `split`: the parameters and the optimizer's state, if every array of them that is not
        small were split over all devices.
    - `rows`: of the batch on each device, in each microbatch.
    - `accumulate`: the number of microbatches; `None` for a step that does not train.
    - `is_float32`, `remats`: whether it computes in float32; whether it already computes
        activations again.
    """

    name: str
    mesh: Mesh
    parts: Mapping[str, int]
    temporaries: int | None
    peak: int | None
    split: int
    rows: int
    accumulate: int | None
    is_float32: bool
    remats: bool

    @staticmethod
    def of(name: str, call: "Call", batch: PyTree, program: Program | None) -> "Memory":
        """What the program of a step needs, called with these arguments.

        **Arguments:**

        - `name`: of the program.
        - `call`, `batch`: what it is called with. Arrays may be donated.
        - `program`: what was compiled; `None` if that failed.
        """
        step, state = call.variant, call.state
        trees = arguments_of(call)
        parts = {each: _bytes(tree) for each, tree in trees.items()}
        leaves, rows = jax.tree.leaves(batch), 1
        if isinstance(batch, DeviceBatches):
            leaves, rows = jax.tree.leaves(batch.examples), batch.rows.shape[1]
        elif leaves and step.batch_sharding is not None:
            shape = step.batch_sharding.shard_shape(leaves[0].shape)
            rows = shape[len(step.batch_sharding.spec) - 1]
        devices = math.prod(step.mesh.shape[axis] for axis in batch_axes(step.mesh))
        parts["batch"] = sum(x.size * x.dtype.itemsize for x in leaves) // devices
        analysis = program and program.compiled.memory_analysis()
        model = call.kept if state is None else state.model
        floats = [x.dtype for x in jax.tree.leaves(model) if is_inexact(x)]
        compute = step.precision and step.precision.compute
        inside = () if program is None else equations(program.jaxpr)
        return Memory(
            name=name,
            mesh=step.mesh,
            parts={each: size for each, size in parts.items() if size},
            temporaries=analysis and analysis.temp_size_in_bytes,
            peak=analysis
            and analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes,
            split=_split_bytes([*trees.values()], step.mesh.size),
            rows=max(rows // step.accumulate, 1),
            accumulate=None if state is None else step.accumulate,
            is_float32=jnp.float32 in (floats if compute is None else [jnp.dtype(compute)]),
            remats=any(x.primitive.name in ("checkpoint", "remat2") for x in inside),
        )

    def could_fit(self) -> bool:
        """Whether a device has as much as this needs, if nothing else is on it."""
        limit = _stats(self.mesh).get("bytes_limit")
        return self.peak is None or limit is None or self.peak <= limit

    def describe(self) -> str:
        """What this needs, what the devices have, and what would save most."""
        stats = _stats(self.mesh)
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
        lacks = None if limit is None or self.peak is None else self.peak - limit
        remedies = sorted(self._remedies(stats), key=lambda each: -each[0])
        advice = []
        for saves, what in remedies[:3]:
            if saves < 0.01 * (self.peak or 0):
                break
            enough = ", which is enough" if lacks is not None and saves >= lacks > 0 else ""
            advice.append(f"{what} (saves up to {format_bytes(saves)}{enough})")
        tried = f" Try, what saves most first: {'; '.join(advice)}." if advice else ""
        return f"{self.name} needs {needs} on each device: {listed}{has}.{tried}"

    def _remedies(self, stats: Mapping[str, int]) -> Iterator[tuple[int, str]]:
        """What would make this fit, and the bytes that each would save."""
        limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
        given = sum(self.parts.values())
        kept = given - self.parts.get("batch", 0) - self.parts.get("extra", 0)
        size = self.mesh.size
        if kept - self.split > 0.01 * given:
            yield kept - self.split, f"split the state over all {size} devices: fsdp()"
        elif kept > 0.01 * given:
            yield kept // 2, f"split the state with fsdp() over {2 * size} devices"
        if self.accumulate is not None and self.parts.get("optimizer state"):
            optimizer = self.parts["optimizer state"]
            yield optimizer, "offload(rule), the optimizer's state in the host's memory"
        # Gradients are temporaries too, and take what parameters do.
        gradients = self.parts.get("parameters", 0) if self.accumulate is not None else 0
        activations = max((self.temporaries or 0) - gradients, 0)
        yield from self._of_activations(activations, limit)
        if used is not None and used > 1.01 * given:
            yield used - given, "delete other arrays, such as a second state"
        is_gpu = self.mesh.devices.flat[0].platform == "gpu"
        if limit is not None and is_gpu and not {*_FRACTIONS} & {*os.environ}:
            more = int(limit * (_SAFE / _TAKEN - 1))
            yield more, f"{_FRACTIONS[0]}={_SAFE} in the environment, for {_TAKEN}"

    def _of_activations(
        self, activations: int, limit: int | None
    ) -> Iterator[tuple[int, str]]:
        if not activations:
            return
        parts, rest = 2, (self.peak or 0) - activations
        if limit is not None:
            while parts < self.rows and rest + activations / parts > limit:
                parts *= 2
        if self.rows % parts == 0:
            saves = activations - activations // parts
            batch = f"a batch of 1/{parts} of the rows"
            if self.accumulate is not None:
                batch = f"accumulate={self.accumulate * parts}, or {batch}"
            yield saves, batch
        if self.is_float32:
            yield activations // 2, "Precision('bfloat16')"
        if self.accumulate is not None and not self.remats:
            yield activations, "remat= of scan_layers, or jax.checkpoint around each layer"


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
                f"The state could not be made: it takes {listed} on each device. Split it "
                "over more devices with fsdp(), or use a smaller model."
            )
            handed: Any = error
            handed.is_passing = False
        raise


def arguments_of(call: "Call") -> dict[str, PyTree]:
    """The arrays that a step is given, but for the batch, by what they are called."""
    if call.state is None:
        return {"model": call.kept}
    state = {"parameters": call.state.model, "optimizer state": call.state.opt_state}
    return state | {"extra": call.kept} if call.kept else state


def free_memory() -> None:
    """Free what only cycles of references hold, such as states in old tracebacks."""
    gc.collect()


def _stats(mesh: Mesh) -> Mapping[str, int]:
    """What the runtime says of the memory of a device of this process; CPUs say nothing."""
    return next((x.memory_stats() or {} for x in mesh.local_devices), {})


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


def _split_bytes(trees: list[PyTree], count: int) -> int:
    """`_bytes`, if each array that can be were split over `count` devices."""
    found = 0
    for _, leaf in array_leaves(trees):
        whole, now = leaf.size, math.prod(_shape(leaf))
        splits = whole >= _SMALL and any(size % count == 0 for size in leaf.shape)
        found += (min(now, whole // count) if splits else now) * leaf.dtype.itemsize
    return found
