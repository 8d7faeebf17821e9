"""A soak: a run of two processes with faults, which must end like one without faults.

`python tests/soak.py --minutes 30 --seed 0` prints each fault: when it was, what, where
the run was, and when and from which step it ran again. Faults, moments and places are
random, from the seed. At the end the parameters, the optimizer's state and the metrics
must be those of a run that nothing has disturbed, bit for bit, and every epoch must have
had each example once; else it fails, and keeps the folders.

The run is that of `cluster_run.py`: two processes of two simulated devices each, under the
launcher, which starts it again as often as its restarts allow; then we start the launcher.
"""

import argparse
import collections
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cluster_run import EXAMPLES, examples_of
from power import Disk
from process_helpers import started, workers_of
from test_distributed import SCRIPT, SETTINGS, arrays_of, lines_of

BATCH, SAVE_EVERY = 16, 5
STEPS_PER_EPOCH = -(-EXAMPLES // BATCH)
COMMAND = (
    *(sys.executable, "-m", "eqxshard.launch", "--processes=2"),
    *("--devices-per-process=2", "--restarts=2", SCRIPT),
)
OPTIONS = ("--mesh=data=1,fsdp=4", "--rule=fsdp", "--hang-seconds=30")
#: A run that does not go on by then waits for something that never comes.
PATIENCE = 420.0
#: The texts by which the processes tell where they are, and these places.
PLACES = {
    "eqxshard.launch: ": "start",
    "reading the checkpoint": "restore",
    "resuming from step": "training",
    "in the evaluation": "evaluation",
    "] evaluated": "training",
}
#: The lines of a run about a fault that are worth printing.
TELLING = re.compile(
    r"(\[\d\]|eqxshard\.launch: ).*"
    r"(is damaged|could not be written|cannot be (written|read)|no progress for|was killed"
    r"|ended with status|is saved\.)"
)


class Run:
    """The launcher, its processes, and what they have written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = folder / "log.txt"
        self.disk = Disk(folder / "checkpoints", folder / "safe")
        self.launcher: subprocess.Popen[str] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        workers = self.workers()
        self._stack.close()
        _send(workers, signal.SIGKILL)

    def start(self, *options: str) -> None:
        """Start the launcher, once its processes are gone."""
        self._stack.close()
        log = self._stack.enter_context(self.log.open("a"))
        log.write("eqxshard.launch: starting again, by hand\n")
        log.flush()
        words = (*COMMAND, self.folder, *OPTIONS, f"--disk={self.disk.safe}", *options)
        starting = started(words, env=SETTINGS, stdout=log, stderr=subprocess.STDOUT)
        self.launcher = self._stack.enter_context(starting)

    def workers(self) -> list[int]:
        """Its processes that run, in order."""
        # One may end while we look.
        with contextlib.suppress(subprocess.CalledProcessError, OSError):
            return [] if self.launcher is None else workers_of(self.launcher)
        return []

    def said(self) -> str:
        """Everything that was printed."""
        return self.log.read_text(errors="replace")

    def place(self) -> str:
        """Its place: `start`, `restore`, `training`, `saving` or `evaluation`."""
        text = self.said()
        place = PLACES[max(PLACES, key=text.rfind)]
        saves = any(_is_being_written(path) for path in self.checkpoints())
        return "saving" if saves and place == "training" else place

    def checkpoints(self) -> list[Path]:
        """The folders of checkpoints, those that are being written, too."""
        with contextlib.suppress(OSError):
            found = (self.folder / "checkpoints").iterdir()
            return [path for path in found if path.is_dir() and path.name[0].isdigit()]
        return []

    def complete(self) -> list[Path]:
        """The checkpoints that are whole, in order."""
        whole = [x for x in self.checkpoints() if (x / "checksums.txt").exists()]
        return sorted(whole, key=lambda path: int(path.name))

    def step(self) -> int:
        """The last step in the log of the metrics."""
        log = self.folder / "metrics.jsonl"
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            steps = re.findall(rb'^{"step": (\d+),', file.read(), re.MULTILINE)
            return int(steps[-1]) if steps else 0
        return 0


def _is_being_written(path: Path) -> bool:
    return not (path / "checksums.txt").exists()


def wait_for(what: str, is_so: Callable[[], bool], run: Run, seconds: float) -> None:
    """Wait until something is so; if it takes too long, fail with the end of the log."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            last = "\n".join(run.said().splitlines()[-60:])
            raise AssertionError(f"{what} took more than {seconds:.0f} s:\n{last}")
        time.sleep(0.02)


# The faults. Each is done when it returns, and returns what it did.


def kill_one(run: Run, rng: random.Random) -> str:
    return _signal_one(run, rng, signal.SIGKILL)


def kill_both(run: Run, rng: random.Random) -> str:
    return _signal_each(run, signal.SIGKILL)


def terminate_one(run: Run, rng: random.Random) -> str:
    return _signal_one(run, rng, signal.SIGTERM)


def kill_launcher(run: Run, rng: random.Random) -> str:
    return _signal_launcher(run, signal.SIGKILL)


def terminate(run: Run, rng: random.Random) -> str:
    return _signal_launcher(run, signal.SIGTERM)


def ctrl_c(run: Run, rng: random.Random) -> str:
    said = _signal_launcher(run, signal.SIGINT)
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0, 1))
        said += ", twice: " + _signal_launcher(run, signal.SIGINT)
    return said


def pause(run: Run, rng: random.Random) -> str:
    """Pause a process, now and then for longer than the run waits."""
    seconds = rng.uniform(0.2, 8) if rng.random() < 0.8 else 40
    number, workers = rng.randrange(2), run.workers()
    _send(workers[number : number + 1], signal.SIGSTOP)
    time.sleep(seconds)
    _send(workers[number : number + 1], signal.SIGCONT)
    return f"SIGSTOP of process {number} for {seconds:.1f} s"


def full_disk(run: Run, rng: random.Random) -> str:
    return _limit(run, rng, resource.RLIMIT_FSIZE, "no room for files", 8)


def failing_reads(run: Run, rng: random.Random) -> str:
    return _limit(run, rng, resource.RLIMIT_NOFILE, "no file can be opened", 3)


def damage(run: Run, rng: random.Random) -> str:
    """Damage the newest checkpoint, if there is one before it; then restart."""
    said = _signal_each(run, signal.SIGKILL)
    _wait_until_gone(run)
    complete = run.complete()
    if len(complete) < 2:
        return said
    found = sorted(complete[-1].rglob("*"))
    files = [x for x in found if x.is_file() and x.stat().st_size]
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    how = rng.choice(["a byte flipped", "cut short", "gone", "emptied"])
    if how == "gone" and file.name != "checksums.txt":
        file.unlink()
    elif how in ("gone", "emptied"):
        file.write_bytes(b"")
    else:
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        file.write_bytes(data[:at] if how == "cut short" else data)
    return f"{said}; {how}: {file.relative_to(run.folder / 'checkpoints')}"


def lose_power(run: Run, rng: random.Random) -> str:
    """All, or some, of what was not synced is lost; the newest or the one before is not."""
    said = _signal_each(run, signal.SIGKILL)
    _wait_until_gone(run)
    before = [int(path.name) for path in run.complete()]
    if not before:
        return said
    left, folder = run.folder / "left", run.disk.root
    how = rng.choice(["all", "some"])
    run.disk.lose(left, rng if how == "some" else None)
    shutil.rmtree(folder)
    left.rename(folder)
    run.disk.start_again()
    after = [int(path.name) for path in run.complete()]
    assert {*before[-2:]} & {*after}, f"{after} is left of {before}"
    return f"{said}; power lost, and {how} of what was not synced: {before}, then {after}"


FAULTS = (
    *(kill_one, kill_one, kill_both, kill_launcher, terminate, terminate_one, ctrl_c),
    *(pause, pause, full_disk, full_disk, failing_reads, damage, damage),
    *(lose_power, lose_power),
)


def _signal_one(run: Run, rng: random.Random, number: int) -> str:
    process = rng.randrange(2)
    _send(run.workers()[process : process + 1], number)
    return f"{signal.Signals(number).name} to process {process}"


def _signal_each(run: Run, number: int) -> str:
    _send(run.workers(), number)
    return f"{signal.Signals(number).name} to both"


def _send(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _signal_launcher(run: Run, number: int) -> str:
    workers = run.workers()
    assert run.launcher is not None
    run.launcher.send_signal(number)
    if number == signal.SIGKILL:
        # They outlive it.
        _send(workers, signal.SIGKILL)
        gone = time.monotonic() + 60
        while any(map(_is_alive, workers)):
            assert time.monotonic() < gone, f"{workers} do not die"
            time.sleep(0.05)
    return f"{signal.Signals(number).name} to the launcher"


def _is_alive(process: int) -> bool:
    # Nobody may wait for it, now that its parent is gone.
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    return False


def _limit(run: Run, rng: random.Random, kind: int, what: str, most: float) -> str:
    """Limit one process, or both, for a while."""
    workers = run.workers()
    which = rng.choice([[0], [1], [0, 1]])
    seconds = rng.uniform(0.3, most)
    before = {}
    for worker in (workers[number] for number in which if number < len(workers)):
        with contextlib.suppress(OSError):
            # Allow the files that it has open, or waiting for these would fail.
            opened = {int(x.name) for x in Path(f"/proc/{worker}/fd").iterdir()}
            free = min(set(range(len(opened) + 1)) - opened)
            limit = 0 if kind == resource.RLIMIT_FSIZE else free
            soft, hard = resource.prlimit(worker, kind)
            resource.prlimit(worker, kind, (limit, hard))
            before[worker] = soft, hard
    time.sleep(seconds)
    for worker, limits in before.items():
        with contextlib.suppress(OSError):
            resource.prlimit(worker, kind, limits)
    return f"{what} in {' and '.join(map(str, which))} for {seconds:.1f} s"


def _wait_until_gone(run: Run) -> None:
    """Wait until none of its processes is about to write."""
    killed = run.workers()
    wait_for("dying", lambda: not set(killed) & set(run.workers()), run, 60)


class Soak:
    """Disturbs a run until the time is over."""

    def __init__(self, run: Run, seed: int):
        self.run = run
        self.rng = random.Random(seed)
        self.began = time.monotonic()
        self.counts: collections.Counter[str] = collections.Counter()
        self.longest = 0.0
        self._left: list[Callable[[Run, random.Random], str]] = []

    def disturb(self) -> None:
        """A fault at a random moment, often one more while it starts again; then wait."""
        run, said = self.run, len(self.run.said())
        self._strike(self.rng.choice(["training", "saving", "evaluation"]))
        while run.place() == "start" and self.rng.random() < 0.4:
            self._strike(self.rng.choice(["start", "restore"]))
        ended = self._seconds()
        self.go_on()
        seconds, news = self._seconds(), run.said()[said:]
        found = re.findall(r"resuming from step (\d+)", news)
        again = f"again from step {found[-1]}" if found else "on"
        self._print(f"goes {again}, after {seconds - ended:.1f} s")
        self.longest = max(self.longest, seconds - ended)
        # Lines that differ in numbers alone are printed once.
        lines = filter(TELLING.match, news.replace(f"{run.folder}/", "").splitlines())
        for line in {re.sub(r"\d+", "", line): line for line in lines}.values():
            line = re.sub(r"(ERROR|WARNING):[\w.]+:| Its last lines:", "", line)
            print(f"              {line[:180]}", flush=True)

    def _strike(self, place: str) -> None:
        """One fault, a moment after the run is at a place, if it comes there soon."""
        run, rng = self.run, self.rng
        until = time.monotonic() + 20
        while run.place() != place and time.monotonic() < until:
            self._keep_launched()
            time.sleep(0.005)
        most = {"start": 8.0, "training": 5.0}.get(place, 0.4)
        time.sleep(rng.uniform(0, most))
        # All kinds of faults come up, in turns.
        self._left = self._left or rng.sample(FAULTS, len(FAULTS))
        fault = self._left.pop()
        at, where = self._seconds(), f"{run.place()}, step {run.step()}"
        self._print(f"{where}: {fault(run, rng)}", at)
        self.counts[fault.__name__] += 1
        # A fault that ends the launcher does so in a moment.
        time.sleep(0.5)
        self._keep_launched()

    def go_on(self) -> None:
        """Wait until the run trains."""
        lowest = self.run.step()

        def trains() -> bool:
            nonlocal lowest
            self._keep_launched()
            lowest = min(lowest, self.run.step())
            # Steps that were in flight may be reported by one that is about to die.
            return self.run.step() >= lowest + 4 and len(self.run.workers()) == 2

        wait_for("to go on", trains, self.run, PATIENCE)

    def _keep_launched(self) -> None:
        """Start the launcher if it has ended."""
        assert self.run.launcher is not None
        status = self.run.launcher.poll()
        if status is not None:
            assert status != 0, f"it has ended: {self.run.said()[-3000:]}"
            self.run.start(*_forever())

    def _print(self, what: str, at: float | None = None) -> None:
        print(f"{self._seconds() if at is None else at:8.1f} s  {what}", flush=True)

    def _seconds(self) -> float:
        return time.monotonic() - self.began


def _forever() -> tuple[str, ...]:
    return "--seconds-per-step=0.2", "--linger=0.3", "--steps=1000000"


def finish(run: Run, steps: int) -> None:
    """Have a run go on to a step, and end."""
    run.start(f"--steps={steps}")
    assert run.launcher is not None
    launcher = run.launcher
    wait_for("to end", lambda: launcher.poll() is not None, run, 1200)
    assert launcher.poll() == 0, f"status {launcher.poll()}: {run.said()[-3000:]}"


def check_same(run: Run, whole: Run, steps: int) -> None:
    """Fail unless both ended alike, bit for bit, having seen each example once an epoch."""
    lines, expected = lines_of(run.folder), lines_of(whole.folder)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line, other in zip(lines, expected, strict=True):
        assert line == other, f"{line}\nis not\n{other}"
    epochs = [lines[i : i + STEPS_PER_EPOCH] for i in range(0, steps, STEPS_PER_EPOCH)]
    sizes = [BATCH] * (STEPS_PER_EPOCH - 1) + [EXAMPLES - BATCH * (STEPS_PER_EPOCH - 1)]
    for epoch in epochs:
        seen = [i for line, size in zip(epoch, sizes) for i in examples_of(line, size)]
        count = EXAMPLES if len(epoch) == STEPS_PER_EPOCH else BATCH * len(epoch)
        assert len(seen) == len(set(seen)) == count, f"{seen} from step {epoch[0]['step']}"
    ours, theirs = (arrays_of(one.folder, steps) for one in (run, whole))
    assert ours.keys() == theirs.keys() and any("opt_state" in path for path in ours)
    for path, array in theirs.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


def soak(minutes: float, seed: int) -> None:
    """Disturb a run for some minutes, have it end, and compare."""
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {seed}; the folders are in {root}", flush=True)
    for name in ("run", "whole"):
        (root / name).mkdir()
    with Run(root / "run") as run:
        run.start(*_forever())
        disturber = Soak(run, seed)
        disturber.go_on()
        while time.monotonic() - disturber.began < 60 * minutes:
            disturber.disturb()
        # End where neither an epoch ends nor a checkpoint is due.
        steps = run.step() + 20
        steps += next(i for i in range(70) if (steps + i) % 35 == 3)
        kill_both(run, disturber.rng)
        _wait_until_gone(run)
        finish(run, steps)
        with Run(root / "whole") as whole:
            finish(whole, steps)
            check_same(run, whole, steps)
    shutil.rmtree(root)
    kinds = ", ".join(f"{name} {n}" for name, n in sorted(disturber.counts.items()))
    print(
        f"{sum(disturber.counts.values())} faults ({kinds}) in {minutes:g} min; the run "
        f"went on after at most {disturber.longest:.0f} s. After {steps} steps, its "
        "parameters, optimizer state and metrics are those of the undisturbed run, and "
        "every epoch had each example once."
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    soak(args.minutes, args.seed)


if __name__ == "__main__":
    sys.exit(main())
