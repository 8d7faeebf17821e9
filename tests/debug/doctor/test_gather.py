import os
import stat
import sys
import time

import jax
import pytest

import eqxshard
from eqxshard.debug._doctor._facts import Cache
from eqxshard.debug._doctor._gather import gather, look_for_devices, run

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "570.86.15, NVIDIA H200"; echo "570.86.15, NVIDIA H200";;
  topo) printf "        GPU0 GPU1\\nGPU0 X NV18\\nGPU1 NV18 X\\n";;
esac
"""


@pytest.fixture
def nothing_starts(monkeypatch):
    """JAX is not started, which takes seconds."""
    started = (None, "", False)
    monkeypatch.setattr("eqxshard.debug._doctor._gather.look_for_devices", lambda: started)


@pytest.mark.usefixtures("nothing_starts")
def test_facts_are_those_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    facts = gather()
    assert facts.packages["jax"] == jax.__version__
    assert facts.packages["eqxshard"] == eqxshard.__version__
    assert {"jax", "equinox", "numpy"} <= facts.needs.keys() <= facts.packages.keys()
    # Names of extras in brackets are not part of a name, and extras are not needed.
    assert "etils" in facts.needs and "matplotlib" not in facts.needs
    assert facts.needs_python == "3.11"
    assert facts.cache == Cache(str(tmp_path))
    assert {disk.name for disk in facts.disks} >= {"current folder", "temporary folder"}
    assert 1 <= facts.usable_cores <= facts.cores
    assert "JAX_COMPILATION_CACHE_DIR" in facts.environment
    assert "HOME" not in facts.environment


@pytest.mark.usefixtures("nothing_starts")
def test_what_nvidia_smi_says_is_read(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text(SMI)
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = gather()
    assert facts.gpus == ("NVIDIA H200", "NVIDIA H200") and facts.driver == "570.86.15"
    assert facts.links.splitlines()[1] == "GPU0 X NV18"


@pytest.mark.slow
def test_jax_is_looked_at_in_another_process():
    devices, failure, hangs = look_for_devices()
    assert devices is not None and devices.platform == "cpu" and not failure and not hangs


def test_what_hangs_is_stopped():
    start = time.monotonic()
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    assert look_for_devices(code, 0.3) == (None, "", True)
    assert time.monotonic() - start < 30


def test_what_fails_says_why():
    code = "import sys; print('more', file=sys.stderr); raise ImportError('no jaxlib')"
    assert look_for_devices(code) == (None, "ImportError: no jaxlib", False)
    assert look_for_devices("import os; os._exit(3)") == (None, "exit status 3", False)


def test_a_command_that_is_not_there():
    ended = run(["eqxshard-no-such-command"], 1.0)
    assert (ended.out, ended.code) == ("", 127)
    assert run([sys.executable, "-c", "print(1); raise SystemExit(2)"], 60.0).out == ""
