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
from pathlib import Path
from typing import Any

from ._parser import Parser, allow_closed_stdout
from .distributed import ADDRESS, PROCESS, PROCESSES

#: How long the others may take to stop once one has died, before they are killed.
_GRACE_SECONDS = 3.0
#: A shell script that reads process ids, and stops them at the end of its input, which
#: comes when the launcher is killed. It needs no Python, so it starts at once.
_GUARD = """
pids=
while read -r pid; do pids="$pids $pid"; done
kill $pids
sleep "$1"
kill -9 $pids
"""
#: The number of last lines of a process to show.
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
    - `restarts`: how often to start all again after one has died. The script must resume
        from its newest checkpoint by itself, such as with `--resume auto`. Exit status 2,
        a mistake in the command, is final.

    **Returns:**

    The exit status: 0, or that of the process that died first, 128 + N for signal N.
    """
    while True:
        status, stopped = _run(command, processes, devices_per_process)
        if status in (0, 2) or stopped or restarts == 0:
            return status
        restarts -= 1
        _print(f"starting again with {processes} processes; {restarts} restarts are left.")


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
            # Apart from the terminal, whose Ctrl-C we pass on ourselves.
            start_new_session=True,
        )
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), daemon=True
        )
        self._reader.start()

    def drain(self) -> None:
        """Wait until all its output is printed; a child may keep it open for longer."""
        self._reader.join(timeout=1.0)

    def send(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

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


class _Guard:
    """Stops the processes if this one is killed and cannot do so itself."""

    def __init__(self):
        self._process = subprocess.Popen(
            ["sh", "-c", _GUARD, "eqxshard.launch", str(_GRACE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            # It must outlive this process, whatever is sent to its group.
            start_new_session=True,
        )

    def add(self, worker: _Worker) -> None:
        """Stop this one, too."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{worker.process.pid}\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End without stopping any, once all have ended."""
        self._process.kill()
        self._process.communicate()


class _Signals:
    """Counts the signals that ask to stop; what is ignored stays ignored."""

    def __init__(self):
        self.seen = 0
        # A terminal sends SIGHUP when it is closed; under nohup, or in the background of a
        # shell, some are ignored.
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handled = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in handled}

    def _note(self, number: int, frame: object) -> None:
        self.seen += 1

    def restore(self) -> None:
        """Put the earlier handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _run(command: list[str], processes: int, devices: int | None) -> tuple[int, bool]:
    """Run all processes once; return the status, and whether a signal asked to stop."""
    environments = _environments(processes, devices)
    workers: list[_Worker] = []
    signals = _Signals()
    guard = _Guard()
    try:
        for number, environment in enumerate(environments):
            workers.append(_Worker(number, [sys.executable, *command], environment))
            guard.add(workers[-1])
        first = _wait(workers, signals)
        if first is not None and not signals.seen:
            # After a mistake all print the same, and would only log that one is gone.
            mistake = first.process.returncode == 2
            if not mistake:
                # Processes that fail because of this one do so a moment later.
                time.sleep(0.2)
            _stop(workers, grace=0.0 if mistake else _GRACE_SECONDS)
            first.drain()
            _print(_describe_failure(first, processes))
    finally:
        _stop(workers, grace=_GRACE_SECONDS)
        guard.end()
        signals.restore()
    for worker in workers:
        worker.drain()
    code = 0 if first is None else first.process.returncode
    return (code if code >= 0 else 128 - code), bool(signals.seen)


def _wait(workers: list[_Worker], signals: _Signals) -> _Worker | None:
    """Wait until all have ended, or one has failed; return the first that failed.

    The first signal is passed on, as SIGTERM; the second one kills.
    """
    first: _Worker | None = None
    passed_on = 0
    running = workers
    while running:
        running = [worker for worker in workers if worker.process.poll() is None]
        if signals.seen > passed_on:
            passed_on = signals.seen
            for worker in running:
                worker.send(signal.SIGTERM if passed_on == 1 else signal.SIGKILL)
        failed = (worker for worker in workers if worker.process.returncode)
        first = first or next(failed, None)
        # After a signal, each may take its time to save.
        if first is not None and not signals.seen:
            break
        time.sleep(0.02)
    return first


def _environments(processes: int, devices: int | None) -> list[dict[str, str]]:
    """The environment of each process."""
    gpus = _gpus() if devices is None else []
    if gpus and len(gpus) < processes:
        raise ValueError(
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


def _stop(workers: list[_Worker], *, grace: float) -> None:
    if grace:
        for worker in workers:
            worker.send(signal.SIGTERM)
    until = time.monotonic() + grace
    while time.monotonic() < until and any(w.process.poll() is None for w in workers):
        time.sleep(0.05)
    for worker in workers:
        worker.send(signal.SIGKILL)
        worker.process.wait()


def _describe_failure(worker: _Worker, processes: int) -> str:
    """Which process died, how, and its last lines."""
    code = worker.process.returncode
    how = f"ended with status {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    says = f"process {worker.number} of {processes} {how}; the others were stopped."
    return "\n  ".join([f"{says} Its last lines:", *worker.last_lines])


def _print(text: str) -> None:
    print(f"eqxshard.launch: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    # Below those that systems give to connections: until process 0 listens, seconds later,
    # another program could get one of them.
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
    """The command."""
    parser = Parser(
        prog="python -m eqxshard.launch",
        description="Run a script in several processes on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, required=True, help="the number of processes"
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        help="simulated CPU devices of each (default: a GPU each, if there are GPUs)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="how often to start all again after one has died (the script must resume)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the script (or -m module), its arguments"
    )
    args = parser.parse_args()
    least = {"processes": 1, "devices_per_process": 1, "restarts": 0}
    for name, number in least.items():
        value = getattr(args, name)
        if value is not None and value < number:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {value} is too few; use {number} or more.")
    if not args.command:
        parser.error("there is no script; give one, such as recipes/fashion_mnist.py.")
    script = args.command[0]
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


if __name__ == "__main__":
    with allow_closed_stdout():
        sys.exit(main())
