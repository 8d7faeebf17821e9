"""The folder of a run: checkpoints, metrics, curves, a summary, a page."""

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._folder import is_claimed
from ..distributed import broadcast_from_first
from ..sharding._files import read_json, writable_path
from ..trackers._curves import Curves
from ..trackers._files import Seldom, write_whole
from ..trackers._jsonl import JSONLines, is_number, read_whole_lines
from ..trackers._mlflow import MLflow
from ..trackers._progress import ProgressBar
from ..trackers._tensorboard import TensorBoard
from ..trackers._tracker import Tracker, Value, is_evaluation, is_installed
from ..trackers._wandb import WandB
from ._config import Resume, Service

_LOG = logging.getLogger(__name__)

#: Names in a summary whose values are numbers, or null.
_NUMBERS = r"^test_(?!.*_by_epoch$)|_per_epoch$|_per_second$"


class RunFolder:
    """The folder that a run writes to.

    - `path`: the folder.
    - `checkpoints`: where [`eqxshard.Checkpointer`][] saves.
    - `metrics`: `metrics.jsonl`, a line for each report.
    - `curves`: `curves.png`, if Matplotlib is installed.
    - `summary`: `summary.json`, written at the end.
    - `page`: `index.html`, to look at: all of this and more in one file, which loads
        nothing. It is written during the run and at the end.
    - `record`: `run.json`, in which [`eqxshard.train`][] says what the run is, and how it
        ended.
    - `warnings`: `warnings.jsonl`, what [`eqxshard.train`][] warned of.

    **Arguments:**

    - `path`: the folder, which need not exist yet.

    **Raises:**

    `ValueError` if it is the URL of an object store, or has a name that cannot be written
    here.

    !!! Example

        ```python
        folder = eqxshard.run.RunFolder("runs/mlp")
        checkpointer = eqxshard.Checkpointer(folder.checkpoints)
        if folder.should_resume("auto", checkpointer):
            state = checkpointer.restore(like)
        ```
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = writable_path(path, "the folder of a run")
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.curves = self.path / "curves.png"
        self.summary = self.path / "summary.json"
        self.page = self.path / "index.html"
        self.record = self.path / "run.json"
        self.warnings = self.path / "warnings.jsonl"
        self._log: JSONLines | None = None

    def should_resume(
        self, resume: Resume, checkpointer: Checkpointer, *, overwrite: bool = False
    ) -> bool:
        """Whether to continue an earlier run in this folder.

        **Arguments:**

        - `resume`: `"no"` refuses a folder that has a run; `"yes"` needs one; `"auto"`
            continues it if there is one.
        - `checkpointer`: the one that saves in this folder.
        - `overwrite`: with `"no"`, a run is not refused.

        **Raises:**

        `ValueError` if there is a run and there should be none, or the reverse; or files of
        somebody else's have the names of a run's.
        """
        # As process 0 sees it, before it creates the folder: all must do the same.
        found = [checkpointer.steps(), self.path.is_dir(), is_claimed(self.path)]
        found.append(self._find_foreign())
        steps, exists, has_checkpoints, foreign = broadcast_from_first(found)
        if has_checkpoints:
            raise UsageError(
                f"{self.path} is a folder of checkpoints, not of a run; give the run's, "
                f"such as {self.path.parent}."
            )
        if foreign is not None:
            raise UsageError(
                f"{self.path / foreign} is not of a run of eqxshard, and one would replace "
                f"it; give another --output."
            )
        if resume == "no" and steps and not overwrite:
            raise UsageError(
                f"{self.path} has a run at step {steps[-1]}; use --resume auto to continue "
                "it, --overwrite to remove it and start over, or another --output."
            )
        if resume == "yes" and not exists:
            raise UsageError(
                f"{self.path} has no run to resume; leave --resume out, or use --resume "
                "auto."
            )
        return bool(steps) and resume != "no"

    def _find_foreign(self) -> str | None:
        """The name of a file that a run would replace, but that no run of ours wrote."""
        files = (self.metrics, self.curves, self.summary, self.page, self.record)
        here = [file for file in (*files, self.warnings) if os.path.lexists(file)]
        links = [file for file in here if file.is_symlink()]
        is_ours = is_claimed(self.checkpoints) or "starts" in read_values(self.record)
        return next((file.name for file in (links if is_ours else here)), None)

    def trackers(
        self,
        *,
        title: str,
        total_steps: int,
        first: int = 0,
        extra: Mapping[str, object] = {},
        services: Sequence[Service] = (),
        settings: Mapping[str, Any] = {},
    ) -> list[Tracker]:
        """The trackers that write to this folder, and a progress bar.

        Call this in process 0 only: it empties the files of an earlier run, or drops what
        that logged after step `first`.

        **Arguments:**

        - `title`: stands above curves and progress.
        - `total_steps`: the step that the run ends at.
        - `first`: the step that it starts from.
        - `extra`: entries to add to every line of `metrics.jsonl`.
        - `services`: of `"wandb"` and `"mlflow"`, those that get a run, too.
        - `settings`: what these runs are to have as their settings.

        **Raises:**

        `ImportError` if the package of a service is not installed, and `ValueError` if the
        service refuses the run.
        """
        # Before the log is emptied: curves fail if their file cannot be written, and after
        # them services if they refuse the run.
        curves = Curves(self.curves, title=title) if is_installed("matplotlib") else None
        kinds = {"wandb": WandB, "mlflow": MLflow}
        remote: list[Tracker] = []
        for service in services:
            start = kinds[service]
            try:
                remote.append(
                    start(self.path, name=title, settings=settings, resume=first > 0)
                )
            except Exception as error:
                for tracker in remote:
                    tracker.close(error)
                raise
        self._log = JSONLines(self.metrics, extra=extra, keep_until=first or None)
        trackers: list[Tracker] = [self._log]
        if curves is not None:
            for line in self.history():
                others = {k: v for k, v in line.items() if k != "step"}
                numbers = {k: v for k, v in others.items() if isinstance(v, int | float)}
                curves.log(line["step"], numbers)
            trackers.append(curves)
        if is_installed("tensorboard"):
            # A run that begins anew hides all of an earlier attempt.
            events = self.path / "tensorboard"
            trackers.append(TensorBoard(events, purge_after=first or -1))
        # An earlier run's would contradict the metrics if this one is stopped.
        self.summary.unlink(missing_ok=True)
        progress = ProgressBar(total_steps, title=title)
        return [*trackers, *remote, _PageTracker(self), progress]

    def history(self) -> list[dict[str, Any]]:
        """The reports in `metrics.jsonl`, and those that wait for room on a full disk."""
        lines = [line for _, line in read_whole_lines(self.metrics)]
        lines += [json.loads(text) for text in (self._log.waiting if self._log else ())]
        # Somebody may have written others between them.
        return [line for line in lines if isinstance(line.get("step"), int)]

    def read_summary(self) -> dict[str, Any]:
        """What `summary.json` has; empty if there is none, or it is damaged."""
        found = read_values(self.summary)
        read = (x for name, x in found.items() if re.search(_NUMBERS, name))
        return found if all(map(is_number, read)) else {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`. If that fails, it is logged."""
        try:
            write_whole(self.summary, json.dumps(summary, indent=2, default=str) + "\n")
        except OSError as error:
            _LOG.error(
                "%s cannot be written: %s. The run is finished.", self.summary, error
            )

    def write_page(self) -> None:
        """Write `index.html` from the other files.

        If that fails, it is logged: a page is not worth a run.
        """
        from ._page import save_page  # It imports this module.

        try:
            save_page(self)
        except Exception as error:
            _LOG.error("%s cannot be written: %r. Training continues.", self.page, error)


class _PageTracker:
    """Writes the page of a run after evaluations, and at the end."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._seldom = Seldom(100)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the page, if this takes less than a hundredth of the time."""
        if is_evaluation(values):
            self._seldom.call(self._folder.write_page)

    def close(self, error: BaseException | None = None) -> None:
        """Write it for the last time."""
        self._folder.write_page()


def script_name() -> str:
    """The name of the script that runs; empty in an interactive session."""
    script = Path(sys.argv[0]).stem
    return "" if script in ("-c", "-m") else script


def default_folder(name: str | None) -> str:
    """The folder of a run of this script, if the user does not choose another."""
    # A slash would make a folder in a folder.
    words = [script_name(), *re.split(r"[\s/\\]+", (name or "").lower())]
    return f"runs/{'-'.join(filter(None, words)) or 'run'}"


def read_values(path: Path) -> dict[str, Any]:
    """The values of a file of JSON; none if it is missing, or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        if isinstance(found, dict):
            return found
    return {}
