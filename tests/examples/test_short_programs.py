"""The programs of the page "Short programs", shortened, equal plain Equinox."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from helpers import assert_close
from loop_helpers import Recorder
from test_readme import program_blocks

import eqxshard

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "guide" / "short-programs.md"
SHARED, *BLOCKS = program_blocks(PAGE)


def heading(block):
    above = PAGE.read_text().splitlines()[: block.line]
    return next(line[3:] for line in reversed(above) if line.startswith("## "))


PROGRAMS = {heading(block): block.text for block in BLOCKS}


def run(title, *changes, **given):
    """The names of a program after it ran with some of its text changed."""
    text = PROGRAMS[title]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    names = {**given}
    exec(compile(SHARED.text, str(PAGE), "exec"), names)
    exec(compile(text, str(PAGE), "exec"), names)
    return names


def batches(loader, source, steps):
    return [source.gather(loader.rows(step)) for step in range(steps)]


def train_batches(names, steps):
    """The batches of the first steps, on the host."""
    return batches(names["loader"], names["points"](512, seed=0), steps)


def new_model(names, make):
    """The model that `init_state` makes."""
    return eqx.filter_jit(make)(names["where"]["key"])


def test_a_confusion_matrix_counts_each_example_once():
    names = run("A confusion matrix", ("epochs=10", "epochs=1"))
    everything = names["points"](250, seed=1).gather(np.arange(250))
    model = plain_loop.on_one_device(names["state"].model)
    predicted = np.argmax(jax.vmap(model)(everything["x"]), axis=-1)
    expected = np.zeros((4, 4), int)
    np.add.at(expected, (everything["label"], predicted), 1)
    np.testing.assert_array_equal(names["counts"], expected)
    assert 100 < expected.trace() < 250


def test_a_target_network_equals_a_plain_loop():
    shorter = ("range(600)", "range(5)"), ("step % 30", "step % 2")
    names = run("DQN: a target network", *shorter)
    optim, state = names["optim"], names["state"]
    model = new_model(names, lambda key: eqx.nn.MLP(8, 2, 32, 1, key=key))
    target, opt_state = model, plain_loop.start(model, optim)
    key = plain_loop.on_one_device(state.key)
    rng = np.random.default_rng(0)
    for number in range(5):
        target = model if number % 2 == 0 else target
        batch = names["memory"][rng.integers(number + 1)]
        args = (opt_state, batch, jax.random.fold_in(key, number), target)
        model, _, opt_state, _ = plain_loop.step(
            names["td_loss"], optim, model, None, *args
        )
    assert_close(state.model, model, 2e-5, 2e-5)


@pytest.mark.slow
def test_the_averaged_weights_are_measured():
    recorder = Recorder()
    changes = ("epochs=20", "epochs=2"), ("=80", "=8"), ("[Compare()]", "[recorder]")
    names = run("The average of the weights", *changes, recorder=recorder)
    optim, loss_fn = optax.sgd(0.5), names["loss_fn"]
    model = average = new_model(names, names["classifier"](32))
    opt_state = plain_loop.start(model, optim)
    for number, batch in enumerate(train_batches(names, 16)):
        args = opt_state, batch, names["where"]["key"]
        model, _, opt_state, _ = plain_loop.step(loss_fn, optim, model, None, *args)
        keep = min(0.98, (1 + number) / (10 + number))
        average = jax.tree.map(
            lambda a, w, keep=keep: keep * a + (1 - keep) * w if eqx.is_array(w) else w,
            average,
            model,
        )
    assert_close(eqxshard.ema_model(names["state"]), average)
    everything = names["points"](250, seed=1).gather(np.arange(250))
    loss = float(jnp.mean(loss_fn(average, everything, None)))
    *_, (last, values) = recorder.lines
    assert last == 16 and values["ema/loss"] == pytest.approx(loss, rel=1e-5)
    assert values["eval/loss"] != pytest.approx(loss, rel=1e-3)


@pytest.mark.slow
def test_early_stopping_restores_the_best(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run("Early stopping, the best restored")
    recorder = Recorder()
    state = eqxshard.fit(
        eqxshard.init_state(names["classifier"](64), names["optim"], **names["where"]),
        eqxshard.make_train_step(names["loss_fn"], names["optim"]),
        names["loader"],
        steps=int(names["state"].step),
        evaluate=names["evaluate"],
        trackers=[recorder],
    )
    losses = {step: v["eval/loss"] for step, v in recorder.lines if "eval/loss" in v}
    assert min(losses, key=losses.__getitem__) == int(names["best"].step)
    assert_close(state.model, names["state"].model, 0, 0)
