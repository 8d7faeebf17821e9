"""`python -m eqxshard.launch --processes 4 script.py ...`: a cluster on one machine.

Starts the script in several processes, which [`eqxshard.initialize`][] joins, each with
its own GPU or simulated CPU devices; merges their output; stops all when one dies.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ._errors import UsageError
from ._parser import Parser, allow_closed_stdout
from .distributed import ADDRESS, PROCESS, PROCESSES

#: How long the others may take to stop once one has died, before they are killed.
_GRACE_SECONDS = 3.0
#: How many of the last lines of a failed process to show.
_LAST_LINES = 15


def launch(
    command: list[str],
    *,
    processes: int,
    devices_per_process: int | None = None,
    restarts: int = 0,
) -> int:
    """Run a command in several processes until all have ended.

    **Arguments:**

    - `command`: the script and its arguments, or `-m`, a module, and its arguments.
    - `processes`: the number of processes.
    - `devices_per_process`: the number of simulated CPU devices of each. By default, each
        has one of the machine's GPUs, or if there are none, JAX's default devices.
    - `restarts`: how often to start all processes again after one has died. The script
        must resume from its newest checkpoint by itself, for example with `--resume auto`.
        Exit status 2, a mistake in the command, is final.

    **Returns:**

    The exit status: 0, or that of the process that died first, 128 + N for signal N.

    **Raises:**

    `ValueError` if there are fewer GPUs than processes.
    """
    with _signals_to_stop() as signals:
        while True:
            status = _run(command, processes, devices_per_process, signals)
            if status in (0, 2) or restarts == 0 or signals:
                return status
            restarts -= 1
            _print(f"starting again with {processes} processes; {restarts} restarts left.")


class _Worker:
    """One process, and its last lines of output."""

    def __init__(self, number: int, command: list[str], environment: dict[str, str]):
        self.number = number
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A session of its own, so that a Ctrl-C reaches it through us only, and that it
            # can be killed together with all that it starts.
            start_new_session=True,
        )
        self._status: int | None = None
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), daemon=True
        )
        self._reader.start()

    def drain(self) -> None:
        """Wait until its output is printed, at most 1 s: a child may keep the pipe open."""
        self._reader.join(timeout=1.0)

    def poll(self) -> int | None:
        """Its exit status, or `None` while it runs. If it failed, kill its children."""
        if self._status is None:
            self._status = self.process.poll()
            if self._status:
                self._kill_group()
        return self._status

    def send(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it and its children, if it still runs."""
        if self.poll() is None:
            self._kill_group()
            self.process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self, output: Any) -> None:
        with output:
            for line in output:
                if line.startswith("[Gloo] Rank "):
                    continue  # JAX logs one for every group of devices.
                # A stack trace in C++ would push the message before it out.
                if not line.startswith("    @ "):
                    self.last_lines.append(line.rstrip("\n"))
                # One write per line, so that lines of processes do not mix.
                # If nobody reads them any more, the run goes on.
                with contextlib.suppress(BrokenPipeError):
                    sys.stdout.write(f"[{self.number}] {line.rstrip()}\n")
                    sys.stdout.flush()


@contextlib.contextmanager
def _signals_to_stop() -> Iterator[list[int]]:
    """Collect the signals that ask to stop, such as SIGHUP of a terminal that is closed."""
    seen: list[int] = []
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup, or in the background of a shell, some are ignored, and must stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    command: list[str], processes: int, devices: int | None, signals: list[int]
) -> int:
    """Run all processes once; return the status."""
    environments = _environments(processes, devices)
    workers: list[_Worker] = []
    try:
        for number, environment in enumerate(environments):
            workers.append(_Worker(number, [sys.executable, *command], environment))
        first = _wait(workers, signals)
        if first is not None and not signals:
            # Processes that fail because of this one do so a moment later.
            time.sleep(0.2)
            _stop(workers)
            first.drain()
            _print(_describe_failure(first, processes))
    finally:
        _stop(workers)
    for worker in workers:
        worker.drain()
    code = 0 if first is None else first.process.returncode
    return code if code >= 0 else 128 - code


def _wait(workers: list[_Worker], signals: list[int]) -> _Worker | None:
    """Wait until all have ended, or one has failed; return the first that failed.

    The first signal is passed on, as SIGTERM; the second one kills.
    """
    first, passed_on = None, 0
    while True:
        codes = [worker.poll() for worker in workers]
        first = first or next((w for w, code in zip(workers, codes) if code), None)
        # After a signal, each may take its time to save.
        if None not in codes or (first is not None and not signals):
            return first
        for _ in signals[passed_on:]:
            for worker in workers:
                worker.kill() if passed_on else worker.send(signal.SIGTERM)
            passed_on += 1
        time.sleep(0.02)


def _environments(processes: int, devices: int | None) -> list[dict[str, str]]:
    """The environment of each process."""
    gpus = _gpus() if devices is None else []
    if gpus and len(gpus) < processes:
        raise UsageError(
            f"{processes} processes are more than the {len(gpus)} GPUs; use fewer, or "
            "--devices-per-process with JAX_PLATFORMS=cpu."
        )
    shared = os.environ | {
        ADDRESS: f"127.0.0.1:{_free_port()}",
        PROCESSES: str(processes),
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        shared["JAX_NUM_CPU_DEVICES"] = str(devices)
    own = [{PROCESS: str(number)} for number in range(processes)]
    for settings, gpu in zip(own, gpus):
        settings["CUDA_VISIBLE_DEVICES"] = gpu
    return [shared | settings for settings in own]


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.send(signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until and any(w.poll() is None for w in workers):
        time.sleep(0.05)
    for worker in workers:
        worker.kill()


def _describe_failure(worker: _Worker, processes: int) -> str:
    """A text that says which process died and how, with its last lines."""
    code = worker.process.returncode
    how = f"ended with status {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    says = f"process {worker.number} of {processes} {how}; the others were stopped."
    return "\n  ".join([f"{says} Its last lines:", *worker.last_lines])


def _print(text: str) -> None:
    print(f"eqxshard.launch: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    # Below the ephemeral ports: the system could give one of those to another program in
    # the seconds before process 0 listens.
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port was found; end some of the programs that listen.")


def _gpus() -> list[str]:
    """The machine's NVIDIA GPUs, as CUDA_VISIBLE_DEVICES names them."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cuda" not in platforms and "gpu" not in platforms:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [path.name[6:] for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = Parser(
        prog="python -m eqxshard.launch",
        description="Run a script in several processes on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=partial(_count, 1), required=True, help="how many processes"
    )
    parser.add_argument(
        "--devices-per-process",
        type=partial(_count, 1),
        help="simulated CPU devices of each (default: a GPU each, if there are GPUs)",
    )
    parser.add_argument(
        "--restarts",
        type=partial(_count, 0),
        default=0,
        help="how often to start all processes again after one has died (the script must "
        "resume by itself)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the script (or -m module), its arguments"
    )
    args = parser.parse_args()
    script, *_ = args.command or [""]
    if script != "-m" and not Path(script).is_file():
        parser.error(f"there is no script {script!r}; give the path of one.")
    try:
        return launch(
            args.command,
            processes=args.processes,
            devices_per_process=args.devices_per_process,
            restarts=args.restarts,
        )
    except ValueError as error:
        parser.error(str(error))


def _count(least: int, text: str) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is too few; use {least} or more.")
    return int(text)


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
