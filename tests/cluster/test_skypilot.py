"""The task for SkyPilot: read by SkyPilot, and run by the shells of two nodes."""

import contextlib
import importlib.util
import os
import subprocess
import sys

import pytest
import yaml
from cluster_helpers import ROOT, SETTINGS, TRAINING, assert_same, reports
from process_helpers import started

from eqxshard.launch import _free_port

pytestmark = pytest.mark.cluster

TASK = ROOT / "recipes" / "cluster" / "skypilot.yaml"
#: In a process of its own, since it imports half of PyPI, with warnings.
READ = """
import sys, sky, yaml
task = sky.Task.from_yaml_config(yaml.safe_load(sys.stdin))
print(task.num_nodes, list(task.storage_mounts), task.run)
"""


def read_by_skypilot(task):
    command = [sys.executable, "-c", READ]
    return subprocess.run(command, input=task, capture_output=True, text=True)


def test_it_is_a_task_of_skypilot():
    if importlib.util.find_spec("sky") is None:
        pytest.skip("no SkyPilot: pip install skypilot")
    done = read_by_skypilot(TASK.read_text())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ['/runs'] export EQXSHARD_ADDRESS=")
    done = read_by_skypilot(TASK.read_text().replace("num_nodes", "num_node"))
    assert done.returncode == 1 and "did you mean 'num_nodes'?" in done.stderr


def test_its_nodes_train_as_one_process_does(tmp_path, one_process):
    run = yaml.safe_load(TASK.read_text())["run"].rstrip()
    run = run.replace("/runs/", f"{tmp_path}/").replace("29400", str(_free_port()))
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    with contextlib.ExitStack() as stack:
        shells = []
        for rank in range(2):
            settings = SETTINGS | nodes | {"SKYPILOT_NODE_RANK": str(rank)}
            shell = ["bash", "-c", f'{run} "$@"', "run", *TRAINING]
            how = {"cwd": ROOT, "env": os.environ | settings}
            shells.append(stack.enter_context(started(shell, **how)))
        for shell in shells:
            out, err = shell.communicate(timeout=300)
            assert shell.returncode == 0, (out, err)
    assert_same(reports(tmp_path / "fashion_mnist"), one_process)
