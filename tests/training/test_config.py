from typing import Any

import jax.numpy as jnp
import optax
import pytest
from helpers import make_mesh, squared_errors

import eqxshard


def make_step(**options):
    return eqxshard.make_train_step(
        squared_errors,
        optax.sgd(0.1),
        mesh=make_mesh(),
        rule=eqxshard.replicate(),
        **options,
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"nonfinite": "stop"}, "nonfinite='stop' is not 'skip', 'raise' or 'ignore'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, unannotated):
    with pytest.raises(ValueError, match=message):
        make_step(**options)


def test_an_optimizer_that_was_not_called_is_refused(unannotated):
    options: dict = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    optim: Any
    for optim, remedy in ((optax.sgd, r"call it, as sgd\(1e-3\)"), (3, "use optax.adamw")):
        with pytest.raises(TypeError, match=f"is not an optax optimizer; {remedy}"):
            eqxshard.make_train_step(squared_errors, optim, **options)


@pytest.mark.parametrize("nonfinite", ["raise", "ignore"])
def test_float16_must_skip_steps_that_are_not_finite(nonfinite):
    with pytest.raises(ValueError, match=r"use 'skip', or bfloat16"):
        make_step(nonfinite=nonfinite, precision=eqxshard.Precision(jnp.float16))


def test_a_step_knows_its_settings():
    config = make_step(accumulate=2).config
    assert (config.accumulate, config.nonfinite, config.precision) == (2, "skip", None)
    assert config.loss_fn is squared_errors
