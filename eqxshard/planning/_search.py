"""`plan_search`: the best mesh, rule, model and accumulation, before there are devices."""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax
from jaxtyping import PyTree
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..inspect._tables import render
from ..pages._format import format_bytes, format_seconds
from ..sharding._mesh import used_axes
from ..sharding._rule import Rule
from ..sharding._text import format_mesh
from ..training._config import Nonfinite
from ..training._precision import Precision
from ._backends import find_backend
from ._make_plan import make_request
from ._meshes import SEARCHED, mesh_shapes
from ._plan import Plan
from ._process import TooLarge, run
from ._request import dump_request
from ._targets import Compiler, Target

#: Among steps this close to the fastest, the simplest mesh is ranked first.
_AS_FAST = 0.02

#: The memory that one compile takes, in bytes.
_EACH = 4e9


@dataclass(frozen=True)
class Candidate:
    """One way to run a step, which [`eqxshard.plan_search`][] tried.

    - `name`: its mesh, and what else differs: `fsdp=4, tensor=2, accumulate=2`.
    - `mesh`: the axes that are larger than 1.
    - `model`, `rule`: their names, if there are several.
    - `accumulate`: the number of microbatches.
    - `plan`: its [`eqxshard.Plan`][]; `None` if it was not compiled.
    - `needs`: the bytes that it needs on each device. If it was not compiled, this is the
        least: its parameters, optimizer state, gradients and rows of the batch. `None` if
        it cannot run at all.
    - `reason`: why it does not run; empty if it fits.
    """

    name: str
    mesh: Mapping[str, int]
    model: str
    rule: str
    accumulate: int
    plan: Plan | None = None
    needs: int | None = None
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can run: it was compiled, and leaves the margin of memory."""
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`."""
        plan = None if self.plan is None else self.plan.to_json()
        given = dict(vars(self)) | {"mesh": dict(self.mesh), "plan": plan}
        return given | {"fits": self.fits}


@dataclass(frozen=True)
class Search:
    """What [`eqxshard.plan_search`][] found: `print` it.

    - `candidates`: all that was tried, each an [`eqxshard.Candidate`][]: those that fit,
        best first, then those that were compiled, then the others.
    - `seconds`: how long the search took.
    """

    candidates: tuple[Candidate, ...]
    seconds: float

    @property
    def best(self) -> Plan | None:
        """The [`eqxshard.Plan`][] of the best candidate; `None` if none fits."""
        first = self.candidates[0]
        return first.plan if first.fits else None

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`."""
        candidates = [each.to_json() for each in self.candidates]
        best = None if self.best is None else candidates[0]
        return {"best": best, "candidates": candidates, "seconds": self.seconds}

    def __str__(self) -> str:
        tried, fit = len(self.candidates), sum(each.fits for each in self.candidates)
        compiled = sum(each.plan is not None for each in self.candidates)
        parts = [
            f"{tried} candidates, of which {compiled} were compiled and {fit} fit, in "
            f"{self.seconds:.0f} s",
            render(self._table()),
        ]
        if not fit:
            parts.append(
                "Nothing fits; try more devices, a rule that splits more of the state, a "
                "larger accumulate, or a model that computes layers again (remat)."
            )
        return "\n\n".join(parts)

    def _table(self) -> Table:
        """A row for each candidate, a column for each cost that any of them has."""
        parts = [_parts(each.plan) for each in self.candidates]
        costs = dict.fromkeys(name for each in parts for name in each)
        table = Table("candidate")
        for column in ("needs", "step", "mfu", *costs):
            table.add_column(column, justify="right")
        table.add_column("why it does not run", overflow="fold")
        for each, seconds in zip(self.candidates, parts, strict=True):
            plan = each.plan
            least = "" if plan is not None else "> "
            table.add_row(
                each.name,
                "" if each.needs is None else f"{least}{format_bytes(each.needs)}",
                "" if plan is None or plan.time is None else format_seconds(plan.time.step),
                "" if plan is None or plan.mfu is None else f"{plan.mfu:.0%}",
                *(format_seconds(seconds[x]) if x in seconds else "" for x in costs),
                each.reason,
            )
        return table


def plan_search(
    make_model: Callable[[Any], PyTree] | Mapping[str, Callable[[Any], PyTree]],
    loss_fn: Callable[..., Any],
    optim: optax.GradientTransformation,
    batch: PyTree,
    *,
    devices: int,
    rules: Rule | Mapping[str, Rule],
    target: str | Target = "h200",
    meshes: Sequence[Mapping[str, int]] | None = None,
    axes: Sequence[str] = ("data", "fsdp", "tensor"),
    accumulate: int | Sequence[int] = 1,
    margin: float = 0.05,
    backend: Compiler | None = None,
    trainable: PyTree = True,
    precision: Precision | None = None,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    workers: int | None = None,
) -> Search:
    """The fastest way to run a training step that fits, on devices that are not there.

    Every mesh is tried with every model, rule and number of microbatches. What cannot
    divide, or does not fit by the bytes of its state alone, is not compiled. The rest is
    planned as by [`eqxshard.plan`][], several at a time. Those that fit are ranked by the
    time of a step; of several within 2%, the simplest mesh comes first.

    As for `plan`, put the call under `if __name__ == "__main__":`.

    **Arguments:**

    - `make_model`: as for `plan`, or several by their names, all of which are tried:
        `{"no remat": partial(GPT, remat="none"), "remat": partial(GPT, remat="full")}`.
    - `loss_fn`, `optim`, `batch`, `target`, `backend`, `trainable`, `precision`,
        `nonfinite`, `grad_norms`: as for `plan`.
    - `devices`: their number.
    - `rules`: a rule, or several by their names.
    - `meshes`: the mesh shapes to try. By default, those of `axes` whose `tensor` and
        `context` stay within 8 devices of a host; beyond one host, copies of the model
        are on one device or on whole hosts, four times as many each time.
    - `axes`: of these meshes, some of `data`, `fsdp`, `context` and `tensor`.
    - `accumulate`: the numbers of microbatches to try. The batch stays the same.
    - `margin`: the part of a device's memory that must be left.
    - `workers`: how many to compile at a time, by default as many as cores and memory
        allow.

    **Returns:**

    An [`eqxshard.Search`][], which prints as a table: a row for each candidate, a column
    for each of its costs. One that cannot be compiled is a row with the reason.

    **Raises:**

    `ValueError` if an argument is invalid, such as a mesh of another number of devices;
    as `plan` does, if the target or the backend is not known, or something cannot be sent
    to another process.

    !!! Example

        ```python
        search = eqxshard.plan_search(
            {"remat none": make_model, "remat full": make_smaller_model},
            loss_fn,
            optax.adamw(1e-4),
            {"tokens": tokens, "targets": tokens},
            devices=64,
            rules=rule,
            accumulate=(1, 4),
            target="h200",
        )
        print(search)
        ```
    """
    start = time.perf_counter()
    models = dict(make_model) if isinstance(make_model, Mapping) else {"": make_model}
    named = dict(rules) if isinstance(rules, Mapping) else {"": rules}
    counts = (accumulate,) if isinstance(accumulate, int) else tuple(accumulate)
    for name, given in (("make_model", models), ("rules", named), ("accumulate", counts)):
        if not given:
            raise ValueError(f"{name} is empty; give at least one.")
    for name, number in (("devices", devices), ("workers", workers)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number} is too few; give at least 1.")
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} is not a part; use one from 0 to 1, as 0.05.")
    found = Target.named(target) if isinstance(target, str) else target
    where = find_backend(found, backend)
    limit = math.inf if found.memory is None else found.memory * (1 - margin)
    shapes = mesh_shapes(devices, axes, found.per_host) if meshes is None else meshes
    if not (shapes := [*shapes]):
        raise ValueError(
            f"there is no mesh of {devices} devices to try; give meshes=, or axes= more of "
            f"{', '.join(SEARCHED)}."
        )
    candidates, requests = list[Candidate](), list[bytes]()
    for shape, model, rule, count in itertools.product(shapes, models, named, counts):
        request, _ = make_request(
            make_model=models[model],
            loss_fn=loss_fn,
            optim=optim,
            batch=batch,
            mesh_shape=shape,
            rule=named[rule],
            target=found,
            devices=devices,
            backend=backend,
            trainable=trainable,
            precision=precision,
            accumulate=count,
            nonfinite=nonfinite,
            grad_norms=grad_norms,
            limit=limit,
        )
        mesh = used_axes(request.mesh_shape)
        parts = [format_mesh(mesh), model, rule]
        parts += [f"accumulate={count}"] if len(counts) > 1 else []
        name = ", ".join(dict.fromkeys(filter(None, parts)))
        candidates.append(Candidate(name, mesh, model, rule, count))
        # Pickled here, because JAX's settings may be those of this thread.
        requests.append(dump_request(request))

    def compile(candidate: Candidate, request: bytes) -> Candidate:
        try:
            made = run(request, where)
        except (ValueError, TypeError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            return dataclasses.replace(candidate, reason=reason)
        return _judge(candidate, made, limit)

    console = Console(stderr=True)
    with ThreadPoolExecutor(workers or _default_workers()) as pool:
        # An interrupt ends the iterator, which cancels what has not started.
        judged = track(
            pool.map(compile, candidates, requests),
            "compiling",
            total=len(requests),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        ranked = rank(judged)
    return Search(ranked, time.perf_counter() - start)


def _judge(candidate: Candidate, made: Plan | TooLarge, limit: float) -> Candidate:
    """A candidate with what it needs, and why it does not run if it does not."""
    if isinstance(made, TooLarge):
        plan, needs, said = None, made.needs, "needs at least"
    else:
        plan, needs, said = made, made.memory.peak, "needs"
    reason = ""
    if needs > limit:
        reason = f"does not fit: {said} {format_bytes(needs)} of {format_bytes(limit)}"
    return dataclasses.replace(candidate, plan=plan, needs=needs, reason=reason)


def rank(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that fit, the fastest first; then those that need the least memory."""
    candidates = [*candidates]
    fit = [each for each in candidates if each.fits]
    rest = [each for each in candidates if not each.fits]
    fastest = min(map(_cost, fit), default=0.0)

    def order(candidate: Candidate) -> tuple[int | float, ...]:
        cost = _cost(candidate)
        if cost > fastest * (1 + _AS_FAST):
            return 1, cost
        # The simplest of those that are as fast.
        return 0, len(candidate.mesh), candidate.accumulate, cost

    def nearness(candidate: Candidate) -> tuple[bool, int | float]:
        needs = math.inf if candidate.needs is None else candidate.needs
        return candidate.plan is None, needs

    return *sorted(fit, key=order), *sorted(rest, key=nearness)


def _cost(candidate: Candidate) -> float:
    """The seconds of a step; its arithmetic, if the speed of the target is not known."""
    assert candidate.plan is not None
    time = candidate.plan.time
    return sum(candidate.plan.flops.values()) if time is None else time.step


def _default_workers() -> int:
    """How many compiles cores and memory allow at a time."""
    memory = Path("/proc/meminfo")
    lines = memory.read_text().splitlines() if memory.exists() else []
    free = [1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")]
    cores = os.cpu_count() or 1
    return max(1, min(cores, *(int(size / _EACH) for size in free)))


def _parts(plan: Plan | None) -> dict[str, float]:
    """The seconds of a step by what takes them, without what takes none."""
    if plan is None or plan.time is None:
        return {}
    return {name: seconds for name, seconds in plan.time.parts.items() if seconds}
