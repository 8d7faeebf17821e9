"""A SLURM of four nodes on this machine, for tests: its own daemons, ports and files."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cluster_helpers import wait_for
from process_helpers import started

from eqxshard.launch import _free_port

#: Two nodes.
NODES = ("eqxshard-n0", "eqxshard-n1")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
HOSTS, MARK = Path("/etc/hosts"), "# of eqxshard's tests"

CONFIGURATION = """
ClusterName=eqxshard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
MpiDefault=none
# No control groups, which containers do not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# Soon, for tests: see to jobs, and miss a node.
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SlurmdTimeout=10
ReturnToService=2
# The nodes have more cores than this machine.
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Gres=gpu:2"
)


def why_not() -> str | None:
    """The reason that SLURM cannot be started here, if there is one."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"{', '.join(missing)} of SLURM are not here: apt-get install slurm-wlm munge"
        )
    if os.geteuid() != 0:
        return "only root may start SLURM"
    if not os.access(HOSTS, os.W_OK):
        return f"{HOSTS}, where the names of the nodes must be, cannot be written"
    return None


class Slurm:
    """A running SLURM."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="eqxshard-slurm-")
        self.folder = Path(self._stack.enter_context(folder))
        # munged wants its socket to be open to all.
        self.folder.chmod(0o755)
        self.settings = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        self._nodes: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> None:
        """Start all daemons; return once all nodes are idle."""
        for name in ("munge", "state"):
            (self.folder / name).mkdir()
        self._configure()
        self._stack.callback(self._kill_all)
        self._stack.enter_context(_names(*NODES))
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", f"--socket={munge}/socket", *files)
        wait_for("munged", (munge / "socket").exists, seconds=60)
        self._daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()
        self._stack.callback(self._cancel_all)

    def stop(self) -> None:
        """Stop all daemons and jobs."""
        self._stack.close()

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._nodes[node] = self._daemon("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """End everything on a node at once, as a loss of power does."""
        self._nodes[node].kill()
        tasks = self._processes(f"SLURMD_NODENAME={node}")
        assert tasks, f"nothing runs on {node}"
        for task in tasks:
            stat = Path(f"/proc/{task}/stat").read_text()
            _kill(int(stat.rpartition(")")[2].split()[1]), of="slurmstepd")
            _kill(task)

    def wait_for_nodes(self) -> None:
        """Return once all nodes are idle."""
        idle = [*NODES]
        states = ("sinfo", "--Node", "--noheader", "--format=%N %T")

        def are_idle() -> bool:
            return self.run(*states).split()[1::2] == ["idle"] * len(idle)

        wait_for("the nodes", are_idle, seconds=120)

    def run(self, *words: object, **settings: str) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(
            [*map(str, words)],
            env=self.settings | settings,
            cwd=settings.get("PWD"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """The facts about a job, as scontrol shows them."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait_for_end(self, job: str) -> dict[str, str]:
        """The facts about a job that has ended."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(f"the end of job {job}", lambda: self.state(job)["JobState"] in ends)
        return self.state(job)

    def start_now(self, job: str) -> None:
        """Start a requeued job soon; SLURM itself waits for two minutes."""
        wait_for("the requeued job", lambda: self.state(job)["JobState"] == "PENDING")
        # Nodes refuse credentials of the second in which they ended the job, and what they
        # still say of its end would count against the new start.
        time.sleep(5)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def _configure(self) -> None:
        host = socket.gethostname()
        text = CONFIGURATION.format(host=host, port=_free_port(), folder=self.folder)
        lines = [text.strip()]
        for name in NODES:
            lines.append(NODE.format(name=name, host=host, port=_free_port()))
        lines.append(f"PartitionName=main Default=YES Nodes={','.join(NODES)}")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        nodes = f"NodeName={','.join(NODES)}"
        gpus = [f"{nodes} Name=gpu File={file}\n" for file in ("/dev/null", "/dev/zero")]
        (self.folder / "gres.conf").write_text("".join(gpus))
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)

    def _daemon(self, *words: str) -> subprocess.Popen[str]:
        with open(self.folder / "output.txt", "a") as file:
            daemon = started(words, env=self.settings, stdout=file, stderr=file)
            return self._stack.enter_context(daemon)

    def _cancel_all(self) -> None:
        self.run("scancel", "--user=root")
        wait_for("jobs to end", lambda: not self.run("squeue", "--noheader"), seconds=60)

    def _processes(self, *settings: str) -> list[int]:
        """The processes that have all of some settings, besides the path of ours."""
        wanted = {f"SLURM_CONF={self.folder}/slurm.conf", *settings}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted <= set(path.read_bytes().decode(errors="replace").split("\0")):
                    found.append(int(path.parent.name))
        return found

    def _kill_all(self) -> None:
        """Kill what the daemons have started, which outlives them."""
        for process in self._processes():
            _kill(process)


@contextlib.contextmanager
def _names(*names: str) -> Iterator[None]:
    """Names of this machine, in /etc/hosts."""

    def others() -> list[str]:
        lines = HOSTS.read_text().splitlines(keepends=True)
        return [line for line in lines if MARK not in line]

    # Not moved into place, since containers mount this file.
    HOSTS.write_text("".join([*others(), f"127.0.0.1 {' '.join(names)} {MARK}\n"]))
    try:
        yield
    finally:
        HOSTS.write_text("".join(others()))


def _kill(process: int, of: str | None = None) -> None:
    with contextlib.suppress(OSError):
        if of in (None, Path(f"/proc/{process}/comm").read_text().strip()):
            os.kill(process, signal.SIGKILL)
