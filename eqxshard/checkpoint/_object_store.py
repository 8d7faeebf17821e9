"""Arrays in object stores, such as `s3://`, each a Zarr array that TensorStore writes.

Orbax does not write to S3. And where processes share no barrier, only a store, each leaves
an object there once its part is written, or could not be.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import jax

from ..distributed import is_main_process
from ._parts import copy_parts, write_parts

#: In the folder of a checkpoint.
ARRAYS = "arrays"
_WRITTEN = "written"
#: An object has at most this many bytes, if the array's part on a device can be halved.
_OBJECT_BYTES = 2**26
#: How much longer than this process itself to wait for the others.
_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.5
#: Half a minute in all; by default, it would be a quarter of an hour.
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "8s"}


def kvstore(folder: Any) -> dict[str, Any]:
    """How TensorStore names a folder of an object store."""
    scheme, _, rest = os.fspath(folder).partition("://")
    bucket, _, path = rest.partition("/")
    where: dict[str, Any] = {"bucket": bucket, "path": f"{path.strip('/')}/"}
    if scheme != "s3":
        return {"driver": "gcs", **where}
    said = os.environ
    endpoint = said.get("AWS_ENDPOINT_URL_S3") or said.get("AWS_ENDPOINT_URL")
    region = said.get("AWS_REGION") or said.get("AWS_DEFAULT_REGION")
    where |= {"endpoint": endpoint} if endpoint else {}
    where |= {"aws_region": region} if region else {}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        where["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3", **where}


def context() -> Any:
    """The settings of TensorStore for object stores."""
    import tensorstore as ts

    return ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


class Upload:
    """Arrays on their way to an object store; `result` writes them.

    **Arguments:**

    - `folder`: an `etils.epath.Path`, in which no process has written yet.
    - `arrays`: the arrays by path. Their parts are copied here, so they may be donated.
    """

    def __init__(self, folder: Any, arrays: Mapping[str, jax.Array]):
        self._folder = folder
        self._parts = copy_parts(arrays, _OBJECT_BYTES)

    def result(self) -> None:
        """Write this process's parts; process 0 also waits for those of the others.

        **Raises:**

        `OSError` if a part could not be written.
        """
        began, fault = time.monotonic(), None
        try:
            write_parts(self._parts, kvstore(self._folder / ARRAYS), context())
        # TensorStore's are ValueErrors, mostly, and end with what it was asked to do.
        except Exception as error:
            fault = str(error).partition(" [")[0] or type(error).__name__
        if jax.process_count() > 1:
            marks = self._folder / _WRITTEN
            (marks / str(jax.process_index())).write_text(fault or "")
            if is_main_process() and fault is None:
                fault = _wait_for_others(marks, time.monotonic() - began)
        if fault is not None:
            raise OSError(fault)


def _wait_for_others(marks: Any, seconds: float) -> str | None:
    """Wait until every process has written; return a sentence if one could not."""
    began = time.monotonic()
    missing = set(range(jax.process_count()))
    while missing and time.monotonic() - began < seconds + _PATIENCE_SECONDS:
        for process in missing & {int(mark.name) for mark in marks.iterdir()}:
            fault = (marks / str(process)).read_text()
            if fault:
                return f"process {process}: {fault}"
            missing.discard(process)
        time.sleep(_POLL_SECONDS if missing else 0)
    return f"process {min(missing)} has not written its part" if missing else None
