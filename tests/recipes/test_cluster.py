"""The job files: what they request and run, with fake schedulers."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from process_helpers import finished, read_until, started

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "cluster"
SLURM, JOBSET, SSH = (FOLDER / name for name in ("slurm.sbatch", "jobset.yaml", "ssh.sh"))
#: Of `man sbatch`.
SBATCH_OPTIONS = {
    *("account", "cpus-per-task", "gpus-per-node", "job-name", "mem", "nodes"),
    *("ntasks-per-node", "open-mode", "output", "partition", "requeue", "signal", "time"),
}


@pytest.mark.parametrize("script", [SLURM, SSH], ids=lambda script: script.name)
def test_bash_can_read_it(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a program on the path; returns what gives the arguments of its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def make(name, body):
        prelude = f"""
            #!{sys.executable}
            import json, os, subprocess, sys
            with open({str(tmp_path / name)!r}, "a") as file:
                file.write(json.dumps(sys.argv[1:]) + "\\n")
        """
        text = textwrap.dedent(prelude).lstrip() + textwrap.dedent(body)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

        def calls():
            path = tmp_path / name
            text = path.read_text() if path.exists() else ""
            return [json.loads(line) for line in text.splitlines()]

        return calls

    return make


# SLURM


def test_the_options_of_slurm_exist_and_agree():
    lines = re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(\S+))?$", SLURM.read_text())
    assert len(lines) == SLURM.read_text().count("#SBATCH")
    asked = dict(lines)
    assert set(asked) <= SBATCH_OPTIONS and len(asked) == len(lines)
    # A task for each GPU; the recipe saves before the time is over, and resumes later.
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert re.fullmatch(r"B:USR1@\d+", asked["signal"])
    assert "requeue" in asked and asked["open-mode"] == "append"
    # All options stand before the first command, else SLURM does not read them.
    body = re.sub(r"(?m)^(#.*)?\n", "", SLURM.read_text())
    assert "#SBATCH" not in body


# Kubernetes


def test_the_jobset_is_one_run():
    jobset = yaml.safe_load(JOBSET.read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    spec = job["template"]["spec"]
    # Pods have numbers, and one that fails is not replaced by itself.
    assert spec["completionMode"] == "Indexed" and spec["backoffLimit"] == 0
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 60
    (container,) = pod["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert set(env) == {"EQXSHARD_ADDRESS", "EQXSHARD_PROCESSES", "EQXSHARD_PROCESS"}
    # The environment takes strings only.
    count = env["EQXSHARD_PROCESSES"]["value"]
    assert count == str(spec["completions"]) == str(spec["parallelism"])
    name = jobset["metadata"]["name"]
    host = f"{name}-{job['name']}-0-0.{name}"
    assert re.fullmatch(re.escape(host) + r":\d+", env["EQXSHARD_ADDRESS"]["value"])
    number = env["EQXSHARD_PROCESS"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert number == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    python, script, *options = container["command"]
    assert python == "python" and (ROOT / script).is_file() and "--resume=auto" in options
    # The run is in the volume that all share.
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert any(option.startswith(f"--output={mounts['runs']}/") for option in options)


# ssh


@pytest.fixture
def hosts(tmp_path, fake):
    """A file of two hosts, both of which are this one."""
    path = tmp_path / "hosts.txt"
    path.write_text("localhost\n# another\n\nme@localhost")
    fake("ssh", 'os.execvp("sh", ["sh", "-c", sys.argv[-1]])')
    return path


def ssh(*words):
    """The status, the sorted lines of stdout, and stderr."""
    status, out, err = finished([SSH, *words])
    return status, sorted(out.splitlines()), err


def test_a_dry_run_prints_the_commands(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("me@node-a\nnode-b\n")
    options = ["--dry-run", "--per-host", 2, "--port", 1234, "--directory", "/a b"]
    status, lines, err = ssh(*options, path, "python", "x.py", "it's")
    assert (status, err) == (0, "") and len(lines) == 4
    lines.sort(key=lambda line: re.findall(r"EQXSHARD_PROCESS=(\d)", line))
    for number, line in enumerate(lines):
        *first, host, text = shlex.split(line)
        assert first[0] == "ssh" and "BatchMode=yes" in first
        assert host == ["me@node-a", "node-b"][number // 2]
        assert text.startswith("cd '/a b' && ")
        settings = shlex.split(text.partition("env ")[2].partition(" </dev/null")[0])
        assert settings == [
            *("EQXSHARD_ADDRESS=node-a:1234", "EQXSHARD_PROCESSES=4"),
            *(f"EQXSHARD_PROCESS={number}", f"CUDA_VISIBLE_DEVICES={number % 2}"),
            *("python", "x.py", "it's"),
        ]


SCRIPT = """
import os, signal, sys, time
def stop(*_):
    print("told to stop", flush=True)
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
number = os.environ["EQXSHARD_PROCESS"]
open("ready" + number, "w").close()
if number == sys.argv[1]:
    while not os.path.exists("ready0"):
        time.sleep(0.01)
    sys.exit(3)
time.sleep(60)
"""


def test_when_one_fails_the_other_is_told_to_stop(hosts, tmp_path):
    began = time.monotonic()
    words = [hosts, sys.executable, "-c", SCRIPT, "1"]
    status, lines, err = ssh("--directory", tmp_path, *words)
    assert time.monotonic() - began < 40
    assert status == 3
    assert lines == ["[0] ready", "[0] saved", "[0] told to stop", "[1] ready"]
    says = "process 1 on me@localhost ended with status 3; the others will stop.\n"
    assert err == says


@pytest.mark.slow
def test_when_it_is_stopped_all_are(hosts, tmp_path):
    command = [SSH, "--directory", tmp_path, hosts, sys.executable, "-c", SCRIPT, "none"]
    with started(command) as process:
        ready = read_until(process, process.stdout, "ready")
        ready += read_until(process, process.stdout, "ready")
        assert sorted(ready) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert sorted(out.splitlines()) == [
        *("[0] saved", "[0] told to stop", "[1] saved", "[1] told to stop"),
    ]


@pytest.mark.parametrize(
    "words, says",
    [
        (["HOSTS"], "give a file of hosts and a command"),
        (["nowhere.txt", "true"], "there is no file nowhere.txt"),
        (["/dev/null", "true"], "there are no hosts in the file"),
        (["--per-host", "0", "HOSTS", "true"], "--per-host 0 is not a positive number"),
        (["--dry", "HOSTS", "true"], "unknown option --dry"),
    ],
)
def test_mistakes_are_named(hosts, words, says):
    words = [hosts if word == "HOSTS" else word for word in words]
    status, lines, err = ssh(*words)
    assert (status, lines) == (2, [])
    assert err == f"error: {says}; see the comment at the top of {SSH}.\n"
