"""A plan: what a step needs, as a value that prints as tables."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..inspect._tables import render
from ._targets import Compiler, Target


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of one device, in bytes.

    - `parameters`: of the model, with what is not trained.
    - `optimizer`: of the optimizer's state.
    - `other_state`: of the rest of the state: keys, counters, a model's own state.
    - `batch`: of its rows of the batch.
    - `gradients`: of all gradients at once, as they are stored. They are temporaries, and
        some may be gone before others are made.
    - `temporaries`: of everything that exists only during the step.
    - `peak`: the most at once.
    - `device`: what the device has; `None` if it is not known.
    """

    parameters: int
    optimizer: int
    other_state: int
    batch: int
    gradients: int
    temporaries: int
    peak: int
    device: int | None

    @property
    def left(self) -> int | None:
        """What is left of the device at the peak; negative if the step does not fit."""
        return None if self.device is None else self.device - self.peak


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of a planned step.

    - `kind`: such as `all-gather`.
    - `axes`: the axes of the mesh that it goes along; `None` if the compiler does not say.
    - `shapes`: of its results on each device.
    - `bytes`: of these results.
    - `sent`: the bytes that each device sends, each time: of an all-gather or a
        reduce-scatter over `n` devices, `(n - 1) / n` of the whole; of an all-reduce
        twice that.
    - `times`: how often a step runs it; `None` if the compiled text does not say.
    - `in_loop`: whether it is in a loop, such as that over layers.
    - `line`: the line of your code that causes it, as `model.py:12`.
    - `leaves`: the arrays of the model that it gathers, or whose gradients it reduces. The
        compiler does not say the latter, so arrays of the same shape are named together.
    - `hidden`: the part of its time that passes while the device computes, from 0 to 1;
        `None` if it is not known.
    """

    kind: str
    axes: tuple[str, ...] | None
    shapes: tuple[str, ...]
    bytes: int
    sent: int
    times: int | None
    in_loop: bool
    line: str | None
    leaves: tuple[str, ...]
    hidden: float | None


@dataclass(frozen=True)
class PlannedTime:
    """The time of a step, in seconds: a roofline, so real steps take longer.

    - `step`: the whole step.
    - `compute`: of instructions that wait for arithmetic.
    - `memory`: of instructions that wait for memory; `None` if there is no schedule.
    - `links`: by mesh axes (`fsdp`, `data,fsdp`), how long their collectives take.
    - `waiting`: the part of it that is not hidden; `None` if there is no schedule.
    """

    step: float
    compute: float
    memory: float | None
    links: Mapping[str, float]
    waiting: Mapping[str, float] | None

    @property
    def bound(self) -> str:
        """What takes the most: `compute`, `memory`, or links: `fsdp links`."""
        links = self.links if self.waiting is None else self.waiting
        parts = {"compute": self.compute, "memory": self.memory or 0.0}
        parts |= {f"{axes} links": seconds for axes, seconds in links.items()}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Plan:
    """What a step needs on devices that are not there: `print` it.

    - `target`: the kind of device, an [`eqxshard.Target`][].
    - `backend`: the compiler that was used: `gpu`, `tpu` or `cpu`.
    - `mesh`: the axes that are larger than 1.
    - `devices`: their number.
    - `memory`: of one device, an [`eqxshard.PlannedMemory`][].
    - `flops`: by dtype, the operations of matrix products of one device in a step,
        including what is computed again.
    - `collectives`: one [`eqxshard.PlannedCollective`][] for each in the compiled text.
    - `time`: an [`eqxshard.PlannedTime`][]; `None` if the target's speed is not known.
    - `examples`, `tokens`: of a batch; `tokens` if it has an entry of integers in rows.
    - `compile_seconds`: how long it took to compile.
    - `notes`: what else to know.
    """

    target: Target
    backend: Compiler
    mesh: Mapping[str, int]
    devices: int
    memory: PlannedMemory
    flops: Mapping[str, float]
    collectives: tuple[PlannedCollective, ...]
    time: PlannedTime | None
    examples: int
    tokens: int | None
    compile_seconds: float
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into the memory of a device; `None` if it is not known."""
        return None if self.memory.left is None else self.memory.left >= 0

    @property
    def traffic(self) -> dict[str, dict[str, int]]:
        """By mesh axes and by kind, the bytes that each device sends in a step."""
        total: dict[str, Counter[str]] = {}
        for each in self.collectives:
            sent = each.sent * (1 if each.times is None else each.times)
            total.setdefault(_join(each.axes), Counter())[each.kind] += sent
        return {axes: dict(kinds) for axes, kinds in total.items()}

    @property
    def examples_per_second(self) -> float | None:
        """By all devices."""
        return self.examples / self.time.step if self.time and self.time.step else None

    @property
    def tokens_per_second(self) -> float | None:
        """By all devices."""
        if self.tokens is None or not self.time or not self.time.step:
            return None
        return self.tokens / self.time.step

    @property
    def utilisation(self) -> float | None:
        """The part of the devices' peak that is used, also for what is computed again."""
        if not self.time or not self.time.step or not self.flops:
            return None
        slowest = min(self.target.flops.values())
        peaks = self.target.flops
        busy = sum(n / peaks.get(dtype, slowest) for dtype, n in self.flops.items())
        return busy / self.time.step

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`, with what follows from them."""
        plain = dataclasses.asdict(self)
        plain["target"] = {k: v for k, v in plain["target"].items() if k != "config"}
        plain["memory"]["left"] = self.memory.left
        if self.time is not None:
            plain["time"]["bound"] = self.time.bound
        names = (
            "fits",
            "traffic",
            "examples_per_second",
            "tokens_per_second",
            "utilisation",
        )
        return plain | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        yield (
            f"{self.devices} x {self.target.kind} ({mesh}), compiled in "
            f"{self.compile_seconds:.0f} s by the backend {self.backend}"
        )
        yield render(self._memory_table())
        if self.collectives:
            yield render(self._collectives_table())
        yield self._summary()

    def _memory_table(self) -> Table:
        memory = self.memory
        table = Table("memory of a device")
        table.add_column("GB", justify="right")
        rows = {
            "parameters": memory.parameters,
            "optimizer state": memory.optimizer,
            "other state": memory.other_state,
            "batch": memory.batch,
            f"temporaries (gradients: {_giga(memory.gradients)})": memory.temporaries,
            "peak": memory.peak,
        }
        if memory.left is not None:
            rows[f"left of {_giga(memory.device or 0)}"] = memory.left
        for name, size in rows.items():
            table.add_row(name, _giga(size))
        return table

    def _collectives_table(self) -> Table:
        table = Table("axes", "kind")
        for column in ("times", "MB sent", "in all", "hidden"):
            table.add_column(column, justify="right")
        table.add_column("loop")
        table.add_column("cause", overflow="fold")
        total = Counter[tuple[Any, ...]]()
        hidden: dict[tuple[Any, ...], list[tuple[int, float | None]]] = {}
        for each in self.collectives:
            key = (_join(each.axes), each.kind, each.times, each.in_loop, _cause(each))
            total[key] += each.sent
            hidden.setdefault(key, []).append((each.sent, each.hidden))
        weight = lambda key: -total[key] * (key[2] or 1)  # noqa: E731
        for key in sorted(total, key=weight):
            axes, kind, times, in_loop, cause = key
            table.add_row(
                axes,
                kind,
                "?" if times is None else str(times),
                f"{total[key] / 1e6:,.3g}",
                f"{total[key] * (times or 1) / 1e6:,.3g}",
                _percent(hidden[key]),
                "yes" if in_loop else "",
                cause,
            )
        return table

    def _summary(self) -> str:
        lines = []
        flops = ", ".join(f"{n / 1e12:,.4g} TFLOP {k}" for k, n in self.flops.items())
        lines.append(f"Arithmetic of a device: {flops or 'no matrix products'}")
        if self.time is not None and self.time.step:
            lines.append(
                f"A step takes at least {_seconds(self.time.step)}, bound by "
                f"{self.time.bound}: {self._breakdown()}"
            )
            speed = f"{self.examples_per_second:,.4g} examples/s"
            if self.tokens_per_second is not None:
                each = self.tokens_per_second / self.devices
                speed = (
                    f"{self.tokens_per_second:,.0f} tokens/s, {each:,.0f} on each device"
                )
            used = self.utilisation
            lines.append(
                speed if used is None else f"{speed}; {used:.0%} of the peak at that speed"
            )
        if self.fits is False:
            lines.append("It does not fit into the memory of a device.")
        lines += [f"Note: {note}." for note in self.notes]
        return "\n".join(lines)

    def _breakdown(self) -> str:
        time = self.time
        assert time is not None
        parts = [f"compute {_seconds(time.compute)}"]
        if time.memory is not None:
            parts.append(f"memory {_seconds(time.memory)}")
        for axes, seconds in time.links.items():
            if seconds == 0:
                continue
            waiting = ""
            if time.waiting is not None:
                waiting = f" ({_seconds(time.waiting[axes])} not hidden)"
            parts.append(f"{axes} links {_seconds(seconds)}{waiting}")
        return ", ".join(parts)


def _join(axes: tuple[str, ...] | None) -> str:
    return "unknown" if axes is None else ",".join(axes)


def _cause(collective: PlannedCollective) -> str:
    shown = collective.leaves[:3]
    more = [f"{len(collective.leaves) - 3} more"] if len(collective.leaves) > 3 else []
    causes = [", ".join([*shown, *more])] if shown else []
    return " at ".join([*causes, *([collective.line] if collective.line else [])])


def _percent(parts: list[tuple[int, float | None]]) -> str:
    known = [(weight, part) for weight, part in parts if part is not None]
    total = sum(weight for weight, _ in known)
    return f"{sum(w * part for w, part in known) / total:.0%}" if total else ""


def _giga(size: int) -> str:
    return f"{size / 1e9:,.4g}" if abs(size) < 1e8 else f"{size / 1e9:,.2f}"


def _seconds(seconds: float) -> str:
    if not seconds or not math.isfinite(seconds):
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.1 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"
