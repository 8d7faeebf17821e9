"""What a replay finds first, and the command that prints it."""

import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from loop_helpers import Layers, loss_fn, make_loader, nan_loss, run
from process_helpers import finished

import eqxshard
from eqxshard.debug._crash_dump import CrashDump, read_crash_dump
from eqxshard.debug._replay import replay
from eqxshard.replay import main


def dump_of(make_model: Any = Layers, loss_fn: Any = loss_fn, x=None) -> CrashDump:
    """A step on one device, as if it were read from a crash dump."""
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    return CrashDump(
        steps=[1],
        rows=list(range(20, 28)),
        model=make_model(jax.random.key(0)),
        model_state=None,
        batch={"x": jnp.asarray(rows if x is None else x)},
        key=jax.random.key(1),
        loss_fn=loss_fn,
        precision=None,
        trainable=True,
    )


def test_rows_of_the_batch_are_named():
    x = np.ones((8, 4), np.float32)
    x[[2, 5], 1] = [np.nan, np.inf]
    assert replay(dump_of(x=x)) == (
        "batch entry x is not finite in rows [2, 5] of the batch (examples [22, 25] of the "
        "source)."
    )


def test_many_rows_are_counted():
    x = np.full((20, 4), np.nan, np.float32)
    says = replay(dump_of(x=x))
    assert "in rows [0, 1, 2, 3, 4, 5, 6, 7] and 12 more of the batch" in says


def test_a_parameter_is_named():
    def make_model(key):
        bad = jnp.full((8,), jnp.nan)
        return eqx.tree_at(lambda m: m.layers[1].bias, Layers(key), bad)

    assert replay(dump_of(make_model)) == "the parameter layers.1.bias contains NaN."


class Root(eqx.Module):
    """A layer that makes NaN of what is negative."""

    inner: eqx.nn.Linear

    def __call__(self, x):
        return jnp.sqrt(self.inner(x))


class Roots(eqx.Module):
    first: eqx.nn.Linear
    roots: list[Root]

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(4, 8, key=keys[0])
        self.roots = [Root(eqx.nn.Linear(8, 8, key=k)) for k in keys[1:]]
        positive = jnp.ones((8, 8))
        for root, weight in zip(self.roots, (positive, -positive)):
            object.__setattr__(root.inner, "weight", weight)
            object.__setattr__(root.inner, "bias", jnp.zeros(8))

    def __call__(self, x):
        x = jnp.square(self.roots[0](jnp.square(self.first(x))))
        return self.roots[1](x)[0]


def test_a_layer_and_its_line_are_named():
    line = Root.__call__.__code__.co_firstlineno + 1
    assert replay(dump_of(Roots)).startswith(
        f"the first NaN appears in roots.1 (Root), {Path(__file__)}:{line}; the loss is "
        "not finite in rows [0, 1, 2, 3, 4, 5, 6, 7] of the batch (examples [20, 21"
    )


def test_an_infinity_is_named():
    def overflows(model, batch, key):
        return jnp.exp(1000 + jax.vmap(model)(batch["x"]))

    says = replay(dump_of(loss_fn=overflows))
    assert says.startswith("the first infinity appears in the loss function, ")


def test_a_gradient_is_named():
    def kink(model, batch, key):
        # The gradient of a square root at 0 is infinite.
        return jnp.sqrt(jnp.abs(jax.vmap(model)(batch["x"]) * 0))

    says = replay(dump_of(loss_fn=kink))
    assert says.startswith(
        "the loss is finite and its gradient is not; the first parameter whose gradient is "
        "not finite is layers.0.weight (of 6: layers.0.weight, layers.0.bias,"
    )


def test_a_step_that_is_finite_here():
    says = replay(dump_of())
    assert says.startswith("nothing: on one device, the loss and its gradients are finite")


MESH = make_mesh()


def loss_on_mesh(model, batch, key):
    whole = jax.NamedSharding(MESH, jax.P())
    return nan_loss(model, {"x": jax.lax.with_sharding_constraint(batch["x"], whole)}, key)


def test_a_loss_that_knows_a_mesh_is_replayed():
    says = replay(dump_of(loss_fn=loss_on_mesh))
    assert says.startswith("the first NaN appears in the loss function")


# From a run to the command


def test_the_command_names_the_layer_and_refuses_other_folders(
    tmp_path, monkeypatch, capsys
):
    with pytest.raises(FloatingPointError):
        run(tmp_path, make_loader(), loss_fn=nan_loss, epochs=1, max_nonfinite=1)
    folder = tmp_path / "crash_dump"
    assert read_crash_dump(eqxshard.Checkpointer(folder).directory).loss_fn is nan_loss
    monkeypatch.setattr(sys, "argv", ["replay", str(folder)])
    assert main() == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "steps 1 to 1 were not finite; step 1:\nthe first NaN appears in the loss function"
    )
    (folder / "crash_dump.json").write_text("{}")
    assert main() == 2
    err = capsys.readouterr().err
    assert "is damaged: crash_dump.json has changed since it was written." in err
    assert err.startswith("error: ") and err.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["replay", str(tmp_path / "none")])
    assert main() == 2
    assert "is not a crash dump; give the folder that the run" in capsys.readouterr().err


SCRIPT = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import eqxshard
from losses import losses

class Base(eqx.Module):
    scale: float = eqx.field(static=True, default=1.0)

class Root(Base):
    inner: eqx.nn.Linear
    depth: int = eqx.field(static=True)

    def __init__(self, key):
        super().__init__(scale=2.0)
        self.inner = eqx.nn.Linear(4, 1, key=key)
        self.depth = 3

    def __call__(self, x):
        return jnp.sqrt(-self.depth - self.scale * jnp.square(self.inner(x)))

class Model(eqx.Module):
    roots: list[Root]

    def __call__(self, x):
        return self.roots[1](x)

def make_model(key):
    return Model([Root(key) for key in jax.random.split(key)])

def loss_fn(model, batch, key):
    return losses(model, batch)

if __name__ == "__main__":
    where = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
    source = eqxshard.data.ArraySource({"x": np.ones((64, 4), np.float32)})
    loader = eqxshard.Loader(source, batch_size=8, mesh=where["mesh"])
    optim = optax.sgd(1.0)
    state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
    step = eqxshard.make_train_step(loss_fn, optim, **where)
    checkpointer = eqxshard.Checkpointer("run")
    eqxshard.fit(state, step, loader, steps=3, checkpointer=checkpointer, max_nonfinite=3)
"""


@pytest.mark.slow
def test_a_scripts_own_modules_are_replayed_in_another_process(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "losses.py").write_text(
        "import jax\ndef losses(model, batch): return jax.vmap(model)(batch['x'])[:, 0]\n"
    )
    _, _, err = finished([sys.executable, "train.py"], cwd=tmp_path)
    command = err.splitlines()[-1].split("`")[1]
    assert command == f"python -m eqxshard.replay {tmp_path}/run/crash_dump"
    status, out, err = finished([sys.executable, *command.split()[1:]], cwd=tmp_path)
    assert status == 0, err
    line = 1 + SCRIPT.splitlines().index(
        "        return jnp.sqrt(-self.depth - self.scale * jnp.square(self.inner(x)))"
    )
    says = f"the first NaN appears in roots.1 (Root), {tmp_path}/train.py:{line}; the loss"
    assert out.splitlines()[1].startswith(says), out
