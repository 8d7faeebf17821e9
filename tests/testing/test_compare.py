"""Which differences `assert_mesh_invariant` takes for rounding."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, make_batch
from invariance_helpers import Affine, check_invariant, cross_entropies

import eqxshard
from eqxshard.testing._compare import compare


@pytest.mark.parametrize(
    "a, b, absolute, relative",
    [
        ([1.0, 2.0], [1.0, 4.0], 2, 0.5),
        ([1.0, np.inf], [1.0, np.inf], 0, 0),
        ([np.nan], [np.nan], np.inf, np.inf),
        ([np.nan], [1.0], np.inf, np.inf),
        ([0.0], [0.0], 0, 0),
        ([1e-9], [0.0], 1e-9, np.inf),
        # Counts are equal or not.
        ([7], [8], 1, np.inf),
        ([7], [7], 0, 0),
        ([], [], 0, 0),
    ],
)
def test_differences_of_arrays(a, b, absolute, relative):
    found = compare("x", np.asarray(a), np.asarray(b))
    assert found.absolute == pytest.approx(absolute)
    assert found.relative == found.excess == relative


def test_excess_leaves_out_the_allowed_difference():
    a, b = np.array([1.0, 2.0]), np.array([1.5, 4.0])
    assert compare("x", a, b, allowed=np.array([0.0, 2.0])).excess == 0.5 / 4
    assert compare("x", a, b, allowed=2.0).excess == 0
    assert compare("x", a, b, scale=20.0).relative == 2 / 20


class Attending(eqx.Module):
    """The softmax is independent of the bias of the keys: another gradient of rounding."""

    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, 8, use_key_bias=True, key=key)

    def __call__(self, x):
        return self.attention(x, x, x)


@pytest.mark.thorough
def test_updates_that_normalize_a_gradient_of_rounding_are_allowed():
    def loss_fn(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=(1, 2))

    rng = np.random.default_rng(0)
    report = check_invariant(
        make_model=Attending,
        loss_fn=loss_fn,
        batch={name: rng.normal(size=(32, 8, 8)).astype(np.float32) for name in "xy"},
        optim=lenient(optax.lamb(1e-2)),
        steps=4,
    )
    assert report.rows[0].gradients < 2e-6


@pytest.mark.slow
def test_the_default_rtol_is_that_of_the_least_precise_dtype():
    float16 = eqxshard.Precision(compute="float16")
    assert check_invariant(steps=1, precision=float16).rtol == 1e-2

    def make_model(key):
        return jax.tree.map(lambda x: x.astype("bfloat16"), Affine(key))

    batch = jax.tree.map(lambda x: x.astype("bfloat16"), make_batch())
    report = check_invariant(
        make_model=make_model, loss_fn=cross_entropies, batch=batch, steps=1
    )
    assert report.rtol == 2e-2
