"""Which candidate of a search is the best, and in words why."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..pages._format import format_bytes, format_seconds
from ..sharding._mesh import BATCH_AXES
from ._candidates import Candidate
from ._compile import count_examples
from ._plan import Plan
from ._request import Request
from ._survey import Surveyed

#: A step that is slower by this part is as good on a simpler mesh.
_AS_FAST = 0.02

#: How many of those that did not win the sentences name.
_NAMED = 2


class Tried(NamedTuple):
    """A candidate before it is judged.

    - `candidate`: without what is said of it.
    - `request`: what was to be compiled.
    - `known`: before it was compiled.
    - `result`: its plan, or why there is none.
    """

    candidate: Candidate
    request: Request
    known: Surveyed
    result: Plan | str


def judge(tried: Sequence[Tried], margin: float) -> tuple[tuple[Candidate, ...], str]:
    """Rank candidates, and say why they rank so.

    **Arguments:**

    - `tried`: in the order of the search.
    - `margin`: the part of the memory that must be left.

    **Returns:**

    The candidates, the best first, and the sentences about the best.
    """
    found = [_measure(each, margin) for each in tried]
    fit = _rank([each for each in found if each.fits])
    if not fit:
        rest = sorted(found, key=_nearness)
        return tuple(rest), _nearest(rest[0], found, tried, margin)
    best, *others = fit
    others = [dataclasses.replace(x, reason=compare(x.plan, best.plan)) for x in others]
    reason = _praise(best, others)
    best = dataclasses.replace(best, reason=reason)
    rest = sorted((each for each in found if not each.fits), key=_nearness)
    simple = sorted((x for x in rest if x.needs is not None), key=lambda x: len(x.mesh))
    told = [*others[:_NAMED], *simple[:_NAMED]]
    sentences = [f"{best.name} wins: {reason}.", *[f"{x.name} {x.reason}." for x in told]]
    return (best, *others, *rest), "\n".join(sentences)


def limit(request: Request, margin: float) -> float:
    """The bytes that a step may need."""
    memory = request.target.memory
    return math.inf if memory is None else memory * (1 - margin)


def _measure(tried: Tried, margin: float) -> Candidate:
    """A candidate with what it needs, and why it does not fit if it does not."""
    candidate, request, known, result = tried
    plan = None if isinstance(result, str) else result
    needs = known.least if plan is None else plan.memory.peak
    fits = plan is not None and plan.memory.peak <= limit(request, margin)
    reason = "" if plan is None else _lack_of_memory(plan, margin)
    return dataclasses.replace(
        candidate,
        plan=plan,
        needs=None if known.problem else needs,
        fits=fits,
        reason=result if isinstance(result, str) else "" if fits else reason,
    )


def lack_of_state(request: Request, known: Surveyed, margin: float) -> str:
    """Why a step need not be compiled, because its arrays alone do not fit."""
    return (
        "does not fit: parameters, optimizer state, gradients and batch alone need "
        f"{format_bytes(known.least)} of the "
        f"{format_bytes(limit(request, margin))} that may be used"
    )


def _lack_of_memory(plan: Plan, margin: float) -> str:
    memory = plan.memory
    if memory.left is None or memory.left < 0:
        kept = memory.parameters + memory.optimizer
        return (
            f"does not fit: it needs {format_bytes(memory.peak)} of "
            f"{format_bytes(memory.device or 0)}, of which parameters and optimizer state "
            f"are {format_bytes(kept)} and temporaries {format_bytes(memory.temporaries)}"
        )
    return (
        f"leaves {format_bytes(memory.left)} of {format_bytes(memory.device or 0)}, less "
        f"than the margin of {margin:.0%}"
    )


def _rank(fit: list[Candidate]) -> list[Candidate]:
    """The fastest first; of those that are as fast, the simplest."""
    if not fit:
        return []
    least = min(map(_cost, fit))

    def simplicity(candidate: Candidate) -> tuple[float, int, int, float]:
        # What a plan without seconds sends is not part of its cost.
        sent = 0.0 if candidate.plan and candidate.plan.time else _sent(candidate.plan)
        return sent, len(candidate.mesh), candidate.accumulate, _cost(candidate)

    as_fast = [x for x in fit if _cost(x) <= least * (1 + _AS_FAST)]
    slower = [x for x in fit if _cost(x) > least * (1 + _AS_FAST)]
    return sorted(as_fast, key=simplicity) + sorted(slower, key=_cost)


def _cost(candidate: Candidate) -> float:
    """The seconds of a step; its arithmetic, if the speed of the target is not known."""
    assert candidate.plan is not None
    time = candidate.plan.time
    return sum(candidate.plan.flops.values()) if time is None else time.step


def _sent(plan: Plan | None) -> float:
    assert plan is not None
    return float(sum(sum(kinds.values()) for kinds in plan.traffic.values()))


def _nearness(candidate: Candidate) -> tuple[bool, float]:
    """First what was compiled, by the memory that it needs; then what cannot run."""
    needs = math.inf if candidate.needs is None else float(candidate.needs)
    return candidate.plan is None, needs


def _parts(plan: Plan) -> dict[str, float]:
    """The seconds of a step by what it waits for."""
    time = plan.time
    if time is None:
        return {}
    links = time.links if time.waiting is None else time.waiting
    waits = {f"{axes} links": seconds for axes, seconds in links.items()}
    return {"arithmetic": time.compute, "memory": time.memory or 0.0} | waits


def _praise(best: Candidate, others: Sequence[Candidate]) -> str:
    plan = best.plan
    assert plan is not None
    said = []
    if others:
        least = min(map(_cost, others))
        said.append(
            f"it is the {'fastest' if plan.time else 'one that computes and sends least'} "
            f"of {len(others) + 1} that fit"
        )
        if plan.time and least < _cost(best):
            faster = next(x for x in others if _cost(x) == least)
            part = 1 - least / _cost(best)
            said[0] = f"it is within {part:.1%} of {faster.name}, and simpler"
    else:
        said.append("it is the only one that fits")
    of = "" if plan.memory.device is None else f" of {format_bytes(plan.memory.device)}"
    said.append(f"it needs {format_bytes(plan.memory.peak)}{of}")
    waits = {k: v for k, v in _parts(plan).items() if k.endswith("links") and v}
    if waits:
        verb = "uses" if plan.time and plan.time.waiting is None else "waits for"
        told = [f"{axes} for {format_seconds(s)}" for axes, s in waits.items()]
        said.append(f"of {format_seconds(_cost(best))} it {verb} {', '.join(told)}")
    elif plan.time is not None:
        said.append(f"a step takes {format_seconds(plan.time.step)}")
    return "; ".join(said)


def compare(plan: Plan | None, best: Plan | None) -> str:
    """What a plan that fits lacks."""
    assert plan is not None and best is not None
    if plan.time is None or best.time is None:
        mine, its = (sum(each.flops.values()) for each in (plan, best))
        if mine > (1 + _AS_FAST) * its:
            return f"fits, but computes {mine / max(its, 1):.2g}x as much on each device"
        more = _sent(plan) - _sent(best)
        return f"fits, but sends {format_bytes(more)} more" if more > 0 else "fits as well"
    ratio = plan.time.step / best.time.step if best.time.step else 1.0
    mine, its = _parts(plan), _parts(best)
    worse = {name: mine[name] - its.get(name, 0.0) for name in mine}
    cause = max(worse, key=lambda name: worse[name])
    if abs(ratio - 1) < 0.005 or worse[cause] <= 0:
        return f"fits, and is {'as fast' if ratio < 1.005 else f'{ratio:.2f}x as slow'}"
    how = f"fits, but takes {ratio:.2f}x as long" if ratio > 1 else "fits, is as fast"
    return f"{how}: {_cause(cause, worse[cause], plan, best)}"


def _cause(cause: str, seconds: float, plan: Plan, best: Plan) -> str:
    longer = format_seconds(seconds)
    if cause == "memory":
        return f"it reads and writes memory for {longer} more"
    if cause == "arithmetic":
        mine, its = sum(plan.flops.values()), sum(best.flops.values())
        times = f", {mine / its:.2f}x as many operations" if mine > 1.005 * its else ""
        return f"it computes for {longer} more{times}"
    axes = cause.removesuffix(" links")
    mine, its = (sum(x.traffic.get(axes, {}).values()) for x in (plan, best))
    sends = f"sends {format_bytes(mine)}"
    if its:
        sends += f", {mine / its:.2g}x as many bytes"
    verb = "uses" if plan.time and plan.time.waiting is None else "waits for"
    return f"it {verb} the links of {axes} for {longer} more, and {sends} along them"


def _nearest(
    nearest: Candidate, found: list[Candidate], tried: Sequence[Tried], margin: float
) -> str:
    """What comes nearest to fitting, and what would make it fit."""
    one = tried[found.index(nearest)]
    most, least = limit(one.request, margin), one.known.least
    if nearest.needs is None or (nearest.plan is None and least <= most):
        return f"Nothing can be compiled. {nearest.name}: {nearest.reason}."
    said = f"Nothing fits. {nearest.name} is nearest: it {nearest.reason}."
    if nearest.plan is None or least > most:
        states = {each.known.state for each in tried if not each.known.problem}
        if len(states) == 1 and len({str(each.request.mesh_shape) for each in tried}) > 1:
            return f"{said} The rule splits nothing on any mesh; use eqxshard.fsdp()."
        devices = math.ceil(one.request.devices * least / most)
        return (
            f"{said} If all of it were split, {devices} devices could hold it; or use "
            f"devices of {format_bytes(least / (1 - margin))} or more."
        )
    temporaries, over = nearest.plan.memory.temporaries, nearest.needs - most
    said += f" Its temporaries must shrink by {format_bytes(over)}"
    parts = math.prod(nearest.mesh.get(axis, 1) for axis in BATCH_AXES)
    rows = count_examples(one.request.batch)[0] // parts
    more = [n for n in range(nearest.accumulate + 1, rows + 1) if rows % n == 0]
    if more:
        wanted = nearest.accumulate * temporaries / max(temporaries - over, 1.0)
        enough = next((n for n in more if n >= wanted), more[-1])
        return f"{said}: try accumulate={enough}, or compute more of it again (remat)."
    return (
        f"{said}, and each device has one row at a time: compute more of it again (remat), "
        "or split sequences over context or layers over tensor."
    )
