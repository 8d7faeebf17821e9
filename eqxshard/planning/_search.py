"""`plan_search`: the best mesh, rule, model and accumulation, before there are devices."""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optax
from jaxtyping import PyTree

from ..sharding._paths import local_path
from ..sharding._rule import Rule
from ..sharding._text import format_mesh
from ..training._config import Nonfinite
from ..training._precision import Precision
from ._backends import Backend, find_backend
from ._candidates import Candidate, Search
from ._make_plan import make_request, mesh_sizes
from ._meshes import SEARCHED, mesh_shapes
from ._plan import Plan
from ._pool import compile_all, default_folder, default_workers
from ._process import run
from ._reasons import Tried, judge, lack_of_state, limit
from ._request import Request, Survey, dump_request
from ._survey import Surveyed
from ._targets import Compiler, Target


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
    grad_norms: bool | Mapping[str, str] = False,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> Search:
    """The fastest way to run a training step that fits, on devices that are not there.

    Every mesh is tried with every model, rule and number of microbatches. What cannot
    divide, or does not fit by the bytes of its state alone, is not compiled. The rest is
    planned as by [`eqxshard.plan`][], several at a time, and kept on disk: the same
    search again takes seconds, until your code or a version changes.

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

    An [`eqxshard.Search`][], which prints as a table and says why the best is the best. A
    candidate that cannot be compiled is a row with the reason.

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
    models = dict(make_model) if isinstance(make_model, Mapping) else {"": make_model}
    shared = {
        "loss_fn": loss_fn,
        "optim": optim,
        "batch": batch,
        "rules": rules,
        "accumulate": accumulate,
        "trainable": trainable,
        "precision": precision,
        "nonfinite": nonfinite,
        "grad_norms": grad_norms,
    }
    _check("make_model", models)
    return search(
        {name: {"make_model": model, **shared} for name, model in models.items()},
        devices=devices,
        target=target,
        meshes=meshes,
        axes=axes,
        margin=margin,
        backend=backend,
        cache=cache,
        workers=workers,
    )


def search(
    variants: Mapping[str, Mapping[str, Any]],
    *,
    devices: int,
    target: str | Target,
    backend: Compiler | None,
    meshes: Sequence[Mapping[str, int]] | None = None,
    axes: Sequence[str] = ("data", "fsdp", "tensor"),
    margin: float = 0.05,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> Search:
    """`plan_search` for steps that may differ in anything.

    **Arguments:**

    - `variants`: by name, the arguments of `plan_search` that say what a step is.
    - `devices` and all others: as for `plan_search`.
    """
    start = time.perf_counter()
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1.")
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} is not a part; use one from 0 to 1, as 0.05.")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1.")
    found = Target.named(target) if isinstance(target, str) else target
    shapes = mesh_shapes(devices, axes, found.per_host) if meshes is None else meshes
    sizes = [mesh_sizes(shape, devices) for shape in shapes]
    _check("meshes", sizes, f"give meshes=, or axes= more of {', '.join(SEARCHED)}")
    steps: list[_Step] = []
    shared = {"target": found, "devices": devices, "backend": backend}
    for name, given in variants.items():
        steps += _steps(name, given, mesh_shape=sizes[0], **shared)
    counts = {step.request.options["accumulate"] for step in steps}
    candidates = [
        (_candidate(size, step, len(counts) > 1), step.on(size))
        for size, step in itertools.product(sizes, steps)
    ]
    folder = default_folder() if cache is None else local_path(cache, "cache=")
    where = find_backend(found, backend)
    tried = _try(candidates, where, folder, workers or default_workers(), margin)
    ranked, why = judge(tried, margin)
    best = ranked[0].plan if ranked[0].fits else None
    return Search(best, ranked, why, time.perf_counter() - start)


class _Step(NamedTuple):
    """What is searched for a mesh: the names of the model and the rule, and the rest."""

    model: str
    rule: str
    request: Request

    def on(self, sizes: Mapping[str, int]) -> Request:
        return dataclasses.replace(self.request, mesh_shape=sizes)


def _steps(name: str, given: Mapping[str, Any], **options: Any) -> Iterator[_Step]:
    """One for each rule and number of microbatches."""
    rest = dict(given)
    rules, counts = rest.pop("rules"), rest.pop("accumulate")
    named = dict(rules) if isinstance(rules, Mapping) else {"": rules}
    counts = (counts,) if isinstance(counts, int) else tuple(counts)
    _check("rules", named)
    _check("accumulate", counts)
    step_options = {option: rest.pop(option) for option in ("nonfinite", "grad_norms")}
    # They share their objects, by which a survey knows what differs in the mesh alone.
    first, _ = make_request(
        **rest, **options, rule=next(iter(named.values())), options=step_options
    )
    for (rule, function), count in itertools.product(named.items(), counts):
        changes = {"rule": function, "options": {"accumulate": count, **step_options}}
        yield _Step(name, rule, dataclasses.replace(first, **changes))


def _try(
    candidates: list[tuple[Candidate, Request]],
    where: Backend,
    folder: Path,
    workers: int,
    margin: float,
) -> list[Tried]:
    """Compile all that may fit, what looks cheapest first."""
    survey = Survey(tuple(request for _, request in candidates))
    known: list[Surveyed]
    known = run(dump_request(survey), where, "_survey")
    results: list[Plan | str] = [""] * len(known)
    first_of: dict[str, int] = {}
    for number, ((_, request), each) in enumerate(zip(candidates, known, strict=True)):
        if each.problem:
            results[number] = each.problem
        elif each.least > limit(request, margin):
            results[number] = lack_of_state(request, each, margin)
        elif each.fingerprint in first_of:
            same = candidates[first_of[each.fingerprint]][0].name
            results[number] = f"is the same step as {same}"
        else:
            first_of[each.fingerprint] = number

    def looks(number: int) -> tuple[int, int, int]:
        candidate, request = candidates[number]
        return len(candidate.mesh), request.options["accumulate"], known[number].state

    order = sorted(first_of.values(), key=looks)
    requests = {known[number].fingerprint: candidates[number][1] for number in order}
    plans = compile_all(requests, where, folder, workers)
    for number in order:
        results[number] = plans[known[number].fingerprint]
    return [
        Tried(candidate, request, each, result)
        for (candidate, request), each, result in zip(
            candidates, known, results, strict=True
        )
    ]


def _candidate(sizes: Mapping[str, int], step: _Step, counts_differ: bool) -> Candidate:
    mesh = {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}
    count = step.request.options["accumulate"]
    parts = [format_mesh(mesh)]
    parts += [part for part in (step.model, step.rule) if part]
    parts += [f"accumulate={count}"] if counts_differ else []
    return Candidate(
        name=", ".join(dict.fromkeys(parts)),
        mesh=mesh,
        model=step.model,
        rule=step.rule,
        accumulate=count,
        plan=None,
        needs=None,
        fits=False,
        reason="",
    )


def _check(name: str, values: Any, remedy: str = "give at least one") -> None:
    """Refuse a search of nothing."""
    if not values:
        raise ValueError(f"{name} is empty, so there is nothing to try; {remedy}.")
