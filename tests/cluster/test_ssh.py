"""`ssh.sh` with a real sshd: two hosts, which are two ports of this machine."""

import contextlib
import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_helpers import ROOT, SETTINGS, TRAINING, assert_same, reports, wait_for
from process_helpers import finished, started

from eqxshard.launch import _free_port

pytestmark = pytest.mark.cluster

SSH_SH = ROOT / "recipes" / "cluster" / "ssh.sh"
HOSTS = ("localhost", "127.0.0.1")
#: Not the user's own: keys, known hosts and host keys of these tests only.
SERVER = """
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
SetEnv {settings}
"""
CLIENT = """
Host *
    User {user}
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
Host localhost
    Port {ports[0]}
Host 127.0.0.1
    Port {ports[1]}
"""


def servers(folder):
    """Write all keys and settings; the commands of two servers, and their ports."""
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(make, check=True)
    ports = [_free_port(), _free_port()]
    key = (folder / "host.pub").read_text()
    known = [f"localhost {key}", f"[localhost]:{ports[0]} {key}"]
    known.append(f"[127.0.0.1]:{ports[1]} {key}")
    (folder / "known_hosts").write_text("".join(known))
    here = {k: os.environ[k] for k in ("XLA_FLAGS", "PYTHONPATH") if k in os.environ}
    settings = " ".join(f'"{name}={value}"' for name, value in (SETTINGS | here).items())
    (folder / "sshd_config").write_text(SERVER.format(folder=folder, settings=settings))
    text = CLIENT.format(folder=folder, ports=ports, user=getpass.getuser())
    (folder / "ssh_config").write_text(text)
    # The real ssh, with these settings instead of the user's.
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n'
    )
    wrapper.chmod(0o755)
    # It starts itself again for each connection, so it wants its full path.
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    command = [sshd, "-D", "-e", "-f", folder / "sshd_config", "-p"]
    return [[*command, port] for port in ports]


@pytest.fixture
def sshd(tmp_path):
    """Two hosts that run; returns their servers."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if shutil.which("sshd", path=path) is None or shutil.which("ssh") is None:
        pytest.skip("no ssh or sshd: apt-get install openssh-server openssh-client")
    if os.geteuid() == 0:
        # sshd's own, which a service would make.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path / "ssh"
    folder.mkdir()
    commands = servers(folder)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(folder / "log", "w"))
        running = []
        for command in commands:
            server = started(command, stdout=file, stderr=file)
            running.append(stack.enter_context(server))
            stack.callback(kill_tree, running[-1].pid)

        def listen():
            assert all(server.poll() is None for server in running), log(folder)
            return log(folder).count("Server listening") == len(running)

        wait_for("sshd", listen, seconds=60)
        yield running


def log(folder):
    return (folder / "log").read_text()


def kill_tree(process):
    """End a process and everything that it has started at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
    children = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True)
    for child in children.stdout.split():
        kill_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def command(tmp_path, hosts, *options):
    """The words that train over hosts, and how to start them."""
    (tmp_path / "hosts.txt").write_text("".join(f"{host}\n" for host in hosts))
    run = [
        sys.executable,
        "recipes/fashion_mnist.py",
        *TRAINING,
        f"--output={tmp_path / 'run'}",
    ]
    words = [SSH_SH, "--port", _free_port(), tmp_path / "hosts.txt", *run, *options]
    path = f"{tmp_path / 'ssh' / 'bin'}:{os.environ['PATH']}"
    return words, {"cwd": ROOT, "env": os.environ | {"PATH": path}}


def test_two_hosts_train_as_one_process_does(sshd, tmp_path, one_process):
    words, how = command(tmp_path, HOSTS)
    status, out, err = finished(words, **how)
    assert status == 0, (out, err, log(tmp_path / "ssh"))
    assert re.search(r"\[0\] .* on 2 x cpu \(data=2\)\n", out)
    assert_same(reports(tmp_path / "run"), one_process)


def test_when_a_host_is_lost_the_other_ends(sshd, tmp_path):
    words, how = command(tmp_path, HOSTS, "--steps=1000000")
    with started(words, **how) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for("training", lambda: metrics.exists() and metrics.read_text())
        began = time.monotonic()
        kill_tree(sshd[1].pid)
        out, err = process.communicate(timeout=120)
    assert time.monotonic() - began < 90
    assert process.returncode == 255, (out, err)
    assert "process 1 on 127.0.0.1 ended with status 255; the others will stop." in err


def test_a_host_that_is_not_there_is_named_soon(sshd, tmp_path):
    words, how = command(tmp_path, [HOSTS[0], "nowhere.invalid"])
    began = time.monotonic()
    status, out, err = finished(words, **how)
    assert time.monotonic() - began < 90
    assert status == 255
    assert "[1] ssh: Could not resolve hostname nowhere.invalid: " in out
    assert "process 1 on nowhere.invalid ended with status 255; the others" in err
