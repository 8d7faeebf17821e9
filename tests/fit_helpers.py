"""A step for `fit`, and states for it."""

import functools

import jax
import optax
import pytest
from helpers import (
    RULES,
    Model,
    copied,
    lenient,
    make_mesh,
    squared_errors,
)

import eqxshard

OPTIM = lenient(optax.adam(1e-2))
RULE = RULES["replicate"]


@pytest.fixture(scope="module")
def train_step():
    return eqxshard.make_train_step(squared_errors, OPTIM, mesh=make_mesh(), rule=RULE)


@functools.cache
def first_state():
    where = {"mesh": make_mesh(), "rule": RULE}
    return eqxshard.init_state(Model, OPTIM, key=jax.random.key(0), **where)


def new_state():
    return copied(first_state())
