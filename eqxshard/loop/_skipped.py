"""`Skipped`: the steps of a run that were skipped because they were not finite.

`_ends.py` looks for the cause of the first of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Skipped:
    """How many steps of a run were skipped.

    - `steps`: their number.
    - `first`: the first of them, counted from 1.
    - `since`: the step from which on they are counted.
    - `found`: a sentence on the cause of the first, once the run has ended.
    """

    steps: int = 0
    first: int = 0
    since: int = 0
    found: str = ""

    def add(self, step: int) -> None:
        """Count a step that was skipped, given by its number from 1."""
        self.steps += 1
        self.first = self.first or step

    def state(self) -> dict[str, int]:
        """The counts as JSON values, for a checkpoint; empty if no step was skipped."""
        if not self.steps:
            return {}
        return {"steps": self.steps, "first": self.first, "since": self.since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.steps, self.first = int(state["steps"]), int(state["first"])
        self.since = int(state["since"])

    def describe(self, last: int) -> str:
        """A sentence that says how many of the steps up to `last` were skipped."""
        since = f" since step {self.since}" if self.since else ""
        were, which = ("was", "") if self.steps == 1 else ("were", "the first of them ")
        return (
            f"{self.steps} of {last - self.since} steps{since} {were} skipped, {which}step "
            f"{self.first}: its loss, a gradient or its update was not finite."
        )
