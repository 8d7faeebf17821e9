"""The core stands alone: a loop needs no room that stands on it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eqxshard

#: The rooms that stand on the core, and the commands.
GUESTS = (
    *("planning", "inspect", "debug", "pages", "trackers", "parallel", "nn", "testing"),
    *("run", "__main__.py", "_info.py", "launch.py"),
)
SCRIPT = """
import logging
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard

assert eqxshard.__file__.startswith(sys.argv[2])


def make_model(key):
    return eqx.nn.MLP(4, 2, 16, 1, key=key)


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


class Printed:
    def log(self, step, values):
        print(step, values)

    def close(self, error=None):
        print("closed", error)


x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
data = {"x": x, "y": (x[:, 0] > 0).astype(np.int32)}
optim, rule = optax.adam(1e-2), eqxshard.fsdp(min_size=2)
mesh = eqxshard.make_mesh(data=2, fsdp=2)
key = jax.random.key(0)
state = eqxshard.init_state(make_model, optim, key=key, mesh=mesh, rule=rule)
train_step = eqxshard.make_train_step(loss_fn, optim)
eval_step = eqxshard.make_eval_step(lambda m, batch: {"loss": loss_fn(m, batch, None)})
loader = eqxshard.Loader(data, batch_size=16, mesh=mesh)


def evaluate(model):
    return eqxshard.evaluate(model, eval_step, loader)


before = evaluate(state.model)["loss"]
checkpointer = eqxshard.Checkpointer(sys.argv[1], save_every=8)
state = eqxshard.fit(
    state,
    train_step,
    loader,
    epochs=4,
    evaluate=evaluate,
    checkpointer=checkpointer,
    trackers=[Printed()],
    callbacks=[eqxshard.callbacks.EarlyStopping("eval/loss", patience=9)],
    log_every=4,
)
assert evaluate(state.model)["loss"] < before
checkpointer.close()

# By hand, from the checkpoint, on another mesh.
mesh = eqxshard.make_mesh(fsdp=4)
like = eqxshard.abstract_state(make_model, optim, key=key, mesh=mesh, rule=rule)
restored = eqxshard.Checkpointer(sys.argv[1]).restore(like)
pairs = zip(jax.tree.leaves(restored.model), jax.tree.leaves(state.model), strict=True)
for found, saved in pairs:
    if eqx.is_array(found):
        np.testing.assert_array_equal(found, saved)
train_step = eqxshard.make_train_step(loss_fn, optim)
for batch in eqxshard.Loader(data, batch_size=16, mesh=mesh, epochs=1):
    restored, metrics = train_step(restored, batch)
assert np.isfinite(float(metrics["loss"]))

# Its errors and its advice need no other room either.
try:
    train_step(restored, {"x": x[:3], "y": data["y"][:3]})
except eqxshard.UsageError as error:
    assert str(error).startswith("batch size 3 does not divide")
else:
    raise AssertionError
print("fine", int(restored.step))
"""


@pytest.mark.slow
def test_the_core_trains_evaluates_saves_and_restores_alone(tmp_path):
    package = tmp_path / "alone" / "eqxshard"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(eqxshard.__file__).parent, package, ignore=ignored)
    for guest in GUESTS:
        path = package / guest
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-W", "error", script, tmp_path / "run", package],
        env={**os.environ, **settings, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "fine 20"
