"""Trains with a random fault every 20 to 60 seconds, and compares the end with no fault.

`python tests/soak.py --minutes 30` starts two processes of two devices by the launcher. It
kills a process or the launcher, sends SIGTERM, freezes a process, fills the disk or cuts a
process off the network, starts again what has ended, and fails unless the arrays at the end
are those of an undisturbed run, bit for bit. Full disks need root, and networks iproute2 as
well. What happened when is printed and is in `soak.log`.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
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
FAULT_SECONDS = 10.0
DISK_BYTES = 64 * 2**20
HOSTS = ("eqx-soak-0", "eqx-soak-1")
#: In the environment of processes that are to enter a host of their own.
IN_HOSTS = "EQXSHARD_SOAK_HOSTS"


class Soak:
    """A run that is disturbed, and the log of that.

    **Arguments:**

    - `folder`: of the run.
    - `log`: the file of the log.
    - `steps`: of the run.
    - `rng`: chooses faults, and when.
    - `in_hosts`: whether each process has a network of its own.
    """

    def __init__(
        self, folder: Path, log: Path, steps: int, rng: random.Random, in_hosts: bool
    ):
        self._folder = folder
        self._log = log
        self._steps = steps
        self._rng = rng
        self._in_hosts = in_hosts
        self._began = time.monotonic()
        self._launcher = self._start()
        self._workers: list[int] = []
        self.counts: Counter[str] = Counter()

    def run(self, faults: list[str]) -> None:
        """Disturb the run until it is done."""
        while True:
            pause = self._rng.uniform(20, 60)
            fault, which = self._rng.choice(faults), self._rng.randrange(2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(pause)
            status = self._launcher.poll()
            if status == 0:
                self.say("done")
                return
            if status is None:
                self.counts[fault] += 1
                getattr(self, fault)(which)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._launcher.wait(2)
                status = self._launcher.poll()
            if status:
                self.say(f"the launcher ended with status {status}; starting again")
                self._end_workers()
                self._launcher = self._start()

    def say(self, what: str) -> None:
        """Log something."""
        step = _last_step(self._folder)
        line = f"{time.monotonic() - self._began:7.1f} s, step {step:5}: {what}"
        print(line, flush=True)
        with self._log.open("a") as log:
            log.write(line + "\n")

    def close(self) -> None:
        """Leave nothing running."""
        self._launcher.kill()
        self._end_workers()

    def kill_worker(self, which: int) -> None:
        """A process is killed."""
        self._send(which, signal.SIGKILL, f"SIGKILL to process {which}")

    def kill_launcher(self, which: int) -> None:
        """The launcher is killed, and cannot stop its processes."""
        self._remember_workers()
        self.say("SIGKILL to the launcher")
        self._launcher.kill()
        self._launcher.wait()

    def terminate(self, which: int) -> None:
        """A notice to a process, as from a scheduler."""
        self._send(which, signal.SIGTERM, f"SIGTERM to process {which}")

    def freeze(self, which: int) -> None:
        """A process does nothing for a while."""
        self._send(which, signal.SIGSTOP, f"SIGSTOP to process {which} for 10 s")
        time.sleep(FAULT_SECONDS)
        self._send(which, signal.SIGCONT, "")

    def fill_disk(self, which: int) -> None:
        """There is no space left for a while."""
        self.say("the disk is full for 10 s")
        filler = self._folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(FAULT_SECONDS)
        filler.unlink(missing_ok=True)

    def cut_network(self, which: int) -> None:
        """A process cannot be reached for a while."""
        self.say(f"process {which} has no network for 10 s")
        _ip("-n", HOSTS[which], "link", "set", "eth0", "down")
        time.sleep(FAULT_SECONDS)
        _ip("-n", HOSTS[which], "link", "set", "eth0", "up")

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "eqxshard.launch", "--processes=2"]
        command += ["--devices-per-process=2", "--restarts=1000", __file__]
        command += _options(self._folder, self._steps, STEP_SECONDS)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment |= {IN_HOSTS: "1"} if self._in_hosts else {}
        with self._log.with_name("output.log").open("a") as out:
            return subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, text=True
            )

    def _remember_workers(self) -> None:
        # There are none for a moment when they start again.
        with contextlib.suppress(subprocess.CalledProcessError, OSError, ValueError):
            self._workers = workers_of(self._launcher)

    def _send(self, which: int, number: int, what: str) -> None:
        self._remember_workers()
        if what:
            self.say(what if len(self._workers) == 2 else f"{what}, which is not there")
        if len(self._workers) == 2:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[which], number)

    def _end_workers(self) -> None:
        """Wait until the processes have ended, and end those that do not."""
        deadline = time.monotonic() + 20
        while left := [pid for pid in self._workers if Path(f"/proc/{pid}").exists()]:
            if time.monotonic() > deadline:
                self.say(f"{len(left)} processes were left behind; they are killed")
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                deadline += 20
            time.sleep(0.1)


def _options(folder: Path, steps: int, seconds: float) -> list[str]:
    run = [str(folder), "--mesh=data=2,fsdp=2", "--rule=fsdp", f"--steps={steps}"]
    run += ["--every=25", f"--seconds-per-step={seconds}", "--heartbeat-seconds=15"]
    return run


def enter_host() -> None:
    """Become a process of the run, in a network of its own if asked to."""
    command = [sys.executable, str(SCRIPT), *sys.argv[1:]]
    if IN_HOSTS in os.environ:
        number, address = (os.environ[f"EQXSHARD_{x}"] for x in ("PROCESS", "ADDRESS"))
        os.environ["EQXSHARD_ADDRESS"] = f"10.78.0.1:{address.rpartition(':')[2]}"
        command = ["ip", "netns", "exec", HOSTS[int(number)], *command]
    os.execvp(command[0], command)


def _last_step(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _end_of(folder: Path) -> dict[str, np.ndarray]:
    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    where = {"mesh": mesh, "rule": eqxshard.replicate(), "key": jax.random.key(0)}
    optim = lenient(optax.adam(1e-2))
    like = eqxshard.abstract_state(make_model, optim, **where)
    return arrays(eqxshard.Checkpointer(folder / "checkpoints").restore(like))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def hosts() -> Iterator[bool]:
    """Two network namespaces with a link, if there may be any."""
    if os.getuid() or not shutil.which("ip"):
        yield False
        return
    for name in HOSTS:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    try:
        for name in HOSTS:
            _ip("netns", "add", name)
        ends = [("name", "eth0", "netns", name) for name in HOSTS]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, name in enumerate(HOSTS):
            own = f"10.78.0.{number + 1}"
            _ip("-n", name, "addr", "add", f"{own}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # Gloo listens where the host's own name leads to.
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            names = f"127.0.0.1 localhost\n{own} {socket.gethostname()}\n"
            (folder / "hosts").write_text(names)
        yield True
    except subprocess.CalledProcessError as error:
        print(f"no networks: {error.stderr.decode().strip()}")
        yield False
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk there, if that is allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = not subprocess.run(mount, check=False, capture_output=True).returncode
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> None:
    """Disturb a run, and compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("soak.log"))
    args = parser.parse_args()
    args.log = args.log.absolute()
    # So that nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # As many as take most of that time.
    steps = int(0.7 * 60 * args.minutes / STEP_SECONDS)
    root = Path(tempfile.mkdtemp(prefix="eqxshard-soak-"))
    launch = [sys.executable, "-m", "eqxshard.launch", "--processes=2"]
    launch += [
        "--devices-per-process=2",
        str(SCRIPT),
        *_options(root / "whole", steps, 0.0),
    ]
    (root / "whole").mkdir()
    subprocess.run(launch, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)
    faults = ["kill_worker", "kill_launcher", "terminate", "freeze"]
    with small_disk(root / "disturbed") as has_disk, hosts() as in_hosts:
        faults += ["fill_disk"] * has_disk + ["cut_network"] * in_hosts
        rng = random.Random(args.seed)
        soak = Soak(root / "disturbed", args.log, steps, rng, in_hosts)
        soak.say(f"{steps} steps, seed {args.seed}, faults: {', '.join(faults)}")
        try:
            soak.run(faults)
        finally:
            soak.close()
        ours, theirs = _end_of(root / "disturbed"), _end_of(root / "whole")
        assert ours.keys() == theirs.keys()
        for path, array in theirs.items():
            np.testing.assert_array_equal(ours[path], array, err_msg=path)
        counts = ", ".join(f"{n} {name}" for name, n in sorted(soak.counts.items()))
        soak.say(f"{len(ours)} arrays are those of the undisturbed run; {counts}")
    shutil.rmtree(root)


if __name__ == "__main__":
    if "EQXSHARD_PROCESS" in os.environ:
        enter_host()
    main()
