"""Notebooks: `__main__` is no file, kernels are started again, and cells run again."""

import json
import subprocess
import sys

import pytest

#: Runs cells as a kernel does: one by one, each in a file that is not there.
KERNEL = """
import json, sys
for number, cell in enumerate(json.load(sys.stdin)):
    exec(compile(cell, f"/tmp/ipykernel_1/{number}.py", "exec"), globals())
"""

SETUP = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax, sys, eqxshard

assert not hasattr(sys.modules["__main__"], "__file__")
jax.config.update("jax_num_cpu_devices", 2)
eqxshard.initialize()
mesh, rule = eqxshard.make_mesh(), eqxshard.fsdp(min_size=1)
optim = optax.sgd(0.1)
x = np.arange(64, dtype=np.float32) / 64
source = eqxshard.data.ArraySource({"x": x, "y": 2 * x})
"""
DEFINE = """
class Model(eqx.Module):
    slope: jax.Array

def make_model(key):
    return Model(jnp.zeros(()))

def loss_fn(model, batch, key):
    return (model.slope * batch["x"] - batch["y"]) ** 2
"""
PLAN = """
plan = eqxshard.plan(
    lambda key: make_model(key),
    lambda model, batch, key: loss_fn(model, batch, key),
    optim,
    {"x": x, "y": x},
    mesh_shape={"data": 4},
    rule=rule,
    target="cpu",
)
print(plan.devices, plan.memory.batch, plan.traffic)
"""
TRAIN = """
def train(train_step, steps, folder=None):
    state = eqxshard.init_state(
        make_model, optim, key=jax.random.key(0), mesh=mesh, rule=rule
    )
    checkpointer = eqxshard.Checkpointer(folder) if folder else None
    if folder and checkpointer.steps():
        state = checkpointer.restore(state)
    assert type(state.model) is Model
    loader = eqxshard.Loader(source, batch_size=16, mesh=mesh)
    state = eqxshard.fit(state, train_step, loader, steps=steps, checkpointer=checkpointer)
    print(int(state.step), state.model.slope)

train_step = eqxshard.make_train_step(loss_fn, optim)
"""


def run(*cells):
    """The output and the logs of cells in a new kernel."""
    command = [sys.executable, "-c", KERNEL]
    done = subprocess.run(command, input=json.dumps(cells), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_a_run_goes_on_in_a_new_kernel(tmp_path):
    start, folder = (SETUP, DEFINE, TRAIN), repr(str(tmp_path))
    lines, _ = run(*start, f"train(train_step, 4, {folder})", "train(train_step, 8)")
    resumed, _ = run(*start, f"train(train_step, 8, {folder})")
    assert lines[0].startswith("4 ") and lines[1].startswith("8 ")
    assert resumed == lines[1:]


def test_a_model_of_a_cell_is_planned():
    """The plan is for more devices than there are here."""
    (line,), _ = run(SETUP, DEFINE, PLAN)
    # The gradient and the loss of a model of one number.
    assert line.startswith(f"4 {2 * 64 * 4 // 4} {{'data': {{'all-reduce': ")


@pytest.mark.slow
def test_cells_run_again():
    """The class and the functions are new ones, of the same names."""
    first = "first = Model; train(train_step, 2)"
    again = "assert Model is not first; train(train_step, 2)"
    lines, log = run(SETUP, DEFINE, TRAIN, first, DEFINE, again, TRAIN, again)
    assert lines[0] == lines[1] == lines[2]
    # The step from before is for any class, but compiles again.
    assert "compiles again. No array and no number in its arguments differs." in log
