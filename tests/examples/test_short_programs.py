"""The programs of the page "Short programs", shortened, equal plain Equinox."""

from pathlib import Path

import equinox as eqx
import jax
import numpy as np
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


@pytest.mark.parametrize("title", PROGRAMS)
def test_a_program_has_40_lines_at_most(title):
    lines = PROGRAMS[title].splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 92


def batches(loader, source, steps):
    return [source.gather(loader.rows(step)) for step in range(steps)]


def train_batches(names, steps):
    """The batches of the first steps, on the host."""
    return batches(names["loader"], names["points"](512, seed=0), steps)


def new_model(names, make):
    """The model that `init_state` makes."""
    return eqx.filter_jit(make)(names["where"]["key"])


@pytest.mark.thorough
def test_distillation_equals_a_plain_loop():
    names = run("Distillation", ("epochs=10", "epochs=1"), ("epochs=20", "epochs=1"))
    optim, state = names["optim"], names["student"]
    teacher, key = plain_loop.on_one_device((names["teacher"], state.key))
    student = new_model(names, names["classifier"](8))
    expected = plain_loop.train(
        names["distill"], optim, student, None, train_batches(names, 8), key, teacher
    )
    assert_close(state.model, expected.model, 2e-5, 2e-5)
    assert not np.allclose(state.model.layers[0].weight, student.layers[0].weight)


@pytest.mark.thorough
def test_a_gan_of_two_states_equals_a_plain_loop():
    names = run("A GAN: two states", ("steps=300", "steps=3"))
    optim = names["optim"]
    models = {
        name: new_model(
            names, lambda key, size=size: eqx.nn.MLP(*size, width_size=64, depth=2, key=key)
        )
        for name, size in names["sizes"].items()
    }
    opt_states = {name: plain_loop.start(model, optim) for name, model in models.items()}
    keys = plain_loop.on_one_device({n: s.key for n, s in names["states"].items()})
    for number, batch in enumerate(train_batches(names, 3)):
        for name, other in (
            ("discriminator", "generator"),
            ("generator", "discriminator"),
        ):
            key = jax.random.fold_in(keys[name], number)
            loss_fn = names[f"{name}_loss"]
            args = (opt_states[name], batch, key, models[other])
            models[name], _, opt_states[name], _ = plain_loop.step(
                loss_fn, optim, models[name], None, *args
            )
    for name, model in models.items():
        assert_close(names["states"][name].model, model, 2e-5, 2e-5)


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
