"""A plan: what a step needs, as a value that prints as tables."""

import dataclasses
import html
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..compiled._communication import Collective, join_axes
from ..inspect._explanation import Leaf
from ..inspect._lint import Findings
from ._efficiency import AT_PEAKS
from ._targets import Compiler, Target
from ._timeline import PlannedSpan, make_trace


@dataclass(frozen=True)
class PlannedMemory:
    """The memory of one device, in bytes.

    - `arguments`: of what the step takes, by name: of a plan by [`eqxshard.plan`][]
        `parameters` (of the model, with what is not trained), `optimizer state`, `other
        state` (keys, counters, a model's own state) and `batch` (its rows); of one by
        [`eqxshard.plan_step`][] the arguments of the function.
    - `gradients`: of all gradients at once, as they are stored. They are temporaries, and
        some may be gone before others are made. `None` if it is not known.
    - `temporaries`: of everything that exists only during the step.
    - `peak`: the most at once.
    - `device`: what the device has; `None` if it is not known.
    - `host`: of the host's memory, for what is offloaded; none of it is in the others.
    """

    arguments: Mapping[str, int]
    gradients: int | None
    temporaries: int
    peak: int
    device: int | None
    host: int = 0

    @property
    def parameters(self) -> int:
        """Of the model; 0 for a step that is not ours."""
        return self.arguments.get("parameters", 0)

    @property
    def optimizer(self) -> int:
        """Of the optimizer's state; 0 for a step that is not ours."""
        return self.arguments.get("optimizer state", 0)

    @property
    def other_state(self) -> int:
        """Of the rest of the state; 0 for a step that is not ours."""
        return self.arguments.get("other state", 0)

    @property
    def batch(self) -> int:
        """Of the rows of the batch."""
        return self.arguments.get("batch", 0)

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by what takes them, without what only the outputs of a step need."""
        return {**self.arguments, "temporaries": self.temporaries}

    @property
    def left(self) -> int | None:
        """What is left of the device at the peak; negative if the step does not fit."""
        return None if self.device is None else self.device - self.peak


@dataclass(frozen=True)
class PlannedTime:
    """The time of a step, in seconds: at least, by the peaks of the target.

    - `step`: the whole step.
    - `compute`: of instructions that wait for arithmetic.
    - `memory`: of instructions that wait for memory; `None` if there is no schedule.
    - `links`: by mesh axes (`fsdp`, `data,fsdp`), how long their collectives take.
    - `waiting`: the part of it that is not hidden; `None` if there is no schedule.
    - `about`: the same as it is likely to be, by the target's efficiency: `about.step` is
        the time to expect. `None` if that is not known, or there is no schedule.
    """

    step: float
    compute: float
    memory: float | None
    links: Mapping[str, float]
    waiting: Mapping[str, float] | None
    about: "PlannedTime | None" = None

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what takes them: `compute`, `memory`, and links: `fsdp links`.

        With a schedule they add up to the step: of links, only what is not hidden counts.
        """
        links = self.links if self.waiting is None else self.waiting
        waits = {f"{axes} links": seconds for axes, seconds in links.items()}
        return {"compute": self.compute, "memory": self.memory or 0.0} | waits

    @property
    def bound(self) -> str:
        """The part that takes the most."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Plan:
    """What a step needs on devices that are not there: `print` it.

    - `target`: the kind of device, an [`eqxshard.planning.Target`][].
    - `backend`: the compiler that was used: `gpu`, `tpu` or `cpu`.
    - `mesh`: the axes that are larger than 1.
    - `devices`: their number.
    - `memory`: of one device, an [`eqxshard.planning.PlannedMemory`][].
    - `flops`: by dtype, the operations of matrix products of one device in a step,
        including what is computed again to save memory.
    - `model_flops`: the same without what is computed again.
    - `collectives`: one [`eqxshard.testing.Collective`][] for each in the compiled text.
    - `time`: an [`eqxshard.planning.PlannedTime`][]; `None` if the target's speed is not
        known.
    - `examples`: of a batch, if it is known which of the arguments that is.
    - `compile_seconds`: how long it took to compile.
    - `notes`: what else to know.
    - `leaves`: one [`eqxshard.inspect.Leaf`][] for each array of the model, as
        [`eqxshard.explain`][] makes them; of a plan by [`eqxshard.plan_step`][], for each
        array that the function takes.
    - `timeline`: what the devices do when, as [`eqxshard.planning.PlannedSpan`][]s; `None`
        if there is no schedule.
    - `settings`: what the step was made with, as text, by name.
    - `findings`: what is most likely not meant, as [`eqxshard.lint`][] finds it.
    - `repeated`: the axes of the mesh over which nothing is split: their devices repeat
        the same work.
    """

    target: Target
    backend: Compiler
    mesh: Mapping[str, int]
    devices: int
    memory: PlannedMemory
    flops: Mapping[str, float]
    model_flops: Mapping[str, float]
    collectives: tuple[Collective, ...]
    time: PlannedTime | None
    examples: int | None
    compile_seconds: float
    notes: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    timeline: tuple[PlannedSpan, ...] | None
    settings: Mapping[str, str]
    findings: Findings
    repeated: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into the memory of a device; `None` if it is not known."""
        return None if self.memory.left is None else self.memory.left >= 0

    @property
    def traffic(self) -> dict[str, dict[str, int]]:
        """By mesh axes and by kind, the bytes that each device sends in a step."""
        total: dict[str, Counter[str]] = {}
        for each in self.collectives:
            total.setdefault(join_axes(each.axes), Counter())[each.kind] += each.sent_in_all
        return {axes: dict(kinds) for axes, kinds in total.items()}

    @property
    def examples_per_second(self) -> float | None:
        """By all devices, at most."""
        if self.examples is None or not self.time or not self.time.step:
            return None
        return self.examples / self.time.step

    @property
    def mfu(self) -> float | None:
        """The part of the devices' peak that the model's own operations are, at most.

        This is model FLOPs utilization (MFU): what a step computes again to save memory
        does not count, and what several devices repeat counts once. The peak of each
        product is that of its dtype, such as float8.
        """
        used = self._used(self.model_flops)
        if used is None:
            return None
        return used / math.prod(self.mesh[axis] for axis in self.repeated)

    @property
    def hfu(self) -> float | None:
        """The part of the devices' peak that all operations are, at most.

        This is hardware FLOPs utilization (HFU): all that is executed counts.
        """
        return self._used(self.flops)

    def _used(self, flops: Mapping[str, float]) -> float | None:
        """The part of the peak that some operations of each device are."""
        if not self.time or not self.time.step or not self.flops:
            return None
        peaks = self.target.flops
        slowest = min(peaks.values())
        busy = sum(n / peaks.get(dtype, slowest) for dtype, n in flops.items())
        return busy / self.time.step

    def calibrate(self, seconds: float) -> Target:
        """The target, as fast as a run of this plan was.

        **Arguments:**

        - `seconds`: how long a step took.

        **Returns:**

        The target with another `efficiency.overall`: planned for it, this step takes
        `plan.time.about.step == seconds`.

        **Raises:**

        `ValueError` if there is no time line, or `seconds` is not positive.

        !!! Example

            ```python
            target = plan.calibrate(seconds=1.31)
            ```
        """
        self._spans()
        assert self.time is not None  # With a time line.
        if not seconds > 0:
            raise UsageError(
                f"seconds={seconds} is no time of a step; give the seconds that one took."
            )
        reached = self.target.efficiency or AT_PEAKS
        planned = (self.time.about or self.time).step
        overall = reached.overall * planned / seconds
        reached = dataclasses.replace(reached, overall=overall)
        return dataclasses.replace(self.target, efficiency=reached)

    def _spans(self) -> tuple[PlannedSpan, ...]:
        """The time line, if there is one."""
        if self.timeline is None and self.backend != "cpu":
            raise UsageError(
                f"no time is predicted, because something of {self.target.name} is not "
                "known, as the notes of the plan say; give it to the Target."
            )
        if self.timeline is None:
            raise UsageError(
                f"the backend {self.backend} makes no schedule of {self.target.name}, so "
                "there is no time line; install the compiler of the target."
            )
        return self.timeline

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`, with what follows from them."""
        plain = dataclasses.asdict(dataclasses.replace(self, leaves=()))
        plain["leaves"] = [leaf.to_dict() for leaf in self.leaves]
        plain["target"] = {k: v for k, v in plain["target"].items() if k != "config"}
        for name in ("parameters", "optimizer", "other_state", "batch", "left"):
            plain["memory"][name] = getattr(self.memory, name)
        if self.time is not None:
            plain["time"]["bound"] = self.time.bound
        names = ("fits", "traffic", "examples_per_second", "mfu", "hfu")
        return plain | {name: getattr(self, name) for name in names}

    def to_trace(self) -> dict[str, Any]:
        """The time line as values for `json.dumps`, which Perfetto and Chrome open.

        It has a row for what the device does, one for the links of each axis, and one for
        loops, of which it has the first iteration in detail.

        **Raises:**

        `ValueError` if there is no time line.
        """
        return make_trace(self._spans(), self.collectives)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as its name says.

        A page holds all it needs, and loads nothing from elsewhere.

        **Arguments:**

        - `path`: `plan.json` for what `to_json` returns, `plan.html` for a page,
            `plan.trace.json` for what `to_trace` returns.

        **Raises:**

        `ValueError` if the name ends otherwise, or as `to_trace` does.
        """
        from ._views import render_page  # It imports this module.

        check_plan_file(path)
        file = Path(path)
        if file.name.lower().endswith(".trace.json"):
            text = json.dumps(self.to_trace())
        elif file.suffix.lower() == ".json":
            text = json.dumps(self.to_json(), indent=1) + "\n"
        else:
            text = render_page(self)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        from ._views import print_plan  # It imports this module.

        return "\n\n".join(print_plan(self))

    __repr__ = __str__  # A notebook shows it.

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def check_plan_file(path: str | os.PathLike[str]) -> None:
    """Raise `ValueError` unless the name says in which form to write a plan."""
    file = Path(path)
    if file.suffix.lower() not in (".json", ".html"):
        raise UsageError(
            f"a plan cannot be written as {file.name!r}; give a name that ends with "
            ".json, .trace.json or .html."
        )
