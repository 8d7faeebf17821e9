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
    - `reason`: what it lacks, or why it is the best.
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
    - `why`: in words, why the best is the best and what the others lack, or what would
        make one fit.
    - `seconds`: how long the search took.
    """

    best: Plan | None
    candidates: tuple[Candidate, ...]
    why: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it as values for `json.dumps`."""
        return {
            "best": None if self.best is None else self.candidates[0].to_json(),
            "candidates": [each.to_json() for each in self.candidates],
            "why": self.why,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        tried, fit = len(self.candidates), sum(each.fits for each in self.candidates)
        compiled = sum(each.plan is not None for each in self.candidates)
        head = (
            f"{tried} candidates, of which {compiled} were compiled and {fit} fit, in "
            f"{self.seconds:.0f} s"
        )
        return "\n\n".join([head, render(self._table()), self.why])

    def _table(self) -> Table:
        table = Table("candidate")
        table.add_column("memory", justify="right", no_wrap=True)
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("of the peak", justify="right")
        table.add_column("", overflow="fold")
        for each in self.candidates:
            time = None if each.plan is None else each.plan.time
            used = None if each.plan is None else each.plan.utilisation
            least = "" if each.plan is not None else "> "
            table.add_row(
                each.name,
                "" if each.needs is None else f"{least}{format_bytes(each.needs)}",
                "" if time is None else format_seconds(time.step),
                "" if used is None else f"{used:.0%}",
                each.reason,
            )
        return table
