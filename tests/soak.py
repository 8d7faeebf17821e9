"""Trains with a random fault every 20 to 60 seconds, and compares the end with no fault.

`python tests/soak.py --minutes 30` starts two processes of two devices by the launcher. It
kills a process or the launcher, sends SIGTERM or freezes a process, starts again what has
ended, and fails unless the arrays at the end are those of an undisturbed run, bit for bit.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import optax
from cluster_run import make_model
from helpers import arrays, lenient
from process_helpers import workers_of

import eqxshard

SCRIPT = Path(__file__).parent / "cluster_run.py"
#: A step sleeps as long as this, so that a run lasts.
STEP_SECONDS = 0.2
FAULTS = ("kill_worker", "kill_launcher", "terminate", "freeze")


class Soak:
    """A run that is disturbed.

    **Arguments:**

    - `folder`: of the run.
    - `steps`: of the run.
    - `rng`: chooses faults, and when.
    """

    def __init__(self, folder: Path, steps: int, rng: random.Random):
        self._folder = folder
        self._steps = steps
        self._rng = rng
        self._workers: list[int] = []
        self._launcher = self._start()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Disturb the run until it is done."""
        while True:
            pause = self._rng.uniform(20, 60)
            fault, which = self._rng.choice(FAULTS), self._rng.randrange(2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(pause)
            if self._launcher.poll() is None:
                print(f"step {_last_step(self._folder)}: {fault}", flush=True)
                self.counts[fault] += 1
                getattr(self, fault)(which)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._launcher.wait(2)
            status = self._launcher.poll()
            if status == 0:
                return
            if status:
                self._wait_for_workers()
                self._launcher = self._start()

    def close(self) -> None:
        """Leave nothing running."""
        self._launcher.kill()
        self._wait_for_workers()

    def kill_worker(self, which: int) -> None:
        """A process is killed."""
        self._send(which, signal.SIGKILL)

    def kill_launcher(self, which: int) -> None:
        """The launcher is killed, and cannot stop its processes."""
        self._remember_workers()
        self._launcher.kill()
        self._launcher.wait()

    def terminate(self, which: int) -> None:
        """A notice to a process, as from a scheduler."""
        self._send(which, signal.SIGTERM)

    def freeze(self, which: int) -> None:
        """A process does nothing for a while."""
        self._send(which, signal.SIGSTOP)
        time.sleep(10)
        self._send(which, signal.SIGCONT)

    def _start(self) -> subprocess.Popen[str]:
        command = [*LAUNCH, "--restarts=1000", str(SCRIPT)]
        command += _options(self._folder, self._steps, STEP_SECONDS)
        return subprocess.Popen(command, env=ENVIRONMENT, text=True)

    def _remember_workers(self) -> None:
        # There are none for a moment when they start again.
        with contextlib.suppress(subprocess.CalledProcessError, OSError, ValueError):
            self._workers = workers_of(self._launcher)

    def _send(self, which: int, number: int) -> None:
        self._remember_workers()
        if len(self._workers) == 2:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[which], number)

    def _wait_for_workers(self) -> None:
        """Wait until the processes have ended; fail if they do not."""
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in self._workers):
            assert time.monotonic() < deadline, f"{self._workers} were left behind"
            time.sleep(0.1)


LAUNCH = [sys.executable, "-m", "eqxshard.launch", "--processes=2"]
LAUNCH += ["--devices-per-process=2"]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


def _options(folder: Path, steps: int, seconds: float) -> list[str]:
    run = [str(folder), "--mesh=data=2,fsdp=2", "--rule=fsdp", f"--steps={steps}"]
    return [*run, "--every=25", f"--seconds-per-step={seconds}", "--heartbeat-seconds=15"]


def _last_step(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _end_of(folder: Path) -> dict[str, np.ndarray]:
    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    where = {"mesh": mesh, "rule": eqxshard.replicate(), "key": jax.random.key(0)}
    like = eqxshard.abstract_state(make_model, lenient(optax.adam(1e-2)), **where)
    return arrays(eqxshard.Checkpointer(folder / "checkpoints").restore(like))


def main() -> None:
    """Disturb a run, and compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # So that nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # As many as take most of that time.
    steps = int(0.7 * 60 * args.minutes / STEP_SECONDS)
    root = Path(tempfile.mkdtemp(prefix="eqxshard-soak-"))
    whole, disturbed = root / "whole", root / "disturbed"
    whole.mkdir()
    disturbed.mkdir()
    command = [*LAUNCH, str(SCRIPT), *_options(whole, steps, 0.0)]
    subprocess.run(command, env=ENVIRONMENT, check=True)
    soak = Soak(disturbed, steps, random.Random(args.seed))
    try:
        soak.run()
    finally:
        soak.close()
    ours, theirs = _end_of(disturbed), _end_of(whole)
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)
    counts = ", ".join(f"{n} {name}" for name, n in sorted(soak.counts.items()))
    print(f"{len(ours)} arrays are those of the undisturbed run; {counts}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
