"""`RunFolder`: the folder of a run, and everything that writes to it."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .. import trackers
from ..checkpoint._checkpointer import Checkpointer
from ..loop._tracker import Tracker, Value
from ..trackers._jsonl import JSONLines
from ..trackers._metrics import is_evaluation, is_installed
from ..trackers._progress import ProgressBar
from ..trackers._services import ServiceName, find_service
from ..trackers._writing import Seldom, write_whole
from ._config import Resume
from ._log import read_log
from ._paths import RunPaths
from ._resume import should_resume

_LOG = logging.getLogger(__name__)


class RunFolder(RunPaths):
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
    - `warnings`: `warnings.jsonl`, the warnings of a run of [`eqxshard.train`][].

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
        super().__init__(path)
        self._log: JSONLines | None = None

    def should_resume(
        self, resume: Resume, checkpointer: Checkpointer, *, overwrite: bool = False
    ) -> bool:
        """Decide whether to continue an earlier run in this folder.

        **Arguments:**

        - `resume`: `"no"` refuses a folder that has a run; `"yes"` refuses one that is
            not there; `"auto"` continues a run if there is one.
        - `checkpointer`: the one that saves in this folder.
        - `overwrite`: with `"no"`, do not refuse a folder that has a run.

        **Returns:**

        `True` if there is a checkpoint to continue from, and `resume` is not `"no"`.

        **Raises:**

        `ValueError` if there is a run and there should be none, or the reverse; or files
        that no run wrote have the names of a run's files.
        """
        return should_resume(self, resume, checkpointer, overwrite=overwrite)

    def trackers(
        self,
        *,
        title: str,
        total_steps: int,
        first: int = 0,
        extra: Mapping[str, object] = {},
        services: Sequence[ServiceName] = (),
        settings: Mapping[str, Any] = {},
    ) -> list[Tracker]:
        """The trackers that write to this folder, and a progress bar.

        Call this in process 0 only: it empties the files of an earlier run, or drops their
        reports of steps after `first`.

        **Arguments:**

        - `title`: the title of the curves and of the progress bar.
        - `total_steps`: the step that the run ends at.
        - `first`: the step that it starts from.
        - `extra`: entries to add to every line of `metrics.jsonl`.
        - `services`: the services that get a run, too: `"wandb"`, `"mlflow"` or both.
        - `settings`: the settings that these services record.

        **Returns:**

        The trackers, for [`eqxshard.fit`][].

        **Raises:**

        `ImportError` if the package of a service is not installed, and `ValueError` if
        there is no such service, or it refuses the run.
        """
        # These may fail, if the file of the curves cannot be written or a service refuses
        # the run, so they come before the log is emptied.
        curves: list[Tracker] = []
        if is_installed("matplotlib"):
            curves = [trackers.Curves(self.curves, title=title)]
        remote = self._start_services(services, title, settings, resume=first > 0)
        self._log = JSONLines(self.metrics, extra=extra, keep_until=first or None)
        # The log of a run that begins anew is empty.
        for line in self.history() if first and curves else ():
            others = {k: v for k, v in line.items() if k != "step"}
            numbers = {k: v for k, v in others.items() if isinstance(v, int | float)}
            curves[0].log(line["step"], numbers)
        events: list[Tracker] = []
        if is_installed("tensorboard"):
            # A run that begins anew hides all of an earlier attempt.
            place, hidden = self.path / "tensorboard", first or -1
            events = [trackers.TensorBoard(place, purge_after=hidden)]
        # If this run is stopped, an earlier summary would contradict its metrics.
        self.summary.unlink(missing_ok=True)
        progress = ProgressBar(total_steps, title=title)
        return [self._log, *curves, *events, *remote, _PageTracker(self), progress]

    def _start_services(
        self,
        services: Sequence[ServiceName],
        title: str,
        settings: Mapping[str, Any],
        *,
        resume: bool,
    ) -> list[Tracker]:
        """Make the trackers of services; if one refuses the run, close those before it."""
        started: list[Tracker] = []
        for kind in [find_service(name).tracker for name in services]:
            try:
                started.append(
                    kind(self.path, name=title, settings=settings, resume=resume)
                )
            except Exception as error:
                for tracker in started:
                    tracker.close(error)
                raise
        return started

    def history(self) -> list[dict[str, Any]]:
        """The reports in `metrics.jsonl`, and those that wait for room on a full disk."""
        return read_log(self, self.waiting)

    @property
    def waiting(self) -> Sequence[str]:
        """The lines of the log that wait for room on a full disk."""
        return self._log.waiting if self._log else ()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`; if that fails, log an error."""
        try:
            write_whole(self.summary, json.dumps(summary, indent=2, default=str) + "\n")
        except OSError as error:
            _LOG.error(
                "%s cannot be written: %s. The run is finished.", self.summary, error
            )

    def write_page(self) -> None:
        """Write `index.html` from the other files.

        If that fails, log an error: a page is not worth a run.
        """
        # Imported here: only a run that has something to show needs it.
        from ._page import save_page

        try:
            save_page(self, self.waiting)
        except Exception as error:
            _LOG.error("%s cannot be written: %r. Training continues.", self.page, error)


class _PageTracker:
    """Writes the page of a run after evaluations, and at the end."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._seldom = Seldom(100)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the page after an evaluation, in at most a hundredth of the wall time."""
        if is_evaluation(values):
            self._seldom.call(self._folder.write_page)

    def close(self, error: BaseException | None = None) -> None:
        """Write the page for the last time."""
        self._folder.write_page()
