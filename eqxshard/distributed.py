"""Several processes that run one script: joining, and checking that they agree.

It knows processes and JSON. Every room may import it; it imports no room.
"""

import hashlib
import itertools
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

from ._errors import UsageError
from ._jax import coordination_client

#: How long a failed process waits before it exits, for the others to print their errors.
_LAST_WORDS_SECONDS = 2.0

#: How long a process waits for others by default.
_WAIT_SECONDS = 600

#: The environment variables of the launcher and of job files, read by `initialize`.
ADDRESS, PROCESSES, PROCESS = "EQXSHARD_ADDRESS", "EQXSHARD_PROCESSES", "EQXSHARD_PROCESS"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    wait_seconds: int | None = None,
    heartbeat_seconds: int | None = None,
) -> None:
    """Join the other processes of this run, if there are any.

    Call it first, before JAX has looked for devices. With a single process it does
    nothing, so a script runs unchanged on a laptop and on a cluster. It uses
    [`jax.distributed`][jax.distributed.initialize], which finds the other processes by
    itself under SLURM and Open MPI.

    All processes must run the same code on the same versions of Python and JAX, with the
    same number of devices each: this is checked here. That they also have the same mesh,
    seeds and batches is checked where these are made.

    **Arguments:**

    - `coordinator_address`: `HOST:PORT` of process 0, which listens there.
    - `num_processes`: the number of processes.
    - `process_id`: the number of this process, from 0. If none of the three is given,
        they are read from `$EQXSHARD_ADDRESS`, `$EQXSHARD_PROCESSES` and
        `$EQXSHARD_PROCESS`, which `python -m eqxshard.launch` sets, or else from the
        cluster.
    - `wait_seconds`: how long a process waits for the others: to join, each time that they
        compare or exchange something, and at the end of the script. By default,
        `$EQXSHARD_WAIT_SECONDS` if set, else 600. These are JAX's own time-outs, whose
        errors name the missing processes (except those that did not join).
    - `heartbeat_seconds`: how long a process may be silent before JAX ends all of them. By
        default, `$EQXSHARD_HEARTBEAT_SECONDS` if set, else 30.

    **Raises:**

    `ValueError` if only some of the three are known, if one of these values is not a
    number, if `process_id` is not less than `num_processes`, if the address is not
    `HOST:PORT`, or if the processes differ. If others do not join in time, JAX ends this
    process with status 134.

    !!! Example

        ```python
        if __name__ == "__main__":
            eqxshard.initialize()
            mesh = eqxshard.make_mesh()
        ```
    """
    asked = {
        "coordinator_address": (coordinator_address, ADDRESS),
        "num_processes": (num_processes, PROCESSES),
        "process_id": (process_id, PROCESS),
    }
    given: dict[str, Any] = {
        name: os.environ.get(variable) if value is None else value
        for name, (value, variable) in asked.items()
    }
    count = given["num_processes"]
    if count is not None and (count := _integer("num_processes", count)) == 1:
        return
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        known = [name for name in given if name not in missing]
        raise UsageError(
            f"initialize has {' and '.join(known)} but not {' and '.join(missing)}; give "
            f"all three, as arguments or as ${ADDRESS}, ${PROCESSES} and ${PROCESS}."
        )
    if missing and not _in_cluster():
        return
    # An exception must end the process: JAX's own exit waits for the others, which wait.
    sys.excepthook = _exit_on_error
    address, number = given["coordinator_address"], given["process_id"]
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise UsageError(
            f"coordinator_address={address!r} is not HOST:PORT; write one such as "
            "node-1:29400."
        )
    wait = _seconds("wait_seconds", wait_seconds, _WAIT_SECONDS)
    jax.distributed.initialize(
        address,
        count,
        None if number is None else _integer("process_id", number),
        # Otherwise JAX would also ask the cluster, for example for SLURM's GPUs.
        cluster_detection_method=None if missing else "deactivate",
        initialization_timeout=wait,
        shutdown_timeout_seconds=wait,
        heartbeat_timeout_seconds=_seconds("heartbeat_seconds", heartbeat_seconds, 30),
    )
    _exchange.wait_seconds = wait
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        says = ", ".join(f"process {p} has {n}" for p, n in sorted(counts.items()))
        raise UsageError(
            f"the processes have different numbers of devices ({says}); start all of them "
            "with the same number."
        )
    assert_same_on_all_processes("process", _versions())


def exit_process(status: int) -> NoReturn:
    """End this process; after an error, without waiting for the others.

    **Arguments:**

    - `status`: the exit status, 0 for success.
    """
    if status and jax.distributed.is_initialized():
        abort_process(status)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


def abort_process(status: int) -> NoReturn:
    """End this process from any thread, without waiting for the others or its own threads.

    **Arguments:**

    - `status`: the exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.distributed.is_initialized():
        # The others may be about to print the same error, and are killed once one is gone.
        # Process 0 goes last, because the others log at length that it is gone.
        time.sleep(_LAST_WORDS_SECONDS * (1.5 if is_main_process() else 1))
    os._exit(status)


def count_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_main_process() -> bool:
    """True in process 0, which writes what is written once."""
    return jax.process_index() == 0


def spans_processes(devices: Iterable[Any]) -> bool:
    """True if devices, such as a mesh's, belong to several processes."""
    return len({device.process_index for device in devices}) > 1


def assert_same_on_all_processes(what: str, facts: dict[str, Any]) -> None:
    """Raise in every process unless all have the same facts.

    **Arguments:**

    - `what`: the subject of the facts, such as `"loader"`. All processes must call this
        for the same subjects in the same order.
    - `facts`: JSON values by name.

    **Raises:**

    `ValueError` naming what differs, and in which processes.
    """
    if jax.process_count() == 1:
        return
    everyone = _exchange.gather(f"the {what} of all processes", facts)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    for name in names:
        if differ := _differences(json.dumps(theirs.get(name)) for theirs in everyone):
            raise UsageError(
                f"the processes of this run differ in {what} {name}: {differ}. Start all "
                "of them alike."
            )


def broadcast_from_first(value: Any) -> Any:
    """Process 0's value, in every process. It must be JSON."""
    return allgather_json(value)[0]


def allgather_json(value: Any) -> list[Any]:
    """Every process's value, in every process. It must be JSON."""
    if jax.process_count() == 1:
        return [value]
    return _exchange.gather("a value of all processes", value)


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        _exchange.gather(name, None)


def fetch_whole(array: jax.Array) -> np.ndarray:
    """All of an array, on the host. Every process that has a part must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))


class _Exchange:
    """Gathers JSON values in the key-value store of JAX's coordination service."""

    def __init__(self):
        #: How long one gathering may take; `None` if the user has called JAX's own
        #: `initialize`.
        self.wait_seconds: int | None = None
        self._numbers = itertools.count()

    def gather(self, what: str, value: Any) -> list[Any]:
        """The JSON value of each process, in each process.

        **Arguments:**

        - `what`: a name for the exchange, for errors; the same in all processes.
        - `value`: this process's own.

        **Raises:**

        `ValueError` if the processes wait for different things; JAX's error if one does
        not come in time.
        """
        wait = self.wait_seconds or _seconds("wait_seconds", None, _WAIT_SECONDS)
        service, number = coordination_client(), next(self._numbers)
        me = jax.process_index()
        folder = f"eqxshard/gather/{number}/"
        service.key_value_set(f"{folder}{me}", json.dumps([what, value]))
        try:
            service.wait_at_barrier("eqxshard", 1000 * wait)
        except jax.errors.JaxRuntimeError as error:
            error.add_note(
                f"Process {me} waited for {what}, for up to wait_seconds={wait}. See what "
                "the missing processes were doing; start the run again, to resume from its "
                "newest checkpoint, or give a larger wait_seconds or "
                "$EQXSHARD_WAIT_SECONDS."
            )
            raise
        entries = service.key_value_dir_get(folder)
        found = {int(k.removeprefix(folder)): json.loads(text) for k, text in entries}
        # All have passed the barrier, so all have read the values of the gathering before.
        if number:
            service.key_value_delete(f"eqxshard/gather/{number - 1}/{me}")
        everyone = [found[process] for process in sorted(found)]
        if differ := _differences(f"for {place}" for place, _ in everyone):
            raise UsageError(
                f"the processes of this run wait for different things: {differ}. Start all "
                "of them alike."
            )
        return [theirs for _, theirs in everyone]


_exchange = _Exchange()


def _differences(said: Iterable[str]) -> str | None:
    """Which processes say what, from the text of each; `None` if all say the same."""
    processes: dict[str, list[str]] = {}
    for process, text in enumerate(said):
        processes.setdefault(text, []).append(str(process))
    if len(processes) == 1:
        return None
    return "; ".join(
        f"{text} in process {', '.join(numbers)}" for text, numbers in processes.items()
    )


def _integer(name: str, value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name}={value!r} is not a number; give one.") from None


def _seconds(name: str, given: int | None, default: int) -> int:
    value = os.environ.get(f"EQXSHARD_{name.upper()}", default) if given is None else given
    return _integer(name, value)


def _exit_on_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    sys.__excepthook__(kind, error, trace)
    exit_process(1)


def _in_cluster() -> bool:
    """True if a scheduler started this process as one of several."""
    sizes = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    return any(os.environ.get(name, "1") != "1" for name in sizes)


def _versions() -> dict[str, str]:
    main = getattr(sys.modules["__main__"], "__file__", None)
    files = {
        "eqxshard's code": sorted(Path(__file__).parent.rglob("*.py")),
        "script's code": [Path(main)] if main else [],
    }
    digests = {
        what: hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
        for what, paths in files.items()
    }
    return {"python": platform.python_version(), "jax": jax.__version__, **digests}
