import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh

from eqxshard import testing
from eqxshard.nn import rowwise

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(16, 8)).astype(np.float32)


def perceptron(weight):
    return lambda x: jax.nn.gelu(jnp.einsum("oe,...e->...o", weight, x))


def loss(weight, x):
    return jnp.sum(rowwise(perceptron(weight), x) ** 2)


def by_hand(weight, x):
    return jnp.sum(perceptron(weight)(x) ** 2)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (3, 5, 8), (2, 3, 5, 8), (0, 5, 8)])
def test_is_the_function_itself_and_has_its_gradients(shape):
    x = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    y = jax.jit(lambda x: rowwise(perceptron(WEIGHT), x))(x)
    assert y.shape == (*shape[:-1], 16)
    np.testing.assert_allclose(y, perceptron(WEIGHT)(x), rtol=1e-5, atol=1e-6)
    found, expected = (
        jax.jit(jax.grad(loss, (0, 1)))(WEIGHT, x),
        jax.jit(jax.grad(by_hand, (0, 1)))(WEIGHT, x),
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_the_function_gets_all_rows_as_one_dim():
    shapes = []

    def fn(x):
        shapes.append(x.shape)
        return x

    x = jnp.asarray(RNG.normal(size=(2, 3, 5, 8)), jnp.float32)
    rowwise(fn, x)
    jax.vmap(lambda x: rowwise(fn, x))(x)
    assert shapes == [(30, 8), (15, 8)]


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "context": 2}], ids=str)
def test_rows_stay_where_they_are(axes):
    mesh = make_mesh(**axes)
    x = RNG.normal(size=(4, 6, 8)).astype(np.float32)
    spec = NamedSharding(mesh, P(("data", "fsdp"), "context"))
    placed, weight = (
        jax.device_put(x, spec),
        jax.device_put(WEIGHT, NamedSharding(mesh, P())),
    )
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P()))
        # The gradient of the weight alone is communicated.
        assert set(testing.collectives(step, weight, placed).counts) == {"all-reduce"}
        out = step(weight, placed)
    np.testing.assert_allclose(out, jax.grad(by_hand)(WEIGHT, x), rtol=1e-4, atol=1e-3)
