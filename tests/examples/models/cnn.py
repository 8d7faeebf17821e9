"""A convolutional classifier of 28x28 images, as in Equinox's example "mnist"."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(3 * 24 * 24, 64, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(64, 32, key=keys[2]),
            jax.nn.relu,
            eqx.nn.Linear(32, 10, key=keys[3]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x: Float[Array, "1 28 28"]) -> Float[Array, "10"]:
        for layer in self.layers:
            x = layer(x)
        return x
