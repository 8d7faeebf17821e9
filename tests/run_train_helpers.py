"""Runs of the tiny model of `run_script.py`, without a command line."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import optax
import pytest
from helpers import lenient
from run_script import EXAMPLES, TESTS, Line, loss_fn, make_data, metric_fn

import eqxshard
from eqxshard import RunConfig

#: Two epochs of six steps, on two devices.
CONFIG = RunConfig(batch_size=16, devices=2, log_every=2, save_every=4)
STEPS = 12


def make_optim(steps):
    return lenient(optax.adam(optax.linear_schedule(0.01, 0.001, steps)))


def make_sgd(steps):
    return lenient(optax.sgd(0.01))


def train(output, config=CONFIG, **options):
    """A run of the tiny model; options replace what it is given."""
    width = options.pop("width", 8)
    given: dict[str, Any] = {
        "make_model": partial(Line, width),
        "loss_fn": loss_fn,
        "metric_fn": metric_fn,
        "make_optim": make_optim,
        "train_data": make_data(EXAMPLES, 0),
        "eval_data": make_data(TESTS, 1),
        "config": dataclasses.replace(config, output=str(output)),
        "name": "Small",
        "epochs": 2,
    }
    return eqxshard.train(**given | options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two epochs that was never stopped."""
    return train(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of its folder."""
    return Path(shutil.copytree(finished.folder, tmp_path / "copy"))


def saved_steps(folder):
    return eqxshard.Checkpointer(folder / "checkpoints").steps()


def refusal(*args, **options):
    with pytest.raises((ValueError, OSError)) as error:
        train(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)
