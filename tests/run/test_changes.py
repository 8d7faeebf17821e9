"""Runs that resume with another batch size, optimizer, model or mesh."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, lenient
from run_helpers import read_lines
from run_script import Line
from run_train_helpers import train

import eqxshard

EXAMPLES, EPOCHS = 90, 4
#: The settings of each start, and the step that stops it: within an epoch, but for
#: the last one.
STARTS = [
    ({"batch_size": 16, "devices": 2}, "adam", 4),
    ({"batch_size": 28, "devices": 2}, "adam", 9),
    ({"batch_size": 28, "devices": 2}, "momentum", 11),
    ({"batch_size": 28, "mesh": "data=2,fsdp=2", "devices": 4}, "momentum", None),
]
RATES = np.random.default_rng(1).normal(size=EXAMPLES).astype(np.float32)


def make_optim(name, steps):
    schedule = optax.linear_schedule(0.05, 0.005, steps)
    optims = {"adam": optax.adam(schedule), "momentum": optax.sgd(schedule, momentum=0.9)}
    return optims[name]


def make_data():
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x[:, :2]), "mark": RATES}


def loss_fn(model, batch, key):
    errors = jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)
    # The mean of random marks tells batches of other examples apart.
    return errors, {"mark": batch["mark"], "count": jnp.ones(len(errors))}


class StopsAfter(eqxshard.callbacks.Callback):
    def __init__(self, step):
        self.last = step

    def after_step(self, loop):
        if loop.step == self.last:
            loop.stop("enough")


def examples_of_steps():
    """The examples of each step, and the last step that each start expects; by hand."""
    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    source = eqxshard.data.ArraySource(make_data())
    loader = eqxshard.Loader(source, batch_size=1, mesh=mesh)
    seen, ends, epoch, place = [], [], 0, 0
    for config, _, stop in STARTS:
        size = config["batch_size"]
        left, later = math.ceil((EXAMPLES - place) / size), EPOCHS - epoch - 1
        ends.append(len(seen) + left + later * math.ceil(EXAMPLES / size))
        while epoch < EPOCHS and len(seen) != stop:
            until = min(place + size, EXAMPLES)
            places = range(epoch * EXAMPLES + place, epoch * EXAMPLES + until)
            seen.append(np.concatenate([loader.rows(i) for i in places]))
            epoch, place = (epoch + 1, 0) if until == EXAMPLES else (epoch, until)
    return seen, ends


def train_by_hand(seen, ends):
    """The parameters after these steps, on one device."""
    model, static = eqx.partition(Line(8, jax.random.key(0)), eqx.is_array)
    data, step = make_data(), 0

    def loss(params, rows):
        batch = {name: array[rows] for name, array in data.items()}
        return jnp.mean(loss_fn(eqx.combine(params, static), batch, None)[0])

    before: str | None = None
    opt_state: Any = None
    for (_, name, stop), end in zip(STARTS, ends):
        optim = lenient(make_optim(name, end))
        if name != before:
            opt_state, before = optim.init(model), name
            # Both optimizers have a schedule, at the same path.
            schedule = optax.ScaleByScheduleState(jnp.int32(step))
            opt_state = (opt_state[0], schedule)
        while step < (stop or end):
            grads = jax.grad(loss)(model, seen[step])
            updates, opt_state = optim.update(grads, opt_state, model)
            model = optax.apply_updates(model, updates)
            step += 1
    return eqx.combine(model, static)


@pytest.mark.slow
def test_a_run_that_changes_its_batches_optimizer_and_mesh(tmp_path, capsys, caplog):
    """It ends like a run by hand with the same examples, in the loader's order."""
    seen, ends = examples_of_steps()
    allowed: dict[str, Any] = {"missing": "init", "unused": "drop"}
    epochs = np.sort(np.concatenate(seen).reshape(EPOCHS, EXAMPLES))
    assert (epochs == np.arange(EXAMPLES)).all()
    said, run = [], None
    for config, name, stop in STARTS:
        run = train(
            tmp_path,
            eqxshard.RunConfig(**config, resume="auto", log_every=1),
            make_optim=lambda steps, name=name: lenient(make_optim(name, steps)),
            loss_fn=loss_fn,
            train_data=eqxshard.data.ArraySource(make_data()),
            metric_fn=None,
            rule=eqxshard.fsdp(min_size=8),
            epochs=EPOCHS,
            callbacks=[StopsAfter(stop)],
            **allowed if name == "momentum" else {},
        )
        said.append(capsys.readouterr().out.splitlines()[0])
    lines = {line["step"]: line for line in read_lines(tmp_path)}
    assert sorted(lines) == [*range(1, ends[-1] + 1)] and len(seen) == ends[-1]
    marks = [lines[step]["train/mark"] for step in sorted(lines)]
    np.testing.assert_allclose(marks, [RATES[rows].mean() for rows in seen], rtol=1e-5)
    assert run is not None
    assert_close(run.state.model, train_by_hand(seen, ends), rtol=1e-5)
    assert "batch_size 16 -> 28" in said[1]
    (changes,) = [x for x in caplog.messages if "was restored with changes" in x]
    assert "initialized 4 (" in changes and "dropped 9 (" in changes
