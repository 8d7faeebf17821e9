"""Several processes that run one script: joining, and checking that they agree.

Knows processes and JSON; used by every room, uses none.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from ._errors import UsageError
from ._waits import differences, gather, waiting, watch

#: Processes that fail together need a moment each to print why.
_LAST_WORDS_SECONDS = 2.0

#: How long a process waits for others in silence.
_SILENT_SECONDS = 15.0

#: Begins what process 0 says to processes that join.
_HELLO = b"eqxshard: "

#: The environment variables of the launcher and of job files, read by `initialize`.
ADDRESS, PROCESSES, PROCESS = "EQXSHARD_ADDRESS", "EQXSHARD_PROCESSES", "EQXSHARD_PROCESS"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    start_seconds: int | None = None,
    heartbeat_seconds: int | None = None,
    wait_seconds: int | None = None,
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
    - `start_seconds`: how long to wait for the others: 300, or
        `$EQXSHARD_START_SECONDS`.
    - `heartbeat_seconds`: how long a process may be silent before all are ended: 30, or
        `$EQXSHARD_HEARTBEAT_SECONDS`.
    - `wait_seconds`: how long a process may wait for another that is alive, before all say
        who is missing, where it is, and end with status 1: 600, or
        `$EQXSHARD_WAIT_SECONDS`.

    **Raises:**

    `ValueError` if only some of the three are known, if there is no such process, if the
    port of process 0 is taken, or if the processes differ. `TimeoutError` if process 0
    cannot be reached in time; under SLURM, if its name does not resolve, after 15 seconds.
    What a process waits for is printed to stderr after 15 seconds. If others do not join in
    time, every process that did says which, and ends with status 1.

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
    patience = _seconds("start_seconds", start_seconds, 300)
    if missing:
        address, number = _slurm_place()
    else:
        address = given["coordinator_address"]
        number = _integer("process_id", given["process_id"])
        if count is not None and not 0 <= number < count:
            raise UsageError(
                f"process_id={number} is none of {count} processes; number them from 0 to "
                f"{count - 1}."
            )
    if address is not None and number is not None:
        size = count or int(os.environ["SLURM_STEP_NUM_TASKS"])
        _meet(address, number, size, patience, under_slurm=bool(missing))
    with _joining(number, patience):
        jax.distributed.initialize(
            address,
            count,
            number,
            # JAX would ask the cluster for more than is missing, such as SLURM's GPUs.
            cluster_detection_method=None if missing else "deactivate",
            # At its own end JAX ends the process from C++, without a word to the user.
            initialization_timeout=2 * patience,
            heartbeat_timeout_seconds=_seconds("heartbeat_seconds", heartbeat_seconds, 30),
        )
    _watch(wait_seconds)
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
    """Whether this is process 0, which writes what is written once."""
    return jax.process_index() == 0


def spans_processes(devices: Iterable[Any]) -> bool:
    """Whether devices, such as a mesh's, belong to several processes."""
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
    everyone = _gather(f"the {what} of all processes", facts)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    for name in names:
        if differ := differences(json.dumps(theirs.get(name)) for theirs in everyone):
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
    return _gather(None, value)


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        _gather(name, None)


def fetch_whole(array: jax.Array) -> np.ndarray:
    """All of an array, on the host. Every process that has a part must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    from jax.experimental.multihost_utils import process_allgather

    with waiting("the parts of an array in other processes", for_others=True):
        return np.asarray(process_allgather(array, tiled=True))


def _watch(wait_seconds: int | None = None) -> None:
    """Watch the waits of this process, if nobody does yet."""

    def end(text: str) -> None:
        _print(text)
        # What fails now does so because others end, too.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        abort_process(1)

    watch(_seconds("wait_seconds", wait_seconds, 600), end)


def _gather(what: str | None, value: Any) -> list[Any]:
    # If the user has called JAX's own `initialize`, nobody watches yet.
    _watch()
    return gather(what, value)


def _integer(name: str, value: int | str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{name}={value!r} is not a number; give one.") from None


def _seconds(name: str, given: int | None, default: int) -> int:
    value = os.environ.get(f"EQXSHARD_{name.upper()}", default) if given is None else given
    return _integer(name, value)


def _print(text: str) -> None:
    print(f"eqxshard: {text}", file=sys.stderr, flush=True)


def _exit_on_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    sys.__excepthook__(kind, error, trace)
    exit_process(1)


@contextlib.contextmanager
def _joining(number: int | None, patience: int) -> Iterator[None]:
    """While the processes join, say after a while that one waits; end it in time."""
    who = "this process" if number is None else f"process {number}"
    advice = "if none of them prints why, see whether all of them have started."

    def give_up() -> None:
        _print(f"{who} has waited {patience} s for others to join, and ends; {advice}")
        os._exit(1)

    waits = f"{who} still waits for others to join; {advice}"
    # Process 0 goes last: JAX ends the others with a stack of C++ once it is gone.
    later = _LAST_WORDS_SECONDS if number == 0 else 0
    timers = [threading.Timer(patience + later, give_up)]
    if number in (0, None):
        timers.append(threading.Timer(_SILENT_SECONDS, _print, [waits]))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _meet(
    address: str, number: int, count: int, seconds: int, *, under_slurm: bool
) -> None:
    """Return once all processes have come, because JAX would not say whom it waits for.

    Until JAX listens there, process 0 does, and tells the others whether all are there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"coordinator_address={address!r} is not HOST:PORT; write one such as "
            "node-1:29400."
        )
    if number == 0:
        _receive(address, int(port), count, seconds)
    else:
        _report((host.strip("[]"), int(port)), number, seconds, under_slurm)


def _receive(address: str, port: int, count: int, seconds: int) -> None:
    """Wait at a port until all others have come, and know it; end if they do not."""
    came, told, began, said = {0}, {0}, time.monotonic(), False
    with _listen(address, port) as server:
        server.settimeout(0.2)
        while len(told) < count:
            missing = sorted({*range(count)} - (came if len(came) < count else told))
            who = f"process {', '.join(map(str, missing))} of {count}"
            waited = time.monotonic() - began
            reply = b"go" if len(came) == count else b"wait"
            late = f"{who} did not join within {seconds} s; see why it did not start."
            if waited > seconds:
                reply = late.encode()
            if waited > seconds + _LAST_WORDS_SECONDS:
                _print(late)
                os._exit(1)
            if waited > _SILENT_SECONDS and not said:
                _print(f"process 0 still waits for {who} to join, for {seconds} s in all.")
                said = True
            # Others, such as a program that scans ports, may say anything.
            with contextlib.suppress(OSError, ValueError), server.accept()[0] as connection:
                connection.settimeout(1)
                process = int(connection.recv(16))
                came |= {process} & {*range(count)}
                connection.sendall(_HELLO + reply)
                if reply == b"go":
                    told.add(process)


def _listen(address: str, port: int) -> socket.socket:
    """A socket at the port; raise `ValueError` if another program listens there."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UsageError(
            f"process 0 cannot listen at {address}, because another program does; give "
            "coordinator_address another port, in every process."
        ) from None


def _report(place: tuple[str, int], number: int, seconds: int, under_slurm: bool) -> None:
    """Tell process 0 that this one has come, until it says that all have."""
    address = f"{place[0]}:{place[1]}"
    began, said = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
            with socket.create_connection(place, timeout=5) as connection:
                connection.sendall(b"%d" % number)
                reply = connection.recv(1000)
        except OSError as error:
            # Elsewhere a name may appear with its host, such as that of a pod.
            is_final = under_slurm and isinstance(error, socket.gaierror)
            says = (
                f"process {number} cannot reach process 0 at {address}: {error}; see "
                "whether process 0 runs, whether all hosts know the name of its host, as "
                "by /etc/hosts, and whether a firewall is between them."
            )
        else:
            # Or it is JAX's answer, which listens there once all have come.
            if reply == _HELLO + b"go" or not reply.startswith(_HELLO):
                return
            if reply != _HELLO + b"wait":
                _print(reply.removeprefix(_HELLO).decode())
                os._exit(1)
            # Process 0 counts the time from here.
            began, said = time.monotonic(), True
            time.sleep(0.5)
            continue
        waited = time.monotonic() - began
        if waited > (_SILENT_SECONDS if is_final else seconds):
            raise TimeoutError(says)
        if waited > _SILENT_SECONDS and not said:
            _print(f"{says} It goes on trying, for {seconds} s in all.")
            said = True
        time.sleep(0.1)


def _slurm_place() -> tuple[str | None, int | None]:
    """The address of process 0 under SLURM, and this process's number; as JAX has them."""
    taken = ("OMPI_MCA_orte_hnp_uri", "JAX_COORDINATOR_ADDRESS")
    if "SLURM_STEP_NODELIST" not in os.environ or any(name in os.environ for name in taken):
        return None, None
    # Such as rack1-[03,07-09],login.
    nodes = re.sub(r"\[(\w+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
    port = 2**16 - 2**12 + int(os.environ["SLURM_JOB_ID"]) % 2**12
    port = os.environ.get("JAX_COORDINATOR_PORT", port)
    return f"{nodes.split(',')[0]}:{port}", int(os.environ["SLURM_PROCID"])


def _in_cluster() -> bool:
    """Whether a scheduler started this process as one of several."""
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
