"""`Plan`: the memory, communication and time of a step, printed as tables."""

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

    - `arguments`: the arguments of the step, by name. In a plan by [`eqxshard.plan`][] they
        are `parameters` (all arrays of the model, also those that are not trained),
        `optimizer state`, `other state` (keys, counters, a model's own state) and `batch`
        (the device's rows of it); in one by [`eqxshard.plan_step`][], the arguments of the
        function.
    - `gradients`: all gradients at once, as they are stored. They are temporaries, and
        some may be gone before others are made. `None` if their size is not known.
    - `temporaries`: everything that exists only during the step.
    - `peak`: the most at any time.
    - `device`: the memory that the device has; `None` if it is not known.
    - `host`: the host's memory for arrays that are offloaded, which counts nowhere else.
    """

    arguments: Mapping[str, int]
    gradients: int | None
    temporaries: int
    peak: int
    device: int | None
    host: int = 0

    @property
    def parameters(self) -> int:
        """Bytes of the model; 0 in a plan by [`eqxshard.plan_step`][]."""
        return self.arguments.get("parameters", 0)

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state; 0 in a plan by [`eqxshard.plan_step`][]."""
        return self.arguments.get("optimizer state", 0)

    @property
    def other_state(self) -> int:
        """Bytes of the rest of the state; 0 in a plan by [`eqxshard.plan_step`][]."""
        return self.arguments.get("other state", 0)

    @property
    def batch(self) -> int:
        """Bytes of the device's rows of the batch."""
        return self.arguments.get("batch", 0)

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by name, without those that only the outputs of a step need."""
        return {**self.arguments, "temporaries": self.temporaries}

    @property
    def left(self) -> int | None:
        """The bytes that are left at the peak; negative if the step does not fit."""
        return None if self.device is None else self.device - self.peak


@dataclass(frozen=True)
class PlannedTime:
    """The least time of a step, in seconds, by the peaks of the target.

    - `step`: the whole step.
    - `compute`: the time of instructions that wait for arithmetic.
    - `memory`: that of instructions that wait for memory; `None` if there is no schedule.
    - `links`: that of collectives, by the mesh axes that they go over: `fsdp`, `data,fsdp`.
    - `waiting`: the part of `links` that is not hidden; `None` if there is no schedule.
    - `about`: the same at the target's efficiency: `about.step` is the time to expect.
        `None` if the efficiency is not known, or there is no schedule.
    """

    step: float
    compute: float
    memory: float | None
    links: Mapping[str, float]
    waiting: Mapping[str, float] | None
    about: "PlannedTime | None" = None

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by name: `compute`, `memory`, and links, such as `fsdp links`.

        With a schedule they add up to the step: only the part of links counts that is not
        hidden.
        """
        links = self.links if self.waiting is None else self.waiting
        waits = {f"{axes} links": seconds for axes, seconds in links.items()}
        return {"compute": self.compute, "memory": self.memory or 0.0} | waits

    @property
    def bound(self) -> str:
        """The name of the part that takes the most."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Plan:
    """The memory, communication and time of a step on devices that are not there.

    `print` shows it as tables.

    - `target`: the kind of device, an [`eqxshard.planning.Target`][].
    - `backend`: the compiler that was used: `gpu`, `tpu` or `cpu`.
    - `mesh`: the sizes of the mesh axes that are larger than 1.
    - `devices`: the number of devices.
    - `memory`: that of one device, an [`eqxshard.planning.PlannedMemory`][].
    - `flops`: by dtype, the floating-point operations of one device's matrix products in a
        step, including those that are computed again to save memory.
    - `model_flops`: the same without those that are computed again.
    - `collectives`: an [`eqxshard.testing.Collective`][] for each in the compiled text.
    - `time`: an [`eqxshard.planning.PlannedTime`][]; `None` if the target's speed is not
        known.
    - `examples`: the number of examples in a batch; `None` if it is not known which
        arguments are the batch.
    - `compile_seconds`: the seconds that the compiler took.
    - `notes`: more sentences on the plan.
    - `leaves`: one [`eqxshard.inspect.Leaf`][] for each array of the model, as
        [`eqxshard.explain`][] makes them; in a plan by [`eqxshard.plan_step`][], one for
        each array that the function takes.
    - `timeline`: the schedule of a device, as [`eqxshard.planning.PlannedSpan`][]s; `None`
        if there is none.
    - `settings`: the options of the step, as text, by name.
    - `findings`: what is most likely not meant, as [`eqxshard.lint`][] finds it.
    - `repeated`: the axes of the mesh over which nothing is split: devices along them
        repeat the same work.
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
        """True if a step fits into the memory of a device; `None` if that is not known."""
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
        """The examples per second of all devices, at most; `None` if they are not known."""
        if self.examples is None or not self.time or not self.time.step:
            return None
        return self.examples / self.time.step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (MFU), at most: the part of the peak that the model uses.

        What a step computes again to save memory does not count, and what several devices
        repeat counts once. The peak of each product is that of its dtype, such as float8.
        """
        used = self._used(self.model_flops)
        if used is None:
            return None
        return used / math.prod(self.mesh[axis] for axis in self.repeated)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization (HFU), at most: all operations count."""
        return self._used(self.flops)

    def _used(self, flops: Mapping[str, float]) -> float | None:
        """The part of a device's peak that its operations, by dtype, amount to."""
        if not self.time or not self.time.step or not self.flops:
            return None
        peaks = self.target.flops
        slowest = min(peaks.values())
        busy = sum(n / peaks.get(dtype, slowest) for dtype, n in flops.items())
        return busy / self.time.step

    def calibrate(self, seconds: float) -> Target:
        """The target with the speed that a run of this plan had.

        **Arguments:**

        - `seconds`: the seconds that a step of the run took.

        **Returns:**

        The target with another `efficiency.overall`: a plan of this step for it has
        `plan.time.about.step == seconds`.

        **Raises:**

        `ValueError` if the plan has no timeline, or `seconds` is not positive.

        !!! Example

            ```python
            target = plan.calibrate(seconds=1.31)
            ```
        """
        self._spans()
        assert self.time is not None  # A plan with a timeline has it.
        if not seconds > 0:
            raise UsageError(
                f"seconds={seconds} is not positive; give the seconds that a step took."
            )
        reached = self.target.efficiency or AT_PEAKS
        planned = (self.time.about or self.time).step
        overall = reached.overall * planned / seconds
        reached = dataclasses.replace(reached, overall=overall)
        return dataclasses.replace(self.target, efficiency=reached)

    def _spans(self) -> tuple[PlannedSpan, ...]:
        """The timeline; `ValueError` if there is none."""
        if self.timeline is None and self.backend != "cpu":
            raise UsageError(
                f"this plan has no timeline, because something of {self.target.name} is "
                "not known, as its notes say; give that to the Target."
            )
        if self.timeline is None:
            raise UsageError(
                f"this plan has no timeline, because the backend {self.backend} has no "
                f"schedule of {self.target.name}; install the compiler of the target."
            )
        return self.timeline

    def to_json(self) -> dict[str, Any]:
        """The fields and properties of the plan as values for `json.dumps`."""
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
        """The timeline as values for `json.dumps`; Perfetto and Chrome open such files.

        It has a row for the device, one for the links of each axis, and one for loops. The
        first iteration of a loop is shown in detail.

        **Raises:**

        `ValueError` if the plan has no timeline.
        """
        return make_trace(self._spans(), self.collectives)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, in the format that the end of its name says.

        A page is one file, which loads nothing from elsewhere.

        **Arguments:**

        - `path`: `plan.json` for what `to_json` returns, `plan.html` for a page,
            `plan.trace.json` for what `to_trace` returns.

        **Raises:**

        `ValueError` if the name ends otherwise, and as `to_trace` does.
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
    """Raise `ValueError` unless the name of a file says in which format to write a plan."""
    file = Path(path)
    if file.suffix.lower() not in (".json", ".html"):
        raise UsageError(
            f"a plan cannot be written as {file.name!r}; give a name that ends with "
            ".json, .trace.json or .html."
        )
