"""What gradients are summed in, over examples and devices."""

import functools

import jax
import numpy as np
import optax
import pytest
from grades import graded
from helpers import assert_equal, make_mesh
from summed_gradients import loss_fn, make_batch, make_model

import eqxshard

OPTIM = optax.sgd(1.0)
SPLITS = {
    "data": ("data=8", eqxshard.replicate()),
    "fsdp": ("fsdp=8", eqxshard.fsdp(min_size=64)),
    "both": ("data=2,fsdp=4", eqxshard.fsdp(min_size=64)),
}


def gradients(mesh, rule, precision, **options):
    """The gradients of a step, by name."""
    placed: dict = dict(mesh=make_mesh(mesh), rule=rule)
    state = eqxshard.init_state(
        make_model, OPTIM, key=jax.random.key(0), precision=precision, **placed
    )
    step = eqxshard.make_train_step(loss_fn, OPTIM, **placed, **options)
    return step(state, make_batch())[0].model


@functools.cache
def in_float32():
    return gradients("data=1", eqxshard.replicate(), None)


@pytest.mark.parametrize("accumulate", graded([1, 2], [1]))
@pytest.mark.parametrize("split", graded(SPLITS, ["both"], ["data"]))
def test_sums_in_float32_are_exact(split, accumulate):
    precision = eqxshard.Precision("bfloat16")
    mesh, rule = SPLITS[split]
    found = gradients(mesh, rule, precision, accumulate=accumulate)
    assert_equal(found, in_float32())


def test_sums_in_bfloat16_are_rounded():
    precision = eqxshard.Precision("bfloat16", reduce="bfloat16")
    found = gradients("data=8", eqxshard.replicate(), precision)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(in_float32()))
    for one, other in pairs:
        one, other = np.asarray(one), np.asarray(other)
        error = np.abs(one - other).max() / np.abs(other).max()
        assert 1e-4 < error < 2e-2
