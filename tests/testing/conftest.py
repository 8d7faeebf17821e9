"""A train step on a state that is split over devices."""

from typing import Any

import jax
import pytest
from helpers import RULES, make_batch, make_mesh
from invariance_helpers import SGD, Affine, squares

import eqxshard


@pytest.fixture(scope="package")
def split():
    """A state, its step, and a batch."""
    mesh, rule = make_mesh("data=2,fsdp=4"), RULES["fsdp"]
    options: Any = {"mesh": mesh, "rule": rule}
    state = eqxshard.init_state(Affine, SGD, key=jax.random.key(0), **options)
    return state, eqxshard.make_train_step(squares, SGD, **options), make_batch()
