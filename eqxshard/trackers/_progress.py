"""A progress bar, or plain lines for logs."""

import contextlib
import importlib
import sys
import time
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from .._errors import UsageError
from ..distributed import is_main_process
from ..pages._format import format_number, format_value
from ._metrics import Value, metrics, numbers

if TYPE_CHECKING:
    from rich.console import Console


#: Within an epoch, a log gets a line this often.
_SECONDS_BETWEEN_LINES = 60.0


class ProgressBar:
    """Shows the progress of a run, on stderr.

    On a terminal this is a bar with the step, the epoch, the training metrics, the speed
    and the time left, and above it a line for each evaluation. Elsewhere (a file, a job's
    log) it prints plain lines: for the first report, each evaluation, the end of each
    epoch, and in between at most once a minute. A notebook has a bar, too, with the lines
    of evaluations below it. With several processes, only process 0 shows it.

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
        self, total_steps: int, *, title: str = "", console: "Console | None" = None
    ):
        from rich.console import Console

        if total_steps < 1:
            raise UsageError(f"total_steps={total_steps} must be at least 1.")
        self._total = total_steps
        self._console = Console(stderr=True) if console is None else console
        # Started with the first values, so that a run that fails before its first step
        # leaves the terminal alone: the bar and its task, or a notebook's display.
        self._live: Any = None
        # When the next line of a log is due, within an epoch.
        self._next_line = 0.0
        if title and is_main_process():
            # The disk of a log may be full, which is no reason not to train.
            with contextlib.suppress(OSError):
                self._print(title)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Move the bar, or print a line; evaluations always get a line."""
        if not is_main_process():
            return
        values = numbers(values)
        epoch = f"epoch {values['epoch']:.4g}  " if "epoch" in values else ""
        texts = {kind: _text(values, kind) for kind in ("train", "eval", "ema")}
        if self._console.is_jupyter or self._console.is_interactive:
            training = texts.pop("train")
            if training and self._console.is_jupyter:
                self._move_in_notebook(step, epoch + training)
            elif training:
                self._move(step, epoch.rstrip(), training)
        else:
            ends = step == self._total or float(values.get("epoch", 0.5)).is_integer()
            now = time.monotonic()
            if not (ends or now >= self._next_line):
                del texts["train"]
            elif texts["train"]:
                self._next_line = now + _SECONDS_BETWEEN_LINES
        for kind, text in texts.items():
            if text:
                self._print(f"{epoch}step {step}/{self._total}  {kind} {text}")

    def close(self, error: BaseException | None = None) -> None:
        """Stop the bar, and leave it on the terminal."""
        live, self._live = self._live, None
        if live is not None and not self._console.is_jupyter:
            live[0].stop()

    def _print(self, line: str) -> None:
        # On a terminal, lines break between words; in a log, not at all.
        breaks = self._console.is_terminal and not self._console.is_jupyter
        self._console.print(line, highlight=False, markup=False, soft_wrap=not breaks)

    def _move_in_notebook(self, step: int, text: str) -> None:
        """Redraw the bar in its place, above the cell's other output."""
        line = f"{step}/{self._total}  {text}"
        bar = f'<progress value="{step}" max="{self._total}"></progress>'
        html = f'<div style="white-space:pre-wrap">{bar} {escape(line)}</div>'
        shown = {"text/plain": line, "text/html": html}
        if self._live is None:
            display = importlib.import_module("IPython.display").display
            self._live = display(shown, raw=True, display_id=True)
        else:
            self._live.update(shown, raw=True)

    def _move(self, step: int, epoch: str, text: str) -> None:
        from rich import progress

        if self._live is None:
            bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(bar_width=None),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[metrics]}", markup=False),
                progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=self._console,
                # A script's output is printed above the bar, unless it goes to a file.
                redirect_stdout=sys.stdout.isatty(),
                expand=True,
                # The time left is estimated from reports, which can be minutes apart.
                speed_estimate_period=600,
            )
            task = bar.add_task("", total=self._total, completed=step, metrics="")
            bar.start()
            self._live = bar, task
        bar, task = self._live
        bar.update(task, completed=step, description=epoch, metrics=text)


def _text(values: Mapping[str, float], kind: str) -> str:
    """The metrics of one kind; metrics without a kind are shown as training's."""
    parts = [
        f"{metric.name} {format_value(float(metric.value))}"
        for metric in metrics(values)
        if (metric.kind or "train") == kind
    ]
    if kind == "train" and "train/examples_per_second" in values:
        parts.append(f"{format_number(values['train/examples_per_second'])} examples/s")
    return "  ".join(parts)
