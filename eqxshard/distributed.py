"""Several processes that run one script: how they find each other, and that they agree."""

import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

_FAREWELL_SECONDS = 2.0

#: How `eqxshard.launch`, or a job file, says what `initialize` is not told.
ADDRESS, PROCESSES, PROCESS = "EQXSHARD_ADDRESS", "EQXSHARD_PROCESSES", "EQXSHARD_PROCESS"


def initialize(
    address: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    start_seconds: int | None = None,
    heartbeat_seconds: int | None = None,
) -> None:
    """Join the other processes of this run, if there are any.

    Call it first, before JAX has looked for devices. Where there is one process, it does
    nothing, so that a script runs unchanged on a laptop and on a cluster. It uses
    [`jax.distributed`][jax.distributed.initialize], which finds the others by itself under
    SLURM and Open MPI.

    All processes must run the same code on the same versions of Python and JAX, with as
    many devices each: this is checked here. That they also have the same mesh, seeds and
    batches is checked where these are made.

    **Arguments:**

    - `address`: `HOST:PORT` of process 0, at which it listens for the others.
    - `processes`: how many there are.
    - `process`: which of them this is, from 0. Where the three are not given, they are
        taken from `$EQXSHARD_ADDRESS`, `$EQXSHARD_PROCESSES` and `$EQXSHARD_PROCESS`, as
        set by `python -m eqxshard.launch`, or else from the cluster.
    - `start_seconds`: how long to wait for the others: 300, or
        `$EQXSHARD_START_SECONDS`.
    - `heartbeat_seconds`: for how long a process may give no sign of life; then all end.
        30, or `$EQXSHARD_HEARTBEAT_SECONDS`.

    **Raises:**

    `ValueError` if only some of the three are known, or the processes differ.
    `RuntimeError` if the others do not come.

    !!! Example

        ```python
        if __name__ == "__main__":
            eqxshard.initialize()
            mesh = eqxshard.make_mesh()
        ```
    """
    number = os.environ.get(PROCESSES) if processes is None else processes
    which = os.environ.get(PROCESS) if process is None else process
    address = os.environ.get(ADDRESS) if address is None else address
    given = {"address": address, "processes": number, "process": which}
    missing = [name for name, value in given.items() if value is None]
    if number is not None and _number("processes", number) == 1:
        return
    if 0 < len(missing) < 3:
        known = [name for name in given if name not in missing]
        raise ValueError(
            f"initialize knows {' and '.join(known)}, and not {' and '.join(missing)}; "
            f"give all three, as arguments or as ${ADDRESS}, ${PROCESSES} and ${PROCESS}."
        )
    if missing and not _in_cluster():
        return
    # An exception ends the process: JAX's own way out waits for the others, which wait.
    sys.excepthook = _leave
    jax.distributed.initialize(
        address,
        None if number is None else _number("processes", number),
        None if which is None else _number("process", which),
        # JAX looks at the cluster for more than is missing: a GPU of SLURM's, say.
        cluster_detection_method=None if missing else "deactivate",
        initialization_timeout=_seconds("start_seconds", start_seconds, 300),
        heartbeat_timeout_seconds=_seconds("heartbeat_seconds", heartbeat_seconds, 30),
    )
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        says = ", ".join(f"process {p} has {n}" for p, n in sorted(counts.items()))
        raise ValueError(
            f"the processes have different numbers of devices ({says}); start all of them "
            "with as many."
        )
    agree("process", _versions())


def _number(name: str, value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not a number; give one.") from None


def _seconds(name: str, given: int | None, default: int) -> int:
    value = os.environ.get(f"EQXSHARD_{name.upper()}", default) if given is None else given
    return _number(name, value)


def _leave(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(1)


def leave(status: int) -> NoReturn:
    """End this process: after a mistake without waiting for the others, who wait for it.

    **Arguments:**

    - `status`: the exit status, 0 if all went well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if status and jax.distributed.is_initialized():
        # The others may be about to say the same, and are cut off when one is gone.
        time.sleep(_FAREWELL_SECONDS)
        os._exit(status)
    sys.exit(status)


def is_first() -> bool:
    """Whether this is the process that writes what is written once."""
    return jax.process_index() == 0


def is_shared(devices: Iterable[Any]) -> bool:
    """Whether devices, such as a mesh's, are of several processes."""
    return len({device.process_index for device in devices}) > 1


def agree(what: str, facts: dict[str, Any]) -> None:
    """Raise in every process unless all of them say the same.

    **Arguments:**

    - `what`: what the facts are about. All processes must ask about the same.
    - `facts`: what JSON can hold, by name.

    **Raises:**

    `ValueError` naming what differs, and in which processes.
    """
    if jax.process_count() == 1:
        return
    told = [{"step": what} | theirs for theirs in gather({"step": what} | facts)]
    names = dict.fromkeys(name for theirs in told for name in theirs)
    for name in names:
        values: dict[str, list[int]] = {}
        for process, theirs in enumerate(told):
            values.setdefault(json.dumps(theirs.get(name)), []).append(process)
        if len(values) > 1:
            says = "; ".join(
                f"{value} in process {', '.join(map(str, where))}"
                for value, where in values.items()
            )
            raise ValueError(
                f"the processes of this run differ in {what} {name}: {says}. Start all of "
                "them alike."
            )


def from_first(value: Any) -> Any:
    """What the first process has, in all of them: what JSON can hold."""
    return gather(value)[0]


def on_host(array: jax.Array) -> np.ndarray:
    """All of an array, wherever its parts lie: all processes must ask for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))


def barrier(name: str) -> None:
    """Wait until all processes are here."""
    agree("place", {"name": name})


def gather(value: Any) -> list[Any]:
    """What each process has, in all of them: what JSON can hold."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.ravel(process_allgather(np.int32(len(data))))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def _in_cluster() -> bool:
    """Whether a scheduler started this process as one of several."""
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(name, "1") != "1":
            return True
    return False


def _versions() -> dict[str, str]:
    main = getattr(sys.modules["__main__"], "__file__", None)
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "eqxshard's code": _digest(files),
        "script's code": _digest([Path(main)] if main else []),
    }


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
