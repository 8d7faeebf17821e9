"""The time model: about how long kernels and collectives take, and why.

The compiler's schedule (`_timeline`) says which of them run at the same time. This file has
the seconds of each, and every assumption with its source.

**Kernels** run one after the other. Each takes as long as its arithmetic or its memory,
whichever is longer at the peaks.

- Matrix products reach `products` of the peak, less what their shape leaves idle (`idle`).
- Fused attention reaches `attention` of it, copies and elementwise kernels `memory` of the
    bandwidth, and each kernel starts `launch` after the last.
- The clock, and with it all arithmetic, slows down with the power limit to `exponent`.
- Beside a collective, kernels take `1 + contention` times as long, as NCCL's kernels hold
    a part of the cores and of the memory's bandwidth.

**Collectives** go around rings (`_links` counts the bytes and the steps), as NCCL's do.

- Links inside a host reach `link` of their peak, the network `network`.
- Each takes `latency` to start, `step` for each device that it passes inside a host, and
    `hop` for each change of hosts.

The model leaves out the cores that a collective takes from kernels in a loop beside it,
stragglers, congested networks, and the host's own work.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """The seconds of kernels at the peaks of a device, by what they wait for.

    - `least`: the seconds of all kernels.
    - `products`: those of matrix products, longer by what their shapes leave idle.
    - `attention`: those of fused attention.
    - `memory`: those of kernels that wait for memory.
    - `kernels`: the number of kernels.
    """

    least: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    kernels: int = 0


@dataclass(frozen=True)
class Efficiency:
    """How much of its peaks a kind of device reaches in steps, by kind of work.

    Parts are numbers from 0 to 1, of the fields of an [`eqxshard.planning.Target`][]. By
    default, a device reaches all its peaks: steps take as long as `plan.time.step` says.

    - `products`: the part of `flops` that large matrix products reach.
    - `tiles`: whether products take longer for what their shape leaves idle, as on GPUs.
    - `attention`: the part of `flops` that fused attention reaches.
    - `memory`: the part of `bandwidth` that is reached.
    - `link`, `network`: the parts of these fields that large collectives reach.
    - `launch`: the seconds from one kernel to the next.
    - `latency`: the seconds that a collective takes beside those of its bytes.
    - `step`: further seconds for each device that its ring passes inside a host.
    - `hop`: further seconds for each time that its ring, or the tree of an all-reduce,
        changes hosts.
    - `contention`: the part by which kernels take longer while a collective is under way.
    - `power`: the power limit, in watts, at which these values were found; `None` if it
        does not matter.
    - `exponent`: FLOP/s grow with the power limit to this exponent.
    - `overall`: a factor on all speeds, as `plan.calibrate` finds it from a measured step.
    """

    products: float = 1.0
    tiles: bool = False
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0
    launch: float = 0.0
    latency: float = 0.0
    step: float = 0.0
    hop: float = 0.0
    contention: float = 0.0
    power: float | None = None
    exponent: float = 0.0
    overall: float = 1.0

    def seconds(self, work: Work, power: float | None, beside: float = 0.0) -> float:
        """The seconds that kernels take.

        **Arguments:**

        - `work`: the work of the kernels.
        - `power`: the device's power limit, in watts; `None` if it is not known.
        - `beside`: the seconds for which a collective is still under way at their start.
        """
        full = self.power
        clock = (power / full) ** self.exponent if power and full else 1.0
        products = work.products if self.tiles else _at_peak(work)
        arithmetic = products / self.products + work.attention / self.attention
        took = arithmetic / clock + work.memory / self.memory + work.kernels * self.launch
        took /= self.overall
        return took + self.contention * min(took, beside / (1 + self.contention))

    def sending(self, seconds: float, part: float, steps: int, hops: int) -> float:
        """The seconds that a collective takes.

        **Arguments:**

        - `seconds`: those of its bytes at the peak.
        - `part`: the part of the peak that is reached.
        - `steps`, `hops`: how often its ring passes a device inside a host, and changes
            hosts.
        """
        latency = self.latency + self.step * steps + self.hop * hops
        return (seconds / part + latency) / self.overall


#: If all peaks are reached, a step takes the least time that it can.
AT_PEAKS = Efficiency()


def _at_peak(work: Work) -> float:
    """The seconds of matrix products if their shapes left nothing idle."""
    return work.least - work.attention - work.memory


#: The rows and columns of a result that one core of a GPU computes at a time; and the
#: depth that costs as much time as to begin and to write such a tile. CUTLASS and cuBLAS
#: have tiles of 128 x 256 on Hopper, and load 64 of the depth at a time.
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

    - `rows`, `columns`: the shape of one result.
    - `depth`: the size of the dim that is summed over.
    - `batch`: the number of results.
    - `cores`: the number of the GPU's streaming multiprocessors.
    """
    tiles = batch * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    waves = tiles / cores
    return 1 - waves / math.ceil(waves) * depth / (depth + _DEPTH)


#: The parts of their peaks that GPUs reach in steps.
#:
#: `products`, `link` and `exponent` are fitted by benchmarks/backtest.py on one half of the
#: published runs in benchmarks/published.toml. `link` is below the part that NCCL reaches
#: in its own tests: its rings reach 370 of the 450 GB/s of NVLink 4, and the protocol takes
#: the rest (github.com/NVIDIA/nccl-tests/issues/212, by an author of NCCL), between two,
#: four and eight devices alike (github.com/NVIDIA/nccl/issues/1455). In steps, messages are
#: smaller than in these tests, and devices also wait for each other.
#:
#: The other values were measured by others:
#:
#: - `network`: two hosts reach 46 to 48 of the 50 GB/s of a port
#:   (github.com/NVIDIA/nccl-tests/issues/290), 248 hosts 0.87 (issues/283 there), and 32
#:   hosts half to 0.85 (github.com/NVIDIA/nccl/issues/1218).
#: - `latency`, `step`, `hop`: those of NCCL's own model for rings with its protocol
#:   "Simple" (github.com/NVIDIA/nccl, src/graph/tuning.cc).
#: - `contention`: kernels of training steps on four A100s or H100s take 1.19 times as long
#:   with collectives beside them on average, and at most 1.4 times (arXiv:2507.03114). A
#:   gather's kernel holds 24 of an H100's 132 cores
#:   (forums.developer.nvidia.com/t/337991, where one product takes 1.7 times as long).
#: - `attention`: FlashAttention 2 and 3 and cuDNN on H100s, 0.35 to 0.65
#:   (arXiv:2407.08608, section 4).
#: - `memory`: that of long copies. `launch` has the usual order of magnitude.
GPUS = Efficiency(
    products=0.71,
    tiles=True,
    attention=0.5,
    memory=0.9,
    link=0.7,
    network=0.85,
    launch=2e-6,
    latency=8.4e-6,
    step=3.4e-6,
    hop=14e-6,
    contention=0.19,
    exponent=0.9,
)
