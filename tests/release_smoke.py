"""Uses an installed eqxshard where there is nothing else.

`release_smoke.py VERSION FOLDER`: it must be of that version, and from below that folder.
"""

import os
import subprocess
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

import equinox as eqx
import jax
import numpy as np
import optax

import eqxshard
from eqxshard.sharding import batch_sharding

version, folder = sys.argv[1:]
assert eqxshard.__version__ == version
assert Path(eqxshard.__file__).is_relative_to(folder), eqxshard.__file__

command = [sys.executable, "-I", "-m", "eqxshard", "info"]
info = subprocess.run(command, capture_output=True, text=True, check=True)
assert version in info.stdout and "2 x cpu" in info.stdout, info.stdout


def losses(model, batch, key):
    return (jax.vmap(model)(batch["x"]) - batch["y"]) ** 2


optim = optax.adam(1e-2)
mesh = eqxshard.make_mesh(data=1, fsdp=2)
state = eqxshard.init_state(
    lambda key: eqx.nn.MLP(4, "scalar", 8, 1, key=key),
    optim,
    key=jax.random.key(0),
    mesh=mesh,
    rule=eqxshard.fsdp(min_size=1),
)
step = eqxshard.make_train_step(losses, optim)
rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
batch = eqxshard.filter_shard({"x": rows, "y": rows.sum(axis=1)}, batch_sharding(mesh))
found = []
for _ in range(2):
    state, metrics = step(state, batch)
    found.append(float(metrics.compute()["loss"]))
assert found[1] < found[0], found
print("trained")
