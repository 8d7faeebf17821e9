"""Runs of MLflow."""

import contextlib
import functools
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..distributed import is_main_process
from ._files import KeptRun
from ._packages import load, one_line
from ._tracker import Image, Value, numbers

#: The most letters that a parameter of MLflow has.
_LONGEST_PARAMETER = 6_000
#: MLflow takes no more of them at a time.
_MOST_PARAMETERS = 100
#: The most reports that wait for a server; a picture among them may have megabytes.
_MOST_WAITING = 1_000

_LOG = logging.getLogger(__name__)


class MLflow:
    """Sends each report to a run of [MLflow](https://mlflow.org).

    Where it goes is set as for MLflow itself, by the environment's `MLFLOW_TRACKING_URI`
    and `MLFLOW_EXPERIMENT_NAME`; by default, into a database in the working folder. With
    several processes, only process 0 has a run.

    **Arguments:**

    - `directory`: for `mlflow.json`, in which the run's id is kept. Created if necessary.
    - `name`: the run's name; by default, MLflow makes one up.
    - `settings`: what the run's parameters are to be, such as the script's arguments.
    - `resume`: continue the run whose id the folder has, if there is one. Steps that it has
        already are not sent again.

    **Raises:**

    `ImportError` if MLflow is not installed. `ValueError` if a new run cannot be created,
    because the server cannot be reached, say. During training, nothing: what fails is
    logged, and training does not wait for the server. If that is away, up to 1,000 reports
    wait for it.

    !!! Example

        ```python
        tracker = eqxshard.trackers.MLflow("runs/mlp", name="mlp", settings={"width": 64})
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str | None = None,
        settings: Mapping[str, Any] = {},
        resume: bool = False,
    ):
        self._mlflow = mlflow = load("mlflow", "MLflow", "'eqxshard[mlflow]'")
        self._sender: _Sender | None = None
        if not is_main_process():
            return
        self._kept = KeptRun(Path(directory) / "mlflow.json", resume=resume)
        try:
            self._client: Any = mlflow.MlflowClient()
            new = self._kept.id is None
            if new:
                self._kept.id = self._create(name, settings)
        except Exception as error:
            raise UsageError(
                f"MLflow cannot create a run at {mlflow.get_tracking_uri()}: "
                f"{one_line(error)} Set MLFLOW_TRACKING_URI to a server that answers."
            ) from error
        self._kept.keep(self._kept.after)
        self._sender = _Sender()
        if not new:
            update = functools.partial(self._client.update_run, self._kept.id)
            self._sender.send(functools.partial(update, status="RUNNING"))

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Send the values of a step, in a thread."""
        if self._sender is not None and step > self._kept.after:
            now = int(1000 * time.time())
            self._sender.send(functools.partial(self._send, step, dict(values), now))

    def close(self, error: BaseException | None = None) -> None:
        """End the run, as it ended; waits until all has arrived, for a minute at most."""
        if self._sender is None:
            return
        sender, self._sender = self._sender, None
        status = "FINISHED" if error is None else "FAILED"
        if isinstance(error, KeyboardInterrupt | SystemExit):
            status = "KILLED"
        end = functools.partial(self._client.set_terminated, self._kept.id, status)
        sender.close(end, 60)

    def _create(self, name: str | None, settings: Mapping[str, Any]) -> str:
        """A new run's id."""
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(wanted)
        found = experiment and experiment.experiment_id
        id = found or self._client.create_experiment(wanted)
        run = self._client.create_run(id, run_name=name)
        parameters = [
            self._mlflow.entities.Param(_plain(key), str(value)[:_LONGEST_PARAMETER])
            for key, value in settings.items()
        ]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            part = parameters[start : start + _MOST_PARAMETERS]
            self._client.log_batch(run.info.run_id, params=part)
        return run.info.run_id

    def _send(self, step: int, values: dict[str, Value], now: int) -> None:
        run = self._kept.id
        metrics = [
            self._mlflow.entities.Metric(_plain(name), float(value), now, step)
            for name, value in numbers(values).items()
        ]
        self._client.log_batch(run, metrics=metrics)
        for name, value in values.items():
            if isinstance(value, Image):
                # Grey has no channels there.
                grey = value.pixels.shape[-1] == 1
                pixels = value.pixels[..., 0] if grey else value.pixels
                options: Any = {"key": _plain(name), "step": step, "synchronous": True}
                self._client.log_image(run, pixels, **options)
        self._kept.keep(step)


def _plain(name: str) -> str:
    """A name without the letters that MLflow refuses."""
    return re.sub(r"[^\w\-. /]", "_", name)


class _Sender:
    """Calls functions in a thread, one after the other, so that a run waits for no server.

    Errors are raised as `OSError`s at the next call, which `fit` logs.
    """

    def __init__(self):
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._drops = False
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        # A process does not wait for it to end.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, call: Callable[[], object]) -> None:
        """Call a function soon; drop it if too many wait."""
        if self._calls.qsize() < _MOST_WAITING:
            self._drops = self._drops and not self._calls.empty()
            self._calls.put(call)
        elif not self._drops:
            self._drops = True
            _LOG.warning(
                "MLflow has not taken the last %d reports; later ones are dropped while it "
                "lags behind.",
                _MOST_WAITING,
            )
        self._raise()

    def close(self, last: Callable[[], object], seconds: int | float) -> None:
        """Call a last function after all others; wait for them some seconds at most."""
        for call in (last, None):
            self._calls.put(call)
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise OSError(
                f"MLflow has not taken the last {self._calls.qsize()} reports in "
                f"{seconds:g} s"
            )
        self._raise()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                self._errors.put(error)

    def _raise(self) -> None:
        with contextlib.suppress(queue.Empty):
            error = self._errors.get_nowait()
            raise OSError(f"MLflow refused a report: {error}") from error
