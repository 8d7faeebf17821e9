"""A progress bar, or plain lines for logs."""

import contextlib
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ..loop._media import Value, numbers
from ._notebook import NotebookBar
from ._values import metrics


class ProgressBar:
    """Shows the progress of a run, on stderr.

    On a terminal this is a bar with the step, the epoch, the training metrics, the speed
    and the time left, and above it a line for each evaluation. Elsewhere (a file, a job's
    log) it is a plain line for each epoch and each evaluation. A notebook has a bar, too,
    with the lines of evaluations below it.

    **Arguments:**

    - `total_steps`: the number of steps at the end of the run, counted from step 0.
    - `title`: printed first, to identify the run.
    - `console`: where to print, instead of stderr.

    **Raises:**

    `ValueError` if `total_steps` is not positive.

    !!! Example

        ```python
        steps = 10 * len(loader)
        tracker = eqxshard.trackers.ProgressBar(steps, title="MLP, 10 epochs")
        ```
    """

    def __init__(
        self, total_steps: int, *, title: str = "", console: Console | None = None
    ):
        if total_steps < 1:
            raise ValueError(f"total_steps={total_steps} must be at least 1.")
        self._total = total_steps
        self._console = Console(stderr=True) if console is None else console
        # Started with the first values, so that a run that fails before its first step
        # leaves the terminal alone.
        self._live: tuple[Progress, TaskID] | None = None
        self._in_notebook = NotebookBar(total_steps)
        if title:
            # The disk of a log may be full, which is no reason not to train.
            with contextlib.suppress(OSError):
                self._print(title)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Move the bar, or print a line; evaluations always get a line."""
        values = numbers(values)
        if self._console.is_jupyter:
            if _has(values, "train"):
                where = f"{_epoch(values)}{_text(values, 'train')}"
                self._in_notebook.move(step, where)
            due = {"eval"}
        elif self._console.is_interactive:
            if _has(values, "train"):
                self._move(step, values)
            due = {"eval"}
        else:
            whole_epoch = float(values.get("epoch", 0.5)).is_integer()
            due = {"train", "eval"} if whole_epoch or step == self._total else {"eval"}
        for kind in ("train", "eval"):
            if kind in due and _has(values, kind):
                where = f"{_epoch(values)}step {step}/{self._total}"
                self._print(f"{where}  {kind} {_text(values, kind)}")

    def close(self, error: BaseException | None = None) -> None:
        """Stop the bar, and leave it on the terminal."""
        if self._live is not None:
            self._live[0].stop()
            self._live = None

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _move(self, step: int, values: Mapping[str, float]) -> None:
        if self._live is None:
            progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}", markup=False),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=self._console,
                # What a script prints stays above the bar, but in its own file if it
                # has one.
                redirect_stdout=sys.stdout.isatty(),
                expand=True,
                # The time left is estimated from reports, which can be minutes apart.
                speed_estimate_period=600,
            )
            task = progress.add_task("", total=self._total, completed=step, metrics="")
            progress.start()
            self._live = progress, task
        progress, task = self._live
        progress.update(
            task,
            completed=step,
            description=_epoch(values).rstrip(),
            metrics=_text(values, "train"),
        )


def _epoch(values: Mapping[str, float]) -> str:
    return f"epoch {values['epoch']:.4g}  " if "epoch" in values else ""


def _has(values: Mapping[str, float], kind: str) -> bool:
    # Values without a kind are shown with those of training.
    return any((metric.kind or "train") == kind for metric in metrics(values))


def _text(values: Mapping[str, float], kind: str) -> str:
    parts = [
        f"{metric.name} {metric.value:#.4g}"
        for metric in metrics(values)
        if (metric.kind or "train") == kind
    ]
    if kind == "train" and "train/examples_per_second" in values:
        parts.append(f"{values['train/examples_per_second']:,.0f} examples/s")
    return "  ".join(parts)
