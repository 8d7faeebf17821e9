"""What the compiler computes again of its own accord, because memory is short."""

import re
from collections import Counter
from collections.abc import Mapping

from ..compiled._hlo import Instruction, Module
from ..pages._format import format_bytes, format_flops
from ._costs import Costs
from ._targets import Target

#: How XLA's pass `rematerialization` names copies of an instruction: `dot.3.remat2`.
_COPY = re.compile(r"\.remat\d*(?:\.\d+)*$")

#: The part of a step below which it does not matter.
_LITTLE = 0.01


def find_recomputed(module: Module) -> tuple[Counter[str], int]:
    """The work of copies that XLA made of instructions, so as not to keep their results.

    An instruction may be gone, if all that used it use copies: one of these is not in
    addition then.

    **Returns:**

    By dtype, the operations of their matrix products in a step; and the bytes of memory
    that they read and write.
    """
    costs, flops, size = Costs(module), Counter[str](), 0
    same: dict[tuple[str, str], list[Instruction]] = {}
    for instruction in module.instructions():
        key = instruction.computation, _COPY.sub("", instruction.name)
        same.setdefault(key, []).append(instruction)
    for (computation, _), instructions in same.items():
        if len(instructions) > 1:
            one = instructions[0]
            times = (len(instructions) - 1) * (module.runs(computation)[0] or 1)
            flops.update({dtype: n * times for dtype, n in costs.flops(one).items()})
            size += costs.bytes(one) * times
    return flops, size


def note_recomputed(
    module: Module, flops: Mapping[str, float], step: float | None, target: Target
) -> str | None:
    """What to say of it.

    **Arguments:**

    - `module`: the compiled step.
    - `flops`: of all of it.
    - `step`: its seconds, if they are known.
    - `target`: the devices.

    **Returns:**

    A note; `None` if it is next to nothing.
    """
    again, size = find_recomputed(module)
    product, whole = again.total(), sum(flops.values())
    memory = size / target.bandwidth if target.bandwidth else 0.0
    if product <= _LITTLE * whole and memory <= _LITTLE * (step or float("inf")):
        return None
    return (
        f"memory is short, so XLA computes {format_flops(product)} again "
        f"({product / max(whole - product, 1):.0%} more) and moves {format_bytes(size)} "
        "more, of its own accord, which also hides less communication; for none of it use "
        "a smaller batch on each device, a model that computes layers again "
        "(remat='full'), or more devices over fsdp"
    )
