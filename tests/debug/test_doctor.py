"""The doctor: facts of a machine, what is found in made-up ones, and the report."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import eqxshard
from eqxshard.debug._doctor._facts import (
    Devices,
    Disk,
    Facts,
    gather,
    look_for_devices,
)
from eqxshard.debug._doctor._report import describe, find

GB = 10**9
JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA12 = JAX | {"jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
CUDA13 = JAX | {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
CPU, GPU = Devices("cpu", {"cpu": 1}), Devices("gpu", {"NVIDIA H200": 8})


def machine(**facts):
    """A machine with nothing wrong, but for some facts."""
    return Facts(**{"packages": JAX, "devices": CPU, **facts})


def disk(name="current folder", free=50 * GB, total=100 * GB):
    return {"disks": (Disk(name, "/a", free, total),)}


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"needs": {"optax": "0.2.8"}, "packages": JAX | {"optax": "0.2.10"}},
        {"packages": CUDA12, "driver": "550.54", "devices": GPU},
        {"cache": "/c", **disk()},
        disk("shared memory", free=8 * GB, total=8 * GB),
        {"packages": {}, "devices": None},
    ],
    ids=str,
)
def test_nothing_is_found_where_all_is_well(facts):
    assert find(machine(**facts)) == []


#: Facts, a word of what is found, how the command begins, and whether it is wrong.
FINDINGS = [
    ({"needs": {"rich": "14.3"}}, "rich is not installed", "pip install", True),
    (
        {"needs": {"numpy": "2.1"}, "packages": JAX | {"numpy": "2.0.9"}},
        "numpy 2.0.9 is older than 2.1",
        'pip install --upgrade "numpy>=2.1"',
        True,
    ),
    ({"devices": None, "failure": "no jaxlib"}, "no jaxlib", "python -c", True),
    ({"devices": None, "hangs": True, "driver": "1"}, "not come back", "nvidia-smi", True),
    ({"driver": "580.65"}, "for CPUs only", 'pip install --upgrade "jax[cuda13]', True),
    ({"driver": "550.54"}, "for CPUs only", 'pip install --upgrade "jax[cuda12]', True),
    ({"driver": "470.1"}, "needs NVIDIA's driver 525", "sudo apt-get", True),
    ({"driver": "550", "packages": CUDA13}, "needs NVIDIA's driver 580", "pip inst", True),
    ({"driver": "550", "packages": CUDA12}, "finds no GPU", "JAX_PLATFORMS=cuda", True),
    (
        {"driver": "550", "environment": {"JAX_PLATFORMS": "cpu"}},
        "keeps JAX off the GPUs",
        "unset JAX_PLATFORMS",
        False,
    ),
    (
        {"driver": "550", "environment": {"CUDA_VISIBLE_DEVICES": "-1"}},
        "hides every GPU",
        "unset CUDA_VISIBLE_DEVICES",
        True,
    ),
    ({"cache_problem": "belongs to another"}, "another, so", "export JAX_COMP", True),
    (disk(free=GB // 2), "0.5 GB are free", "df -h /a", True),
    (disk(free=5 * GB), "5.0 GB are free", "df -h /a", False),
    (disk("shared memory", total=64_000_000), "64 MB in all", "docker run", False),
    ({"resolves": False}, "has no address", "echo", False),
    ({"resolves": False, "environment": {"SLURM_JOB_ID": "7"}}, "address", "echo", True),
]


@pytest.mark.parametrize("facts, words, command, is_wrong", FINDINGS, ids=str)
def test_what_is_wrong_is_found_with_what_mends_it(facts, words, command, is_wrong):
    (finding,) = find(machine(**facts))
    assert words in finding.sentence and finding.command.startswith(command)
    assert finding.is_wrong is is_wrong


# Facts


SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "570.86.15, NVIDIA H200"; echo "570.86.15, NVIDIA H200";;
esac
"""


@pytest.fixture
def nothing_starts(monkeypatch):
    """JAX is not started, which takes seconds."""
    started = (None, "", False)
    monkeypatch.setattr("eqxshard.debug._doctor._facts.look_for_devices", lambda: started)


@pytest.mark.usefixtures("nothing_starts")
def test_facts_are_those_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    facts = gather()
    assert facts.packages["jax"] == jax.__version__
    assert facts.packages["eqxshard"] == eqxshard.__version__
    assert {"jax", "equinox", "numpy"} <= facts.needs.keys() <= facts.packages.keys()
    # Names of extras in brackets are not part of a name, and extras are not needed.
    assert "etils" in facts.needs and "matplotlib" not in facts.needs
    assert (facts.cache, facts.cache_problem) == (str(tmp_path), "")
    assert {disk.name for disk in facts.disks} >= {"current folder", "temporary folder"}
    assert "JAX_COMPILATION_CACHE_DIR" in facts.environment
    assert "HOME" not in facts.environment


@pytest.mark.usefixtures("nothing_starts")
def test_what_nvidia_smi_says_is_read(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text(SMI)
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = gather()
    assert facts.gpus == ["NVIDIA H200", "NVIDIA H200"] and facts.driver == "570.86.15"


def test_what_hangs_is_stopped():
    start = time.monotonic()
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    assert look_for_devices(code, 0.3) == (None, "", True)
    assert time.monotonic() - start < 30


def test_what_fails_says_why():
    code = "import sys; print('more', file=sys.stderr); raise ImportError('no jaxlib')"
    assert look_for_devices(code) == (None, "ImportError: no jaxlib", False)
    assert look_for_devices("import os; os._exit(3)") == (None, "exit status 3", False)


# The report


HEALTHY = Facts(
    packages={"jax": "0.10.2", "jaxlib": "0.10.2"},
    devices=Devices("gpu", {"NVIDIA H200": 8}),
    driver="580.65.06",
    gpus=("NVIDIA H200",) * 8,
    environment={"XLA_FLAGS": "--xla_dump_to=/tmp/a"},
    disks=(Disk("current folder", "/a", 10**12, 10**12),),
    cache=str(Path.home() / "cache"),
)


def test_a_healthy_machine():
    text = describe(HEALTHY, find(HEALTHY))
    assert text.endswith("Nothing is wrong.")
    assert "8 x NVIDIA H200 (gpu)" in text
    # A home folder has somebody's name in it.
    assert "~/cache" in text and str(Path.home()) not in text.replace("/a", "")


def test_it_works_where_jax_cannot_be_imported(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('jaxlib is too old')")
    code = "import sys; from eqxshard.__main__ import main; sys.exit(main(['doctor']))"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "JAX does not start: ImportError: jaxlib is too old" in done.stdout
