"""`plan_search`: the best mesh, rule, model and accumulation, before there are devices."""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optax
import platformdirs
from jaxtyping import PyTree
from rich.console import Console
from rich.progress import track

from ..pages._format import format_bytes
from ..sharding._paths import local_path
from ..sharding._rule import Rule
from ..sharding._text import format_mesh
from ..training._config import Nonfinite
from ..training._precision import Precision
from ._backends import Backend, find_backend
from ._candidates import Candidate, Search
from ._kept import keep_plan, read_plan
from ._make_plan import make_request
from ._meshes import SEARCHED, mesh_shapes
from ._plan import Plan
from ._process import run
from ._request import Request, dump_request
from ._survey import Surveyed
from ._targets import Compiler, Target

#: A step that is slower by this part is as good on a simpler mesh.
_AS_FAST = 0.02

#: What a compile takes, of memory.
_EACH = 4e9


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
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> Search:
    """The fastest way to run a training step that fits, on devices that are not there.

    Every mesh is tried with every model, rule and number of microbatches. What cannot
    divide, or does not fit by the bytes of its state alone, is not compiled. The rest is
    planned as by [`eqxshard.plan`][], several at a time, and kept on disk: the same
    search again takes seconds, until your code or a version changes. Those that fit are
    ranked by the time of a step; of several within 2%, the simplest mesh comes first.

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
    - `cache`: the folder where plans are kept, by default one in the user's cache. It may
        be deleted at any time.
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
    shapes = mesh_shapes(devices, axes, found.per_host) if meshes is None else meshes
    if not (shapes := [*shapes]):
        raise ValueError(
            f"there is no mesh of {devices} devices to try; give meshes=, or axes= more of "
            f"{', '.join(SEARCHED)}."
        )
    candidates, requests = list[Candidate](), list[Request]()
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
        )
        mesh = {axis: n for axis, n in request.mesh_shape.items() if n > 1} or {"data": 1}
        parts = [format_mesh(mesh), model, rule]
        parts += [f"accumulate={count}"] if len(counts) > 1 else []
        name = ", ".join(dict.fromkeys(filter(None, parts)))
        requests.append(request)
        candidates.append(
            Candidate(name, mesh, model, rule, count, None, None, fits=False, reason="")
        )
    limit = math.inf if found.memory is None else found.memory * (1 - margin)
    default = platformdirs.user_cache_path("eqxshard") / "plans"
    folder = default if cache is None else local_path(cache, "cache=")
    workers = workers or _default_workers()
    results = _plan_all(requests, limit, where, folder, workers)
    judged = [_judge(*each, limit) for each in zip(candidates, results, strict=True)]
    return make_search(judged, time.perf_counter() - start)


def make_search(candidates: Iterable[Candidate], seconds: float) -> Search:
    """A search that tried these candidates, in any order."""
    ranked = rank(candidates)
    return Search(ranked[0].plan if ranked[0].fits else None, ranked, seconds)


def _plan_all(
    requests: Sequence[Request],
    limit: float,
    where: Backend,
    folder: Path,
    workers: int,
) -> list[Plan | Surveyed]:
    """The plan of each request, or what is known of one that was not compiled."""
    known: list[Surveyed] = run(dump_request(requests), where, "_survey")

    def compile(each: Surveyed, data: bytes) -> Plan | Surveyed:
        if each.problem or each.least > limit:
            return each
        file = folder / f"{each.fingerprint}.json"
        if (kept := read_plan(file)) is not None:
            return kept
        try:
            plan: Plan = run(data, where)
        except (ValueError, TypeError, RuntimeError) as error:
            return Surveyed(problem=str(error).strip().split("\n")[0])
        keep_plan(plan, file)
        return plan

    # Pickled here, because JAX's settings may be those of this thread.
    data = [dump_request(request) for request in requests]
    console = Console(stderr=True)
    with ThreadPoolExecutor(workers) as pool:
        # An interrupt ends the iterator, which cancels what has not started.
        results = track(
            pool.map(compile, known, data),
            "compiling",
            total=len(data),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        return [*results]


def _judge(candidate: Candidate, result: Plan | Surveyed, limit: float) -> Candidate:
    """A candidate with what it needs, and why it does not run if it does not."""
    if isinstance(result, Plan):
        plan, needs, said = result, result.memory.peak, "needs"
    elif result.problem:
        return dataclasses.replace(candidate, reason=result.problem)
    else:
        plan, needs, said = None, result.least, "needs at least"
    reason = ""
    if needs > limit:
        reason = f"does not fit: {said} {format_bytes(needs)} of {format_bytes(limit)}"
    return dataclasses.replace(
        candidate, plan=plan, needs=needs, fits=not reason, reason=reason
    )


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
