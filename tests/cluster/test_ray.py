"""The code for Ray in the guide, run by Ray on this machine."""

import ast
import importlib.util
import os
import subprocess
import sys

import pytest
from cluster_helpers import ROOT, SETTINGS

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs" / "pages" / "guide" / "cluster.md"
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
            return jax.process_count(), mesh.size, metrics.compute()["loss"]
"""
#: The addresses of Ray and of this machine; and no statistics for Ray's makers.
START = """
import ray

ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
"""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def last_line(code, tmp_path, **settings):
    script = tmp_path / "script.py"
    script.write_text(code)
    settings = {**os.environ, **SETTINGS, **QUIET, **settings}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, (done.stdout, done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("[(", "("))]
    return ast.literal_eval(next(line for line in reversed(lines) if "pid=" not in line))


def test_its_actors_train_as_one_process_does(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("no Ray: pip install ray")
    section = PAGE.read_text().partition("With [Ray]")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    found = last_line(START + RUN + code, tmp_path)
    alone = last_line(f"{RUN}\nprint(run())", tmp_path, JAX_NUM_CPU_DEVICES="2")
    assert alone[:2] == (1, 2)
    assert [each[:2] for each in found] == [(2, 2), (2, 2)]
    assert [each[2] for each in found] == pytest.approx([alone[2]] * 2, rel=1e-5)
