"""The job files: their requests, and the commands of `ssh.sh`.

`tests/cluster` runs them on real schedulers.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from process_helpers import finished

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "cluster"
JOBSET, SSH = FOLDER / "jobset.yaml", FOLDER / "ssh.sh"


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
def test_mistakes_are_named(tmp_path, words, says):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost\n# another\n\nme@localhost")
    status, lines, err = ssh(*(hosts if word == "HOSTS" else word for word in words))
    assert (status, lines) == (2, [])
    assert err == f"error: {says}; see the comment at the top of {SSH}.\n"
