"""TensorBoard event files."""

import io
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..distributed import is_main_process
from ..sharding._files import local_path
from ..sharding._text import GONE
from ._metrics import Image, Value

_LOG = logging.getLogger(__name__)


class TensorBoard:
    """Writes each report to an event file of [TensorBoard](https://www.tensorflow.org/tensorboard).

    With several processes, only process 0 writes.

    **Arguments:**

    - `directory`: the folder of the event files, created if necessary.
    - `purge_after`: hide the values after this step in earlier event files: a resumed run
        takes those steps again; -1 hides all. By default, nothing is hidden.

    **Raises:**

    `ImportError` if TensorBoard is not installed. `ValueError` if the folder is a URL.

    !!! Example

        ```python
        tracker = eqxshard.trackers.TensorBoard("runs/mlp/tensorboard")
        ```
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, purge_after: int | None = None
    ):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # Protobuf makes the classes of these modules on import, unseen by type checkers.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._new_writer = EventFileWriter
        self._folder = str(local_path(directory, "the folder of the events"))
        if not is_main_process():
            return
        self._writer = self._new_writer(self._folder)
        if purge_after is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(purge_after + 1, session_log=start)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the values of a step."""
        if not is_main_process():
            return
        if not os.path.isdir(self._folder):
            _LOG.warning(GONE, self._folder, "the events in it")
            self._writer.close()
            self._writer = self._new_writer(self._folder)
        found = [
            self._summaries.Summary.Value(tag=name, **self._native(value))
            for name, value in values.items()
        ]
        self._add(step, summary=self._summaries.Summary(value=found))
        self._writer.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Close the file."""
        if is_main_process():
            self._writer.close()

    def _native(self, value: Value) -> dict[str, Any]:
        """The field of a summary that holds a value."""
        if isinstance(value, Image):
            height, width, channels = value.pixels.shape
            image = {"height": height, "width": width, "colorspace": channels}
            encoded = _encode_png(value.pixels)
            summary = self._summaries.Summary
            return {"image": summary.Image(encoded_image_string=encoded, **image)}
        return {"simple_value": float(value)}

    def _add(self, step: int, **content: object) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        self._writer.add_event(event)


def _encode_png(pixels: np.ndarray) -> bytes:
    from PIL import Image  # TensorBoard requires Pillow.

    file = io.BytesIO()
    grey = pixels.shape[-1] == 1
    Image.fromarray(pixels[..., 0] if grey else pixels).save(file, "PNG")
    return file.getvalue()
