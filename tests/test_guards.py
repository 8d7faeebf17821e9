"""What watches over a run: steps that are not finite, stalls, signals, full disks."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, make_mesh

import eqxshard
from eqxshard._black_box import read_black_box
from eqxshard.replay import main, replay

OPTIM = lenient(optax.sgd(0.01))
ROWS = 48


class Layers(eqx.Module):
    layers: list[eqx.nn.Linear]
    power: float = eqx.field(static=True, default=1.0)

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        sizes = ((4, 8), (8, 8), (8, 1))
        self.layers = [eqx.nn.Linear(*size, key=k) for size, k in zip(sizes, keys)]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x[0]


class Root(eqx.Module):
    """A layer that makes NaN of what is negative."""

    inner: eqx.nn.Linear

    def __call__(self, x):
        return jnp.sqrt(self.inner(x))


def make_loader(bad=None, batch_size=8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    if bad is not None:
        x[bad] = np.nan
    source = eqxshard.data.ArraySource({"x": x})
    return eqxshard.Loader(source, batch_size=batch_size, mesh=make_mesh(), shuffle=False)


def loss_fn(model, batch, key):
    return jax.vmap(model)(batch["x"]) ** 2


def run(folder, loader, make_model: Any = Layers, loss_fn: Any = loss_fn, **options):
    where = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(make_model, OPTIM, key=jax.random.key(0), **where)
    step = eqxshard.make_train_step(loss_fn, OPTIM, **where)
    checkpointer = None if folder is None else eqxshard.Checkpointer(folder, every=1)
    return eqxshard.fit(state, step, loader, checkpointer=checkpointer, **options)


# Steps that are not finite


def test_a_few_steps_that_are_not_finite_are_skipped_and_counted(tmp_path):
    lines = []

    class Tracker:
        def log(self, step, values):
            lines.append(values.get("train/nonfinite", 0))

        def close(self):
            pass

    run(tmp_path, make_loader(bad=[9, 17]), epochs=1, max_nonfinite=3, trackers=[Tracker()])
    assert lines == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("log_every", [1, 2, 50])
def test_too_many_in_a_row_end_the_run_with_a_black_box(tmp_path, log_every):
    loader = make_loader(bad=[18, 25, 26, 33, 41])
    with pytest.raises(
        FloatingPointError, match="from step 3 on, was not finite; look"
    ) as e:
        run(tmp_path, loader, epochs=3, log_every=log_every, max_nonfinite=3)
    folder = tmp_path / "black_box"
    assert str(folder) in str(e.value)
    box = read_black_box(eqxshard.Checkpointer(folder).directory)
    assert box.steps[:3] == [3, 4, 5]
    assert box.rows == list(range(16, 24))
    says = "batch entry x is not finite in rows [2] of the batch (examples [18] of the "
    assert replay(box) == says + "source)."
    # What was saved is from before, or as it was before.
    step = int(eqxshard.Checkpointer(tmp_path).steps()[-1])
    assert step >= 2


def test_without_a_checkpointer_it_ends_too():
    with pytest.raises(FloatingPointError, match="2 steps in a row, from step 1 on, was"):
        run(
            None, make_loader(bad=list(range(ROWS))), epochs=1, log_every=1, max_nonfinite=2
        )


def box_of(tmp_path, make_model: Any = Layers, loss_fn: Any = loss_fn):
    with pytest.raises(FloatingPointError):
        run(tmp_path, make_loader(), make_model, loss_fn, epochs=1, max_nonfinite=1)
    return read_black_box(eqxshard.Checkpointer(tmp_path / "black_box").directory)


def test_a_parameter_is_named(tmp_path):
    def make_model(key):
        model = Layers(key)
        bad = jnp.full((8,), jnp.nan)
        return eqx.tree_at(lambda m: m.layers[1].bias, model, bad)

    says = replay(box_of(tmp_path, make_model))
    assert says == "the parameter layers.1.bias has NaN in it."


def test_a_layer_and_its_line_are_named(tmp_path):
    def make_model(key):
        class Model(eqx.Module):
            first: eqx.nn.Linear
            roots: list[Root]

            def __call__(self, x):
                return self.roots[1](jnp.square(self.roots[0](jnp.square(self.first(x)))))[
                    0
                ]

        keys = jax.random.split(key, 3)
        roots = [Root(eqx.nn.Linear(8, 8, key=k)) for k in keys[1:]]
        positive = jnp.ones_like(roots[0].inner.weight)
        roots[0] = eqx.tree_at(
            lambda m: (m.inner.weight, m.inner.bias), roots[0], (positive, positive[0])
        )
        roots[1] = eqx.tree_at(lambda m: m.inner.weight, roots[1], -positive)
        return Model(eqx.nn.Linear(4, 8, key=keys[0]), roots)

    says = replay(box_of(tmp_path, make_model))
    line = Root.__call__.__code__.co_firstlineno + 1
    assert says.startswith(
        f"the first NaN is made in roots.1 (Root), {Path(__file__)}:{line}; the loss is "
        "not finite in rows [0, 1, 2, 3, 4, 5, 6, 7] of the batch (examples [0, 1"
    )


def test_an_infinity_is_named(tmp_path):
    def overflows(model, batch, key):
        return jnp.exp(1000 + jax.vmap(model)(batch["x"]))

    says = replay(box_of(tmp_path, loss_fn=overflows))
    assert says.startswith("the first infinity is made in the loss function, ")


def test_a_gradient_is_named(tmp_path):
    def kink(model, batch, key):
        # The gradient of a square root at 0 is infinite.
        return jnp.sqrt(jnp.abs(jax.vmap(model)(batch["x"]) * 0))

    says = replay(box_of(tmp_path, loss_fn=kink))
    assert says.startswith(
        "the loss is finite and its gradient is not; the first parameter"
    )
    assert "is layers.0.weight (of 6: " in says


def test_a_state_in_half_precision_is_replayed(tmp_path):
    def overflows(model, batch, key):
        return jax.vmap(model)(batch["x"] * 1e5) ** 2

    where = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    where["precision"] = eqxshard.Precision(compute=jnp.bfloat16)
    state = eqxshard.init_state(Layers, OPTIM, key=jax.random.key(0), **where)

    def bad(model, batch, key):
        assert model.layers[0].weight.dtype == jnp.bfloat16
        return jnp.log(-1 - overflows(model, batch, key))

    step = eqxshard.make_train_step(bad, OPTIM, **where)
    with pytest.raises(FloatingPointError):
        eqxshard.fit(
            state,
            step,
            make_loader(),
            steps=2,
            checkpointer=eqxshard.Checkpointer(tmp_path),
            max_nonfinite=1,
        )
    box = read_black_box(eqxshard.Checkpointer(tmp_path / "black_box").directory)
    assert replay(box).startswith("the first NaN is made in the loss function")


def test_a_loss_that_knows_a_mesh_is_replayed(tmp_path):
    mesh = make_mesh()

    def loss_on_mesh(model, batch, key):
        x = jax.lax.with_sharding_constraint(batch["x"], jax.NamedSharding(mesh, jax.P()))
        return jnp.log(-1 - jax.vmap(model)(x) ** 2)

    says = replay(box_of(tmp_path, loss_fn=loss_on_mesh))
    assert says.startswith("the first NaN is made in the loss function")


def test_a_loss_that_cannot_be_written_does_not_hide_why_the_run_ended(tmp_path):
    lock = threading.Lock()

    def loss_with_lock(model, batch, key):
        with lock:
            return jnp.log(-1 - jax.vmap(model)(batch["x"]) ** 2)

    with pytest.raises(FloatingPointError, match="not finite; what is needed to look for"):
        run(tmp_path, make_loader(), Layers, loss_with_lock, epochs=1, max_nonfinite=1)


def test_the_command_names_it_and_refuses_what_is_no_black_box(
    tmp_path, monkeypatch, capsys
):
    box_of(tmp_path, loss_fn=lambda m, b, k: jnp.log(-1 - jax.vmap(m)(b["x"]) ** 2))
    folder = tmp_path / "black_box"
    monkeypatch.setattr(sys, "argv", ["replay", str(folder)])
    assert main() == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "steps 1 to 1 were not finite; step 1:\nthe first NaN is made in "
    )
    (folder / "program.pickle").write_bytes(b"x")
    assert main() == 2
    assert "is damaged: program.pickle is not what was" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["replay", str(tmp_path / "none")])
    assert main() == 2
    assert "is no black box; give the folder" in capsys.readouterr().err


LOST = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import eqxshard

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

where = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
source = eqxshard.data.ArraySource({"x": np.ones((64, 4), np.float32)})
loader = eqxshard.Loader(source, batch_size=8, mesh=where["mesh"])
optim = optax.sgd(1.0)
state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
step = eqxshard.make_train_step(
    lambda model, batch, key: jax.vmap(model)(batch["x"])[:, 0], optim, **where
)
checkpointer = eqxshard.Checkpointer("run")
eqxshard.fit(state, step, loader, steps=3, checkpointer=checkpointer, max_nonfinite=3)
"""


def test_a_scripts_own_modules_are_replayed_in_another_process(tmp_path):
    (tmp_path / "train.py").write_text(LOST)
    in_place = {"cwd": tmp_path, "capture_output": True, "text": True}
    lost = subprocess.run([sys.executable, "train.py"], **in_place)
    command = lost.stderr.splitlines()[-1].split("`")[1]
    assert command == f"python -m eqxshard.replay {tmp_path}/run/black_box"
    replayed = subprocess.run([sys.executable, *command.split()[1:]], **in_place)
    assert replayed.returncode == 0, replayed.stderr
    line = 1 + LOST.splitlines().index(
        "        return jnp.sqrt(-self.depth - self.scale * jnp.square(self.inner(x)))"
    )
    says = f"the first NaN is made in roots.1 (Root), {tmp_path}/train.py:{line}; the loss"
    assert replayed.stdout.splitlines()[1].startswith(says), replayed.stdout


# Stalls


def test_a_stalled_source_is_reported_with_its_stack(caplog):
    class Slow:
        def __len__(self):
            return ROWS

        def gather(self, indices):
            if 24 in indices:
                time.sleep(1.5)
            return {"x": np.ones((len(indices), 4), np.float32)}

    loader = eqxshard.Loader(
        Slow(), batch_size=8, mesh=make_mesh(), shuffle=False, prefetch=0
    )
    run(None, make_loader(), epochs=1)
    with caplog.at_level(logging.WARNING):
        run(None, loader, epochs=1, stall_seconds=1.0)
    assert "the run waits for the batch of step 4. The stacks of" in caplog.text
    assert "in gather" in caplog.text and "time.sleep(1.5)" in caplog.text
    assert re.search(r"the batch of step 4 came after \d s; the run goes on", caplog.text)


def test_a_stalled_step_is_reported(caplog):
    def slow(model, batch, key):
        def wait(x):
            time.sleep(1.5)
            return x

        like = jax.ShapeDtypeStruct((), jnp.float32)
        one = jax.pure_callback(wait, like, jnp.float32(1))
        return loss_fn(model, batch, key) * jax.lax.stop_gradient(one)

    with caplog.at_level(logging.WARNING):
        run(None, make_loader(), loss_fn=slow, steps=3, stall_seconds=0.5)
    assert re.search(r"the run waits for step \d\. The stacks of its", caplog.text)


def test_no_time_at_all_is_refused():
    with pytest.raises(ValueError, match=r"stall_seconds=0\.0 is no time; use more than 0"):
        run(None, make_loader(), epochs=1, stall_seconds=0.0)


def test_a_run_that_does_not_stall_is_not_reported(caplog):
    run(None, make_loader(), epochs=1, stall_seconds=60.0)
    assert caplog.text == ""


# Signals


SCRIPT = """
import sys, time
import equinox as eqx, jax, numpy as np, optax
import eqxshard
jax.config.update("jax_num_cpu_devices", 2)
folder, steps = sys.argv[1], int(sys.argv[2])
mesh = eqxshard.make_mesh()
where = {"mesh": mesh, "rule": eqxshard.replicate()}
source = eqxshard.data.ArraySource({"x": np.ones((64, 4), np.float32)})
def slowly(batch):
    time.sleep(0.02)
    return batch
loader = eqxshard.Loader(source, batch_size=8, mesh=mesh, transform=slowly)
optim = optax.adam(1e-3)
make_model = lambda key: eqx.nn.MLP(4, 1, 8, 1, key=key)
state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
step = eqxshard.make_train_step(
    lambda model, batch, key: (jax.vmap(model)(batch["x"])[:, 0] - 1) ** 2, optim, **where
)
class Says:
    def log(self, step, values): print("step", step, flush=True)
    def close(self): print("closed", flush=True)
checkpointer = eqxshard.Checkpointer(folder)
eqxshard.fit(state, step, loader, steps=steps, log_every=1, checkpointer=checkpointer,
             trackers=[Says()])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(tmp_path, number):
    process = start_script(tmp_path)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    (step,) = eqxshard.Checkpointer(tmp_path / "run").steps()
    assert out.splitlines()[-2:] == [f"step {step}", "closed"]
    assert "stopping after this step, to save a checkpoint; a second signal" in err
    assert f"stopped after step {step}; the checkpoint of step {step} is saved." in err
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert "Traceback" not in err
    else:
        assert process.returncode == -signal.SIGINT or process.returncode == 130


def start_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        # Ignored signals, as of a shell's background jobs, would stay ignored.
        [sys.executable, script, tmp_path / "run", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "step 5\n":
            return process
    raise AssertionError(process.communicate())


def test_a_second_signal_ends_it_at_once(tmp_path):
    process = start_script(tmp_path)
    os.kill(process.pid, signal.SIGTERM)
    while "stopping after" not in (process.stderr.readline() if process.stderr else ""):
        pass
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_signals_are_as_they_were_after_a_run(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run(tmp_path, make_loader(), steps=1)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert after == before


# A full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_logs_on_a_full_disk_are_told_of_and_the_run_goes_on(small_disk, caplog):
    tracker = eqxshard.trackers.JSONLines(small_disk / "metrics.jsonl")
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize))
    run(None, make_loader(), epochs=3, log_every=1, trackers=[tracker])
    assert "a tracker failed: [Errno 28] No space left on device. The run" in caplog.text


# Orbax leaves a coroutine behind that never ran.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_told_and_the_run_goes_on(small_disk, caplog):
    folder, filler = small_disk / "run", small_disk / "filler"
    steps = []

    class Fills:
        def log(self, step, values):
            steps.append(step)
            if step == 3:
                free = os.statvfs(small_disk)
                filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 8192))

        def close(self):
            pass

    with pytest.raises(OSError, match=r"step 6 could not be written to .*; the newest one"):
        run(folder, make_loader(), epochs=1, log_every=1, trackers=[Fills()])
    assert steps == [1, 2, 3, 4, 5, 6]
    assert "could not be written" in caplog.text and "The run goes on." in caplog.text
    kept = eqxshard.Checkpointer(folder).steps()
    assert kept and kept[-1] <= 3
    # With space again, saving goes on.
    filler.unlink()
    restored = eqxshard.Checkpointer(folder).restore(
        eqxshard.abstract_state(
            Layers,
            OPTIM,
            key=jax.random.key(0),
            mesh=make_mesh(),
            rule=eqxshard.replicate(),
        )
    )
    assert int(restored.step) == kept[-1]
