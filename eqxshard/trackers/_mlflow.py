"""Runs of MLflow."""

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..distributed import is_main_process
from ._metrics import Value, numbers
from ._writing import write_whole


class MLflow:
    """Sends the numbers of each report to a run of [MLflow](https://mlflow.org).

    MLflow's own environment variables, `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`,
    choose the server and the experiment; by default, the run is in a database in the
    working folder. With several processes, only process 0 has a run.

    **Arguments:**

    - `directory`: the folder of `mlflow_run_id`, the file with the run's id. Created if
        necessary.
    - `name`: the run's name; by default, MLflow makes one up.
    - `settings`: the run's parameters, such as the script's arguments.
    - `resume`: continue the run whose id the folder has, if there is one. Steps that are
        taken again are sent again.

    **Raises:**

    `ImportError` if MLflow is not installed: `pip install 'eqxshard[mlflow]'`. `ValueError`
    if the run cannot be started, for example because the server cannot be reached. MLflow
    sends in a thread of its own, and logs what fails there. `log` and `close` raise
    `OSError` for other failures, which [`eqxshard.fit`][] logs.

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
        self._mlflow: Any = importlib.import_module("mlflow")
        self._id: str | None = None
        if not is_main_process():
            return
        file = Path(directory) / "mlflow_run_id"
        try:
            self._client = self._mlflow.MlflowClient()
            if resume and file.exists():
                self._id = file.read_text()
                self._client.update_run(self._id, status="RUNNING")
            else:
                self._id = self._create(name)
                self._mlflow.log_params(_plain(settings), run_id=self._id)
        except Exception as error:
            raise UsageError(
                f"MLflow cannot start a run at {self._mlflow.get_tracking_uri()} "
                f"({' '.join(str(error).split())}); set MLFLOW_TRACKING_URI to a server "
                "that answers."
            ) from error
        write_whole(file, str(self._id))

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Hand the numbers of a step to MLflow's own thread, which sends them."""
        if self._id is None:
            return
        found = {name: float(value) for name, value in numbers(values).items()}
        options = {"step": step, "run_id": self._id, "synchronous": False}
        try:
            self._mlflow.log_metrics(_plain(found), **options)
        except Exception as error:
            # `fit` logs errors of this type, and goes on.
            raise OSError(f"MLflow refused the values of step {step}: {error}") from error

    def close(self, error: BaseException | None = None) -> None:
        """End the run as finished, failed or killed.

        Waits until everything has arrived, or MLflow gives up.
        """
        id, self._id = self._id, None
        if id is None:
            return
        status = "FINISHED" if error is None else "FAILED"
        if isinstance(error, KeyboardInterrupt | SystemExit):
            status = "KILLED"
        try:
            self._mlflow.flush_async_logging()
            self._client.set_terminated(id, status)
        except Exception as failure:
            raise OSError(f"MLflow did not end the run: {failure}") from failure

    def _create(self, name: str | None) -> str:
        """A new run's id."""
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(wanted)
        place = found.experiment_id if found else self._client.create_experiment(wanted)
        return self._client.create_run(place, run_name=name).info.run_id


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the characters that MLflow refuses in names."""
    return {re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}
