"""`plan_search`: the best mesh, rule, model and accumulation, before there are devices."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import optax
from jaxtyping import PyTree
from rich.table import Table

from .._errors import UsageError
from ..inspect._tables import render
from ..pages._format import format_bytes, format_seconds
from ..sharding._mesh import used_axes
from ..sharding._rule import Rule
from ..sharding._text import comma_list, did_you_mean, format_mesh
from ..training._config import Nonfinite
from ..training._precision import Precision
from ._backends import find_backend
from ._make_plan import make_request
from ._plan import Plan
from ._process import dump_request, run
from ._targets import Compiler, Target
from ._views import mfu_at

#: The part of a device's memory that must be left, for what a plan does not count.
_MARGIN = 0.05

#: The axes that a search may split over.
_SEARCHED = ("data", "fsdp", "context", "tensor")

#: The most devices that `tensor` and `context` span, where hosts are larger.
_MOST_WITHIN = 8


@dataclass(frozen=True)
class Candidate:
    """One way to run a step, which [`eqxshard.plan_search`][] tried.

    - `name`: its mesh, and what else differs: `fsdp=4, tensor=2, accumulate=2`.
    - `mesh`: the axes that are larger than 1.
    - `model`, `rule`: their names, if there are several.
    - `accumulate`: the number of microbatches.
    - `plan`: its [`eqxshard.Plan`][]; `None` if it was not compiled.
    - `needs`: the bytes that it needs on each device; those of its state alone if it was
        not compiled. `None` if it cannot run at all.
    - `reason`: why it is out: it cannot run, or its devices would repeat the same work;
        empty if it fits.
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
        """Whether it is ranked: it was compiled, and leaves 5% of the memory."""
        return not self.reason

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`."""
        plan = None if self.plan is None else self.plan.to_json()
        return {**vars(self), "mesh": dict(self.mesh), "plan": plan, "fits": self.fits}


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
        head = f"{tried} candidates, of which {compiled} were compiled and {fit} fit"
        advice = (
            "Nothing is left; see why. For want of memory, try more devices, a rule that "
            "splits more of the state, a larger accumulate, or a model that computes "
            "layers again (remat)."
        )
        parts = [f"{head}, in {self.seconds:.0f} s", render(self._table())]
        return "\n\n".join(parts if fit else [*parts, advice])

    __repr__ = __str__  # A notebook shows it.

    def _table(self) -> Table:
        """A row for each candidate, a column for each cost that any of them has."""
        times = [each.plan.time if each.plan else None for each in self.candidates]
        known = [None if x is None else x.about or x for x in times]
        parts = [{} if x is None else x.parts for x in known]
        costs = dict.fromkeys(name for x in parts for name, value in x.items() if value)
        table = Table("candidate")
        for column in ("needs", "at least", "about", "mfu", *costs):
            table.add_column(column, justify="right")
        table.add_column("why it is out", overflow="fold")
        rows = zip(self.candidates, times, known, parts, strict=True)
        for each, step, likely, seconds in rows:
            mfu = each.plan and likely and mfu_at(each.plan, likely)
            least = "" if each.plan is not None else "> "
            table.add_row(
                each.name,
                "" if each.needs is None else f"{least}{format_bytes(each.needs)}",
                "" if step is None else format_seconds(step.step),
                "" if likely is step or likely is None else format_seconds(likely.step),
                "" if mfu is None else f"{mfu:.0%}",
                *(format_seconds(seconds[x]) if seconds.get(x) else "" for x in costs),
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
    rule: Rule | Mapping[str, Rule],
    target: str | Target = "h200",
    meshes: Sequence[Mapping[str, int]] | None = None,
    axes: Sequence[str] = ("data", "fsdp", "tensor"),
    accumulate: int | Sequence[int] = 1,
    backend: Compiler | None = None,
    trainable: PyTree = True,
    precision: Precision | None = None,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    workers: int = 4,
    progress: Callable[[int, int], Any] | None = None,
) -> Search:
    """The fastest way to run a training step that fits, on devices that are not there.

    Every mesh is tried with every model, rule and number of microbatches. What cannot
    divide, does not fit by the bytes of its state alone, or has an axis over which nothing
    is split, so that devices repeat the same work, is not compiled. The rest is planned as
    by [`eqxshard.plan`][], several at a time. Those that fit and leave 5% of
    the memory are ranked by the time of a step.

    As for `plan`, put the call under `if __name__ == "__main__":`.

    **Arguments:**

    - `make_model`: as for `plan`, or several by their names, all of which are tried:
        `{"no remat": partial(GPT, remat="none"), "remat": partial(GPT, remat="full")}`.
    - `loss_fn`, `optim`, `batch`, `target`, `backend`, `trainable`, `precision`,
        `nonfinite`, `grad_norms`, `compiler_options`: as for `plan`.
    - `devices`: their number.
    - `rule`: as for `plan`, or several by their names.
    - `meshes`: the mesh shapes to try. By default, those of `axes` whose `tensor` and
        `context` stay within 8 devices of a host; beyond one host, `fsdp` goes over whole
        hosts.
    - `axes`: of these meshes, some of `data`, `fsdp`, `context` and `tensor`.
    - `accumulate`: the numbers of microbatches to try. The batch stays the same.
    - `workers`: how many to compile at a time. Each takes a core, and for a large model
        a few GB of memory.
    - `progress`: called after each candidate, with how many were tried and how many there
        are: `progress=print`.

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
            rule=rule,
            accumulate=(1, 4),
            target="h200",
        )
        print(search)
        ```
    """
    start = time.perf_counter()
    models = dict(make_model) if isinstance(make_model, Mapping) else {"": make_model}
    rules = dict(rule) if isinstance(rule, Mapping) else {"": rule}
    counts = (accumulate,) if isinstance(accumulate, int) else tuple(accumulate)
    found = Target.named(target) if isinstance(target, str) else target
    compiler = find_backend(found, backend)
    limit = math.inf if found.memory is None else found.memory * (1 - _MARGIN)
    shapes = [*(mesh_shapes(devices, axes, found.per_host) if meshes is None else meshes)]
    choices = {"meshes": shapes, "make_model": models, "rule": rules, "accumulate": counts}
    for name, given in choices.items():
        if not given:
            raise UsageError(f"there are no {name} for {devices} devices; give some.")
    candidates, requests = list[Candidate](), list[bytes]()
    for shape, model, by, count in itertools.product(*choices.values()):
        request = make_request(
            make_model=models[model],
            loss_fn=loss_fn,
            optim=optim,
            batch=batch,
            mesh_shape=shape,
            rule=rules[by],
            target=found,
            devices=devices,
            backend=compiler,
            trainable=trainable,
            precision=precision,
            accumulate=count,
            nonfinite=nonfinite,
            grad_norms=grad_norms,
            compiler_options=compiler_options,
            limit=limit,
        )
        mesh = used_axes(request.mesh_shape)
        parts = [format_mesh(mesh), model, by]
        parts += [f"accumulate={count}"] if len(counts) > 1 else []
        name = ", ".join(dict.fromkeys(filter(None, parts)))
        candidates.append(Candidate(name, mesh, model, by, count))
        # Pickled here, because JAX's settings may be those of this thread.
        requests.append(dump_request(request))

    def compile(candidate: Candidate, request: bytes) -> Candidate:
        try:
            made = run(request, compiler)
        except (ValueError, TypeError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            return dataclasses.replace(candidate, reason=reason)
        if isinstance(made, Plan):
            plan, needs, said = made, made.memory.peak, "needs"
        else:
            plan, needs, said = None, made, "its state alone needs"
        reason = ""
        if needs > limit:
            reason = f"does not fit: {said} {format_bytes(needs)} of {format_bytes(limit)}"
        return dataclasses.replace(candidate, plan=plan, needs=needs, reason=reason)

    tried = list[Candidate]()
    with ThreadPoolExecutor(workers) as pool:
        # An interrupt ends the iterator, which cancels what has not started.
        for each in pool.map(compile, candidates, requests):
            tried.append(each)
            if progress is not None:
                progress(len(tried), len(candidates))
    return Search(rank(tried), time.perf_counter() - start)


def rank(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Those that fit, the fastest first; of others, what needs the least memory."""

    def order(each: Candidate) -> tuple[bool, bool, int | float]:
        cost = math.inf if each.needs is None else each.needs
        if each.fits and each.plan is not None and each.plan.time is not None:
            time = each.plan.time
            cost = (time.about or time).step
        return not each.fits, each.plan is None, cost

    return tuple(sorted(candidates, key=order))


def mesh_shapes(
    devices: int, axes: Sequence[str], per_host: int
) -> Iterator[dict[str, int]]:
    """The mesh shapes to try: few, and none that only loses to others.

    Within a host all that divide. Beyond one, a copy of the model is on whole hosts, or
    on as many devices as its layers are split over.

    **Arguments:**

    - `devices`: their number.
    - `axes`: the axes that may be larger than 1.
    - `per_host`: the number of devices of a host.

    **Raises:**

    `ValueError` if an axis is not one that can be searched.
    """
    for axis in axes:
        if axis not in _SEARCHED:
            raise UsageError(
                f"axes={axis!r} cannot be searched; {did_you_mean(axis, _SEARCHED)}use "
                f"some of {comma_list(_SEARCHED)}, or give meshes=."
            )
    host = min(per_host, _MOST_WITHIN)
    names = ("context", "tensor", "fsdp")
    sizes = [_divisors(devices) if axis in axes else [1] for axis in names]
    for context, tensor, fsdp in itertools.product(*sizes):
        group = context * tensor * fsdp
        data = devices // group
        fits = data * group == devices and context * tensor <= host
        on_whole_hosts = fsdp == 1 or group % host == 0 or devices <= host or devices % host
        if fits and on_whole_hosts and (data == 1 or "data" in axes):
            yield {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
