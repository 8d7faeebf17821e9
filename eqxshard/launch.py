"""`python -m eqxshard.launch --processes 4 script.py ...`: a cluster on one machine.

Starts the script in several processes, which [`eqxshard.initialize`][] joins, each with
its own GPUs or simulated CPU devices; merges what they print; ends all when one dies.
"""

import argparse
import collections
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .distributed import ADDRESS, PROCESS, PROCESSES

#: How long the others may take to end once one has died, before they are killed.
_GRACE_SECONDS = 3.0
#: Of what a process printed: how many lines to show, and to look for reasons in.
_LAST_LINES, _KEPT_LINES = 15, 50


class _Worker:
    """One process, and what it printed last."""

    def __init__(self, number: int, command: list[str], environment: dict[str, str]):
        self.number = number
        self.last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.ended: float | None = None
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
        assert self.process.stdout is not None
        # The output may stay open, by a child of its own, when the process has ended.
        threading.Thread(target=self._wait, daemon=True).start()
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), daemon=True
        )
        self._reader.start()

    def _read(self, output: Any) -> None:
        with output:
            for line in output:
                if line.startswith("[Gloo] Rank "):
                    continue  # JAX's, for every group of devices, and never of interest.
                # Not of a stack in C++, which would hide what was said before it.
                if not line.startswith("    @ "):
                    self.last.append(line.rstrip("\n"))
                # One write for a line, so that lines of processes do not mix.
                sys.stdout.write(f"[{self.number}] {line.rstrip()}\n")
                sys.stdout.flush()

    def _wait(self) -> None:
        self.process.wait()
        self.ended = time.monotonic()

    def finish(self) -> None:
        """Wait until all that it printed is passed on."""
        self._reader.join(timeout=1.0)

    def send(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)


def launch(
    command: list[str],
    *,
    processes: int,
    devices_per_process: int | None = None,
    restarts: int = 0,
    elastic: bool = False,
) -> int:
    """Run a command in several processes until all have ended.

    **Arguments:**

    - `command`: the script and its arguments, or `-m`, a module, and its arguments.
    - `processes`: how many.
    - `devices_per_process`: how many simulated CPU devices each has. Without it, each has
        one of the machine's GPUs or, without any, what JAX gives it.
    - `restarts`: how often to start all again after one has died (other than with status
        2, a mistake in the command). The script must go on
        from its newest checkpoint by itself, such as by `--resume auto`.
    - `elastic`: start again with fewer processes: the next number that divides the first.

    **Returns:**

    The exit status: 0, or that of the process that died first, 128 + N for signal N.
    """
    first = processes
    while True:
        status, stopped = _run(command, processes, devices_per_process)
        # Status 2 is a mistake in the command, and would be one again.
        if status in (0, 2) or stopped or restarts == 0:
            return status
        restarts -= 1
        if elastic and processes > 1:
            smaller = range(processes - 1, 0, -1)
            processes = next(n for n in smaller if first % n == 0)
        _say(f"starting again with {processes} processes; {restarts} restarts are left.")


def _run(command: list[str], processes: int, devices: int | None) -> tuple[int, bool]:
    """Run all processes once; return the status, and whether a signal asked to stop."""
    address = f"127.0.0.1:{_free_port()}"
    gpus = _gpus() if devices is None else []
    if gpus and len(gpus) < processes:
        raise ValueError(
            f"{processes} processes are more than the {len(gpus)} GPUs; use fewer, or "
            "--devices-per-process with JAX_PLATFORMS=cpu."
        )
    workers: list[_Worker] = []
    signals = _Signals(workers)
    try:
        for number in range(processes):
            environment = os.environ | {
                ADDRESS: address,
                PROCESSES: str(processes),
                PROCESS: str(number),
                "PYTHONUNBUFFERED": "1",
            }
            if devices is not None:
                environment["JAX_NUM_CPU_DEVICES"] = str(devices)
            elif gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[number]
            workers.append(_Worker(number, [sys.executable, *command], environment))
        while not any(_failed(worker) for worker in workers):
            if all(worker.ended is not None for worker in workers):
                break
            time.sleep(0.05)
        else:
            # Those that fail because of it do so a moment later.
            dead = min((w for w in workers if _failed(w)), key=lambda w: w.ended or 0.0)
            if not signals.seen:
                time.sleep(0.2)
                _end(workers)
                dead.finish()
                _say(_obituary(dead, processes))
    finally:
        _end(workers)
        signals.restore()
    for worker in workers:
        worker.finish()
    failed = [w for w in workers if w.process.returncode]
    if not failed:
        return 0, bool(signals.seen)
    code = min(failed, key=lambda w: w.ended or 0.0).process.returncode
    return (code if code > 0 else 128 - code), bool(signals.seen)


class _Signals:
    """Passes a first signal to stop on, as SIGTERM; kills at the second."""

    def __init__(self, workers: list[_Worker]):
        self.seen = 0
        self._workers = workers
        # SIGHUP is what a terminal sends that is closed.
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._pass_on) for number in numbers}

    def _pass_on(self, number: int, frame: object) -> None:
        self.seen += 1
        for worker in self._workers:
            worker.send(signal.SIGTERM if self.seen == 1 else signal.SIGKILL)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _failed(worker: _Worker) -> bool:
    return worker.ended is not None and worker.process.returncode != 0


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.send(signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until and any(w.process.poll() is None for w in workers):
        time.sleep(0.05)
    for worker in workers:
        worker.send(signal.SIGKILL)
        worker.process.wait()


def _obituary(worker: _Worker, processes: int) -> str:
    """Which process died, how, and what it said last."""
    code = worker.process.returncode
    how = f"ended with status {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    says = f"process {worker.number} of {processes} {how}"
    text = "\n".join(worker.last)
    # JAX ends processes that miss the heartbeats of another, and says of which.
    silent = re.search(r"stopped sending heartbeats\):\s*(\d[\d, ]*)", text)
    if silent:
        says += f", because process {silent[1].strip()} gave no sign of life"
    return f"{says}; the others were ended. Its last lines:\n" + "\n".join(
        f"  {line}" for line in [*worker.last][-_LAST_LINES:]
    )


def _say(text: str) -> None:
    print(f"eqxshard.launch: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
    parser = argparse.ArgumentParser(
        prog="python -m eqxshard.launch",
        description="Run a script in several processes on this machine.",
    )
    parser.add_argument("--processes", type=int, required=True, help="how many")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        help="simulated CPU devices of each (without: a GPU each, where there are GPUs)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="how often to start all again after one has died (the script must resume)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="start again with fewer processes: the next number that divides the first",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the script (or -m module), its arguments"
    )
    args = parser.parse_args()
    for name in ("processes", "devices_per_process"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} is too few; use 1 or more.")
    if args.restarts < 0:
        parser.error(f"--restarts {args.restarts} is too few; use 0 or more.")
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
            elastic=args.elastic,
        )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
