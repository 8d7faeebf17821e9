"""What a replay finds first, and the command that prints it."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_helpers import Layers, loss_fn
from process_helpers import finished

from eqxshard.checkpoint._checksums import write_checksums
from eqxshard.debug._crash_dump import CrashDump
from eqxshard.debug._replay import replay
from eqxshard.replay import main


def replayed(make_model: Any = Layers, loss_fn: Any = loss_fn, x=None) -> str:
    """What is found in a step on one device, as if it were read from a crash dump."""
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    dump = CrashDump(
        steps=[1],
        rows=list(range(20, 28)),
        model=make_model(jax.random.key(0)),
        model_state=None,
        batch={"x": jnp.asarray(rows if x is None else x)},
        key=jax.random.key(1),
        loss_name="loss_fn",
        compute=None,
        trainable=True,
    )
    return replay(dump, loss_fn)


def test_rows_of_the_batch_are_named():
    x = np.ones((8, 4), np.float32)
    x[[2, 5], 1] = [np.nan, np.inf]
    assert replayed(x=x) == (
        "batch entry x is not finite in rows [2, 5] of the batch (examples [22, 25] of the "
        "source)."
    )
    says = replayed(x=np.full((20, 4), np.nan, np.float32))
    assert "in rows [0, 1, 2, 3, 4, 5, 6, 7] and 12 more of the batch" in says


def test_a_parameter_is_named():
    def make_model(key):
        bad = jnp.full((8,), jnp.nan)
        return eqx.tree_at(lambda m: m.layers[1].bias, Layers(key), bad)

    assert replayed(make_model) == "the parameter layers.1.bias contains NaN."


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
    assert replayed(Roots).startswith(
        f"the first NaN appears in roots.1 (Root), {Path(__file__)}:{line}; the loss is "
        "not finite in rows [0, 1, 2, 3, 4, 5, 6, 7] of the batch (examples [20, 21"
    )


def test_a_gradient_is_named():
    def kink(model, batch, key):
        # The gradient of a square root at 0 is infinite.
        return jnp.sqrt(jnp.abs(jax.vmap(model)(batch["x"]) * 0))

    says = replayed(loss_fn=kink)
    assert says.startswith(
        "the loss is finite and its gradient is not; the first parameter whose gradient is "
        "not finite is layers.0.weight (of 6: layers.0.weight, layers.0.bias,"
    )


# From a run to the command


SCRIPT = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import eqxshard
from losses import losses

class Root(eqx.Module):
    inner: eqx.nn.Linear

    def __call__(self, x):
        return jnp.sqrt(-3 - jnp.square(self.inner(x)))

class Model(eqx.Module):
    roots: list[Root]

    def __call__(self, x):
        return self.roots[1](x)

def make_model(key):
    return Model([Root(eqx.nn.Linear(4, 1, key=key)) for key in jax.random.split(key)])

def loss_fn(model, batch, key):
    return losses(model, batch)

def other_loss(model, batch, key):
    return losses(model, batch) * 0

broken = 3

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


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The folder of a run that gave up, and the command that it named."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "losses.py").write_text(
        "import jax\ndef losses(model, batch): return jax.vmap(model)(batch['x'])[:, 0]\n"
    )
    _, _, err = finished([sys.executable, "train.py"], cwd=folder)
    return folder, err.splitlines()[-1].split("`")[1]


@pytest.mark.slow
def test_the_command_that_a_run_names_finds_the_line(failed):
    folder, command = failed
    assert command == f"python -m eqxshard.replay {folder}/run/crash_dump {folder}/train.py"
    status, out, err = finished([sys.executable, *command.split()[1:]], cwd=folder)
    assert status == 0, err
    line = 1 + SCRIPT.splitlines().index(
        "        return jnp.sqrt(-3 - jnp.square(self.inner(x)))"
    )
    head, says = out.splitlines()
    assert head == "steps 1 to 3 were not finite; step 1:"
    assert says.startswith(
        f"the first NaN appears in roots.1 (Root), {folder}/train.py:{line}; the loss"
    )


@pytest.fixture
def command(failed, monkeypatch, capsys):
    """Runs the command with options; returns its status and what it printed."""
    folder, _ = failed
    before = {*sys.modules}

    def run(*options, dump=folder / "run" / "crash_dump", script=folder / "train.py"):
        sys.modules.pop("eqxshard_imported_script", None)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "argv", ["replay", str(dump), str(script), *options])
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    yield run
    for name in {*sys.modules} - before:
        if name in ("eqxshard_imported_script", "losses"):
            del sys.modules[name]


#: Options of the command, the dump and the script, and a word of what is said.
REFUSED = {
    "model": (["--model", "make"], {}, "has no function make; name the one that makes"),
    "loss": (["--loss", "broken"], {}, "has no function broken; name the one that is the"),
    "shapes": (["--model", "Root"], {}, "run/crash_dump does not fit this model: "),
    "dump": ([], {"dump": "none"}, "none is not a crash dump; give"),
    "script": ([], {"script": "none.py"}, "there is no Python script 'none.py'; give the"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_the_command_refuses_what_does_not_fit(command, what):
    words, options, says = REFUSED[what]
    status, out, err = command(*words, **options)
    assert status == 2 and not out
    assert says in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.slow
def test_an_error_of_the_script_keeps_its_traceback(command, tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('mine')")
    status, out, err = command(script=tmp_path / "train.py")
    assert (status, out) == (1, "")
    assert f'File "{tmp_path / "train.py"}", line 1' in err
    assert "\nValueError: mine\n" in err


NAMES = ["os:system", "module:run", "__main__:loss_fn", "equinox:tree_serialise_leaves"]


@pytest.mark.slow
def test_a_forged_dump_imports_and_calls_nothing(command, failed, tmp_path):
    """Whatever it names, and whatever lies beside it."""
    folder = tmp_path / "run"
    dump = folder / "crash_dump"
    shutil.copytree(failed[0] / "run" / "crash_dump", dump)
    for file in (folder / "module.py", folder / "train.py", tmp_path / "module.py"):
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    path = dump / "crash_dump.json"
    plain = json.loads(path.read_text())
    for name in NAMES:
        code = {"code": name, "object": name, "partial": {"fn": {"code": name}}}
        told = {"script": str(folder / "train.py"), "code": {"loss_fn": code}}
        told |= {"tree": {"model": code}, "loss_fn": name}
        for forged in (told, {"compute": name}, {"leaves": {"batch": code}}):
            path.write_text(json.dumps(plain | forged))
            write_checksums(dump)
            status, _, err = command("--loss", "loss_fn", dump=dump)
            if forged is told:
                assert status == 0
            else:
                assert status == 2 and "; " in err and err.count("\n") == 1, err
    assert not (tmp_path / "ran").exists()
