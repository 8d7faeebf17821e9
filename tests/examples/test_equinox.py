"""Equinox's example models, trained over 8 devices, equal a plain Equinox loop.

Losses and weights differ by at most 2e-7, relative to the norm of an array, or by what
rounding explains: ten times the largest change that the plain loop shows when each initial
weight is off by one unit in its last place. Most of that is due to gradients that are zero
but for rounding, such as those of biases before a BatchNorm, which Adam scales up to whole
steps.
"""

import functools as ft
from typing import Any

import jax
import numpy as np
import plain_loop
import pytest
from example_helpers import MODELS_OF_EQUINOX, load_file
from grades import graded
from helpers import RULES, make_mesh
from loop_helpers import Recorder

import eqxshard

STEPS, BATCH_SIZE = 4, 16
MESHES = {"replicate": "data=8", "fsdp": "data=2,fsdp=4"}
QUICK, SLOW = ("stateful",), ("mnist", "rnn")


def setup(name, rule):
    """An example's state, step, loader and source."""
    example = MODELS_OF_EQUINOX[name]
    models = load_file(example.file)
    source = eqxshard.data.ArraySource(example.data(np.random.default_rng(0)))
    mesh = make_mesh(MESHES[rule])
    where: dict[str, Any] = {"mesh": mesh, "rule": RULES[rule]}
    make_model = ft.partial(example.make, models)
    key = jax.random.key(5678)
    state = eqxshard.init_state(make_model, example.optim, key=key, **where)
    train_step = eqxshard.make_train_step(example.loss_fn, example.optim, **where)
    options: Any = {"batch_size": BATCH_SIZE, "remainder": "drop"}
    loader = eqxshard.Loader(source, mesh=mesh, **options)
    return state, train_step, loader, source


def loss_difference(run, other):
    return np.max(np.abs(np.divide(run.losses, other.losses) - 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:When `eqx.nn.BatchNorm")
@pytest.mark.parametrize("name", graded(MODELS_OF_EQUINOX, QUICK, SLOW))
def test_a_model_of_equinox_trains_as_in_a_plain_loop(name):
    example = MODELS_OF_EQUINOX[name]
    runs = {rule: setup(name, rule) for rule in RULES}
    state, _, loader, source = runs["fsdp"]
    model, model_state, key = plain_loop.on_one_device(
        (state.model, state.model_state, state.key)
    )
    batches = [source.gather(loader.rows(step)) for step in range(STEPS)]
    train = ft.partial(plain_loop.train, example.loss_fn, example.optim)
    plain = train(model, model_state, batches, key)
    # What one of them changes is left to chance.
    nudged = [
        train(plain_loop.nudge(model, seed), model_state, batches, key) for seed in range(4)
    ]
    assert len({*plain.losses}) == STEPS
    losses_may = max(2e-7, *(10 * loss_difference(run, plain) for run in nudged))
    changes = [plain_loop.differences(run[1:], plain[1:]).values() for run in nudged]
    weights_may = max(2e-7, *(10 * max(each) for each in changes))

    for rule, (state, train_step, loader, _) in runs.items():
        recorder = Recorder()
        options = {"steps": STEPS, "log_every": 1, "trackers": [recorder]}
        state = eqxshard.fit(state, train_step, loader, **options)
        losses = [values["train/loss"] for _, values in recorder.lines]
        run = plain_loop.Plain(losses, state.model, state.model_state)
        assert loss_difference(run, plain) <= losses_may, rule
        found = plain_loop.differences(run[1:], plain[1:])
        wrong = {path: value for path, value in found.items() if value > weights_may}
        assert not wrong, rule
