"""TensorBoard event files."""

import os
import time
from collections.abc import Mapping
from typing import Any


class TensorBoard:
    """Writes each report to an event file of [TensorBoard](https://www.tensorflow.org/tensorboard).

    **Arguments:**

    - `directory`: the folder of the event files, created if necessary.
    - `purge_after`: hide the values of earlier event files after this step, as a resumed
        run does, which takes those steps again. By default, nothing is hidden.

    **Raises:**

    `ImportError` if TensorBoard is not installed.

    !!! Example

        ```python
        tracker = eqxshard.trackers.TensorBoard("runs/mlp/tensorboard")
        ```
    """

    def __init__(self, directory: str | os.PathLike[str], *, purge_after: int = 0):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ImportError(
                "the TensorBoard tracker needs TensorBoard; install it with `pip install "
                "tensorboard`."
            ) from error
        # Protobuf makes the classes of these modules on import, unseen by type checkers.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer = EventFileWriter(os.fspath(directory))
        if purge_after:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(purge_after + 1, session_log=start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        scalars = [
            self._summaries.Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
        ]
        self._add(step, summary=self._summaries.Summary(value=scalars))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, **content: object) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        self._writer.add_event(event)
