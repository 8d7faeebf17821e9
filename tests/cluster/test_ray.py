"""The recipe for Ray, run by Ray on this machine."""

import ast
import importlib.util
import os
import subprocess
import sys

import pytest
from cluster_helpers import ROOT, SETTINGS

pytestmark = pytest.mark.cluster

RECIPE = ROOT / "recipes" / "cluster" / "on_ray.py"
RUN = """
def run():
    import jax, jax.numpy as jnp, numpy as np, optax, eqxshard

    def make_model(key):
        return jnp.zeros(8)

    def loss_fn(model, batch, key):
        return (batch["x"] @ model - batch["y"]) ** 2

    mesh, optim = eqxshard.make_mesh(), optax.sgd(0.1)
    key, rule = jax.random.key(0), eqxshard.fsdp(min_size=1)
    state = eqxshard.init_state(make_model, optim, key=key, mesh=mesh, rule=rule)
    x = np.sin(np.arange(64 * 8, dtype=np.float32)).reshape(64, 8)
    source = eqxshard.data.ArraySource({"x": x, "y": x.sum(1)})
    loader = eqxshard.Loader(source, batch_size=16, mesh=mesh)
    train_step = eqxshard.make_train_step(loss_fn, optim)
    for batch in loader:
        state, metrics = train_step(state, batch)
        if int(state.step) == 8:
            loss = metrics.compute()["loss"]
            return jax.process_count(), mesh.size, loss, jax.process_index()
"""
#: The script that the recipe runs, in a Ray of this machine's own.
SCRIPT = f"""{RUN}
from pathlib import Path

import eqxshard

eqxshard.initialize()
result = run()
Path(__file__).with_name(f"result{{result[-1]}}.txt").write_text(repr(result))
"""
START = f"""
import sys
sys.argv = sys.argv[1:]
import ray, runpy

ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
runpy.run_path({str(RECIPE)!r}, run_name="__main__")
"""
#: Ray sends no statistics to its makers.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def results(tmp_path, *command, **settings):
    """The results of `run` in each process."""
    settings = {**os.environ, **SETTINGS, **QUIET, **settings}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, (done.stdout, done.stderr)
    files = sorted(tmp_path.glob("result*.txt"))
    return [ast.literal_eval(file.read_text()) for file in files]


def test_its_actors_train_as_one_process_does(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray: pip install ray")
    script, start = tmp_path / "script.py", tmp_path / "start.py"
    script.write_text(SCRIPT)
    start.write_text(START)
    ((_, size, loss, _),) = results(tmp_path, script, JAX_NUM_CPU_DEVICES="2")
    assert size == 2
    found = results(tmp_path, start, RECIPE, 2, script)
    assert [each[:2] for each in found] == [(2, 2), (2, 2)]
    assert [each[2] for each in found] == pytest.approx([loss] * 2, rel=1e-5)
