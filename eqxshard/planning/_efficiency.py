"""How much of its peaks a device reaches, by kind of work: how long a step takes about."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """The seconds of kernels at the peaks of a device, by what they wait for.

    - `least`: all of them.
    - `products`: of matrix products, longer by what their shapes leave idle.
    - `attention`: of fused attention.
    - `memory`: of kernels that wait for memory.
    - `kernels`: their number.
    """

    least: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    kernels: int = 0

    def __add__(self, other: tuple) -> "Work":
        seconds = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        return Work(*seconds, kernels=self.kernels + other[4])


@dataclass(frozen=True)
class Efficiency:
    """How much of its peaks a kind of device reaches in steps, by kind of work.

    Without arguments, all of them.

    - `products`: of `flops`, in large matrix products.
    - `attention`: of `flops`, in fused attention.
    - `memory`: of `bandwidth`.
    - `link`, `network`: of the fields of these names, in large collectives.
    - `launch`: the seconds from one kernel to the next.
    - `latency`: the seconds that a collective takes beside those of its bytes.
    - `hop`: the same for each other host that takes part.
    - `power`: the limit of power, in watts, at which all this was found; `None` if it does
        not matter.
    - `exponent`: matrix products and attention are as fast as the limit of power to the
        power of this.
    - `overall`: of all speeds. Of a run that was planned and measured, it is
        `plan.time.about.step / seconds`.
    """

    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0
    launch: float = 0.0
    latency: float = 0.0
    hop: float = 0.0
    power: float | None = None
    exponent: float = 0.0
    overall: float = 1.0

    def seconds(self, work: Work, power: float | None) -> float:
        """How long kernels take under a limit of power."""
        full = self.power
        clock = (power / full) ** self.exponent if power and full else 1.0
        arithmetic = work.products / self.products + work.attention / self.attention
        took = arithmetic / clock + work.memory / self.memory + work.kernels * self.launch
        return took / self.overall

    def sending(self, seconds: float, part: float, hosts: int) -> float:
        """How long a collective takes that needs so long at the peak."""
        latency = self.latency + self.hop * (hosts - 1)
        return (seconds / part + latency) / self.overall


#: The rows and columns of a result that one core of a GPU computes at a time, and the
#: depth whose time it takes to begin and to write that: tiles of 128 x 256, and 64 of the
#: depth in each load, as CUTLASS and cuBLAS have them on Hopper.
_TILE, _DEPTH = (128, 256), 64


def idle(
    rows: int | float,
    columns: int | float,
    depth: int | float,
    batch: int | float,
    cores: int,
) -> float:
    """The part of a GPU that a matrix product of this shape leaves idle.

    The last wave of tiles does not fill all cores (NVIDIA, "Matrix Multiplication
    Background User's Guide", wave quantization), and each tile begins and ends alone.

    **Arguments:**

    - `rows`, `columns`: of one result.
    - `depth`: the dim that is summed over.
    - `batch`: the number of results.
    - `cores`: the GPU's streaming multiprocessors.
    """
    tiles = batch * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    waves = tiles / cores
    return 1 - waves / math.ceil(waves) * depth / (depth + _DEPTH)
