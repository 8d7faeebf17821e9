"""What a search tried and found, as a value that prints as a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..inspect._tables import render
from ..pages._format import format_bytes, format_seconds
from ._plan import Plan


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
    - `fits`: whether it can run: it was compiled, and leaves the margin of memory.
    - `reason`: why it does not run; empty if it fits.
    """

    name: str
    mesh: Mapping[str, int]
    model: str
    rule: str
    accumulate: int
    plan: Plan | None
    needs: int | None
    fits: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`."""
        plain = dict(vars(self)) | {"mesh": dict(self.mesh)}
        return plain | {"plan": None if self.plan is None else self.plan.to_json()}


@dataclass(frozen=True)
class Search:
    """What [`eqxshard.plan_search`][] found: `print` it.

    - `best`: the [`eqxshard.Plan`][] of the best candidate; `None` if none fits.
    - `candidates`: all that was tried, each an [`eqxshard.Candidate`][]: those that fit,
        best first, then those that were compiled, then the others.
    - `seconds`: how long the search took.
    """

    best: Plan | None
    candidates: tuple[Candidate, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`."""
        return {
            "best": None if self.best is None else self.candidates[0].to_json(),
            "candidates": [each.to_json() for each in self.candidates],
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        tried, fit = len(self.candidates), sum(each.fits for each in self.candidates)
        compiled = sum(each.plan is not None for each in self.candidates)
        head = (
            f"{tried} candidates, of which {compiled} were compiled and {fit} fit, in "
            f"{self.seconds:.0f} s"
        )
        return "\n\n".join(filter(None, [head, render(self._table()), self._advice()]))

    def _table(self) -> Table:
        """A row for each candidate, a column for each cost that any of them has."""
        parts = [_parts(each.plan) for each in self.candidates]
        costs = dict.fromkeys(name for each in parts for name in each)
        table = Table("candidate")
        names = {"compute": "arithmetic", "memory": "memory traffic"}
        for column in ("memory", "step", "mfu", *(names.get(x, x) for x in costs)):
            table.add_column(column, justify="right")
        table.add_column("why it does not run", overflow="fold")
        for each, seconds in zip(self.candidates, parts, strict=True):
            time = None if each.plan is None else each.plan.time
            mfu = None if each.plan is None else each.plan.mfu
            least = "" if each.plan is not None else "> "
            table.add_row(
                each.name,
                "" if each.needs is None else f"{least}{format_bytes(each.needs)}",
                "" if time is None else format_seconds(time.step),
                "" if mfu is None else f"{mfu:.0%}",
                *(format_seconds(seconds[x]) if x in seconds else "" for x in costs),
                each.reason,
            )
        return table

    def _advice(self) -> str:
        """What to try if nothing fits."""
        if self.best is not None:
            return ""
        if self.candidates[0].plan is not None:
            return (
                "Nothing fits; try a larger accumulate, a model that computes more of its "
                "layers again (remat), or more devices."
            )
        if self.candidates[0].needs is not None:
            return (
                "Nothing fits, even without activations; try more devices, a rule that "
                "splits more of the state, such as eqxshard.fsdp(), or a smaller dtype."
            )
        return "Nothing can be compiled; the last column says why."


def _parts(plan: Plan | None) -> dict[str, float]:
    """The seconds of a step by what takes them, without what takes none."""
    if plan is None or plan.time is None:
        return {}
    return {name: seconds for name, seconds in plan.time.parts.items() if seconds}
