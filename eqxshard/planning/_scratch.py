"""The memory that convolutions on CPUs take beside what XLA counts, which is measured.

The library that XLA hands them to (Eigen) copies its input, block by block, into an order
of its own. How much of it at a time depends on shapes, on caches and on the threads, of
which there are as many as devices: where four devices take a layer of LeNet, each takes
nine times what one takes alone.
"""

import ctypes
import gc
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..compiled._hlo import Module, Shape
from ..sharding._mesh import make_mesh
from ..training._compile import jit_on
from ._costs import DTYPES, Costs

#: Only the convolutions with the most to copy are run.
_MOST = 4
#: Threads do not meet in the same way each time; a step's peak is where most of them do.
_RUNS = 5
#: Nobody trains on more simulated devices.
_DEVICES = 16

#: The order of dims that the library takes.
_ORDER = re.compile(r"dim_labels=b(\d+)f_\1io->b\1f")
_COUNTS = ("feature_group_count", "batch_group_count")
_M_MMAP_THRESHOLD = -3


class Convolution(NamedTuple):
    """A convolution of (batch, ..., in) with (..., in, out).

    - `shapes`: of the two operands, and of the result.
    - `options`: of `jax.lax.conv_general_dilated`, as a tuple of pairs.
    """

    shapes: tuple[Shape, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def copied(self) -> int:
        """All that there is to copy: of each position of the result, the window."""
        _, kernel, out = self.shapes
        return math.prod(out.dims[:-1]) * math.prod(kernel.dims[:-1])


def convolution_scratch(module: Module, devices: int) -> int:
    """Run the convolutions of a step, each on all devices at once.

    **Arguments:**

    - `module`: the step, compiled for simulated devices, which this process has.
    - `devices`: how many it runs on.

    **Returns:**

    By how many bytes this process grew beside what XLA counts; 0 where it cannot tell.
    """
    found = sorted(set(find_convolutions(module)), key=lambda x: x.copied)[-_MOST:]
    if not found or sys.platform != "linux" or devices > _DEVICES:
        return 0
    # What is freed goes back to the system at once, so that it does not count.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 2**16)
    mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
    runs = [_compile(each, mesh) for each in found]
    gc.collect()
    libc.malloc_trim(0)
    before = _memory("VmRSS")
    return max(0, max(run() - before for run in runs))


def find_convolutions(module: Module) -> Iterator[Convolution]:
    """Those that the library runs that copies; XLA has plain loops for others."""
    costs = Costs(module)
    for instruction in module.instructions():
        attributes = instruction.attributes
        if instruction.opcode != "convolution" or not _ORDER.search(attributes):
            continue
        shapes = [x for each in costs.operand_shapes(instruction) for x in each]
        if all(shape.dtype in DTYPES for shape in shapes):
            rank = len(shapes[0].dims) - 2
            window = instruction.attribute("window") or ""
            options = {
                "window_strides": _numbers(window, "stride", rank),
                "padding": _padding(window, rank),
                "lhs_dilation": _numbers(window, "lhs_dilate", rank),
                "rhs_dilation": _numbers(window, "rhs_dilate", rank),
            }
            options |= {x: int(instruction.attribute(x) or 1) for x in _COUNTS}
            yield Convolution((*shapes, *instruction.shapes), tuple(options.items()))


def _numbers(window: str, name: str, rank: int) -> tuple[int, ...]:
    """An entry of a window, such as `stride=2x2`."""
    found = re.search(rf"\b{name}=([\dx]+)", window)
    return tuple(map(int, found[1].split("x"))) if found else (1,) * rank


def _padding(window: str, rank: int) -> tuple[tuple[int, ...], ...]:
    """As `pad=0_1x-1_0`: before and after each dim."""
    found = re.search(r"\bpad=([-\dx_]+)", window)
    sides = found[1].split("x") if found else ["0_0"] * rank
    return tuple(tuple(map(int, side.split("_"))) for side in sides)


def _compile(convolution: Convolution, mesh: Mesh) -> Callable[[], int]:
    """Returns a function that runs it, and says what the process has then beside arrays."""
    last = len(convolution.shapes[0].dims) - 1
    batch_first = (0, last, *range(1, last))
    numbers = jax.lax.ConvDimensionNumbers(
        batch_first, (last, last - 1, *range(last - 1)), batch_first
    )

    def convolve(lhs: jax.Array, kernel: jax.Array) -> jax.Array:
        options = dict(convolution.options)
        return jax.lax.conv_general_dilated(
            lhs, kernel, dimension_numbers=numbers, **options
        )

    each = PartitionSpec("data")
    on_all = jax.shard_map(convolve, mesh=mesh, in_specs=each, out_specs=each)
    rows = NamedSharding(mesh, each)
    shapes = [
        jax.ShapeDtypeStruct(
            (mesh.size * x.dims[0], *x.dims[1:]), DTYPES[x.dtype], sharding=rows
        )
        for x in convolution.shapes[:2]
    ]
    jitted = jit_on(mesh, on_all, out_shardings=rows)
    analysis: Any = jitted.compile(*shapes).compiled.memory_analysis()

    def run() -> int:
        operands = [jax.device_put(np.zeros(x.shape, x.dtype), rows) for x in shapes]
        peaks = []
        for _ in range(_RUNS):
            Path("/proc/self/clear_refs").write_text("5")  # It starts the peak anew.
            jax.block_until_ready(jitted(*operands))
            peaks.append(_memory("VmHWM"))
        arrays = sum(x.nbytes for x in operands)
        results = analysis.output_size_in_bytes + analysis.temp_size_in_bytes
        return max(peaks) - arrays - mesh.size * results

    return run


def _memory(name: str) -> int:
    """What this process has in memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith(name))
