"""`plan_search`: the best mesh, rule, model and accumulation, before there are devices."""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
from jaxtyping import PyTree

from ..sharding._rule import Rule
from ..training._config import Nonfinite
from ..training._precision import Precision
from ._backends import Backend
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
    start = time.perf_counter()
    _check(margin, workers)
    found = Target.named(target) if isinstance(target, str) else target
    models = dict(make_model) if isinstance(make_model, Mapping) else {"": make_model}
    named_rules = dict(rules) if isinstance(rules, Mapping) else {"": rules}
    counts = (accumulate,) if isinstance(accumulate, int) else tuple(accumulate)
    shapes = mesh_shapes(devices, axes, found.per_host) if meshes is None else meshes
    sizes = [mesh_sizes(shape, devices) for shape in shapes]
    _check_all(models, named_rules, counts, sizes)
    first, where = make_request(
        mesh_shape=sizes[0],
        target=found,
        devices=devices,
        backend=backend,
        optim=optim,
        batch=batch,
        make_model=models[next(iter(models))],
        loss_fn=loss_fn,
        rule=named_rules[next(iter(named_rules))],
        trainable=trainable,
        precision=precision,
        options={"accumulate": 1, "nonfinite": nonfinite, "grad_norms": grad_norms},
    )
    candidates: list[tuple[Candidate, Request]] = []
    for size, model, rule, count in itertools.product(sizes, models, named_rules, counts):
        request = dataclasses.replace(
            first,
            mesh_shape=size,
            make_model=models[model],
            rule=named_rules[rule],
            options={**first.options, "accumulate": count},
        )
        candidates.append((_candidate(size, model, rule, count, counts), request))
    folder = default_folder() if cache is None else Path(cache)
    tried = _try(candidates, where, folder, workers or default_workers(), margin)
    ranked, why = judge(tried, margin)
    best = ranked[0].plan if ranked[0].fits else None
    return Search(best, ranked, why, time.perf_counter() - start)


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


def _candidate(
    sizes: Mapping[str, int], model: str, rule: str, count: int, counts: Sequence[int]
) -> Candidate:
    mesh = {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}
    parts = [f"{axis}={size}" for axis, size in mesh.items()]
    parts += [part for part in (model, rule) if part]
    parts += [f"accumulate={count}"] if len(counts) > 1 else []
    return Candidate(
        name=", ".join(parts),
        mesh=mesh,
        model=model,
        rule=rule,
        accumulate=count,
        plan=None,
        needs=None,
        fits=False,
        reason="",
    )


def _check(margin: float, workers: int | None) -> None:
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} is not a part; use one from 0 to 1, as 0.05.")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1.")


def _check_all(models: Any, rules: Any, counts: Any, sizes: Any) -> None:
    """Refuse a search of nothing."""
    given = {"make_model": models, "rules": rules, "accumulate": counts, "meshes": sizes}
    for name, values in given.items():
        if not values:
            remedy = "give at least one"
            if name == "meshes":
                remedy = f"give meshes=, or axes= more of {', '.join(SEARCHED)}"
            raise ValueError(f"{name} is empty, so there is nothing to try; {remedy}.")
