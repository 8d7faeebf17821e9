"""A compiled step as a short text, to plan its time at any efficiency in milliseconds.

Collectives and loops are left as they are. Between them, one instruction has the work of
all kernels: `%work = f32[] work(), seconds=[least, products, attention, memory],
kernels=3`.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from eqxshard.compiled._communication import Operation
from eqxshard.compiled._hlo import Instruction, Module
from eqxshard.planning._costs import FREE
from eqxshard.planning._efficiency import Work

#: The attributes of a collective or a loop that a schedule reads.
_KEPT = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(?:mesh\[.*?\}|\{(?:\{[^}]*\},?)*\}|\[[^\s]*)"
    r"|(?:body|calls|branch_computations)=(?:%[\w.-]+|\{[^}]*\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"\d+"\}')


def shorten(
    module: Module,
    operations: Sequence[Operation],
    read_work: Callable[[Instruction], Work],
) -> str:
    """Write the short text of a compiled step.

    **Arguments:**

    - `module`: the compiled step.
    - `operations`: its collectives.
    - `read_work`: the work of an instruction.
    """
    names = {(x.start.computation, x.start.name) for x in operations}
    texts = dict[str, str]()

    def lines(computation: str) -> Iterator[str]:
        work = Work()
        for each in module.computations.get(computation, ()):
            kept = (computation, each.name) in names or each.opcode.endswith("-done")
            calls = each.opcode in ("while", "call", "conditional")
            if not kept and not calls:
                if each.opcode not in FREE:
                    work = _add(work, read_work(each))
                continue
            if work.kernels:
                yield _write_work(work)
                work = Work()
            for what, name in each.called():
                if calls and what != "condition":
                    add(name)
            yield _write(each)
        if work.kernels:
            yield _write_work(work)

    def add(computation: str) -> None:
        if computation not in texts:
            texts[computation] = ""  # Below what it calls, as XLA writes it.
            body = "".join(lines(computation))
            del texts[computation]
            entry = "ENTRY " if computation == module.entry else ""
            texts[computation] = f"{entry}%{computation} () -> f32[] {{\n{body}}}\n"

    add(module.entry)
    return "".join(texts.values())


def read_work(instruction: Instruction) -> Work:
    """The work of an instruction of a short text."""
    *seconds, kernels = re.findall(r"[\d.e+-]+(?=[,\]]|$)", instruction.attributes)
    return Work(*map(float, seconds), kernels=int(kernels))


def _add(one: Work, other: Work) -> Work:
    seconds = (a + b for a, b in zip(one[:4], other[:4], strict=True))
    return Work(*seconds, kernels=one.kernels + other.kernels)


def _write_work(work: Work) -> str:
    seconds = ", ".join(f"{x:.4g}" for x in work[:4])
    return f"  %work = f32[] work(), seconds=[{seconds}], kernels={work.kernels}\n"


def _write(instruction: Instruction) -> str:
    attributes = ", ".join(
        found[0].rstrip(",")
        for pattern in (_KEPT, _TRIPS)
        for found in pattern.finditer(instruction.attributes)
    )
    # Of the operands, only the collective that a -done operation ends.
    done = instruction.opcode.endswith("-done")
    taken = f"%{instruction.operands[0]}" if done and instruction.operands else ""
    shape = instruction.type
    return f"  %{instruction.name} = {shape} {instruction.opcode}({taken}), {attributes}\n"
