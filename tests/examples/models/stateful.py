"""Layers with state, as in Equinox's example "stateful"."""

import equinox as eqx
import jax
from jaxtyping import Array, Float


class Model(eqx.Module):
    norm1: eqx.nn.BatchNorm
    spectral_linear: eqx.nn.SpectralNorm
    norm2: eqx.nn.BatchNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        linear = eqx.nn.Linear(3, 32, key=keys[0])
        self.norm1 = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
        self.spectral_linear = eqx.nn.SpectralNorm(linear, "weight", key=keys[1])
        self.norm2 = eqx.nn.BatchNorm(32, axis_name="batch", mode="batch")
        self.mlp = eqx.nn.MLP(32, 3, 32, 1, key=keys[2])

    def __call__(self, x: Float[Array, "3"], state: eqx.nn.State):
        x, state = self.norm1(x, state)
        x, state = self.spectral_linear(x, state)
        x, state = self.norm2(jax.nn.relu(x), state)
        return self.mlp(x), state
