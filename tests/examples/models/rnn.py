"""A GRU that classifies sequences, as in Equinox's example "train_rnn"."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class RNN(eqx.Module):
    hidden_size: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: Float[Array, " out"]

    def __init__(self, in_size, out_size, hidden_size, *, key):
        cell_key, linear_key = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=cell_key)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=linear_key)
        self.bias = jnp.zeros(out_size)

    def __call__(self, sequence: Float[Array, "time in"]) -> Float[Array, " out"]:
        start = jnp.zeros(self.hidden_size)
        last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, sequence)
        return jax.nn.sigmoid(self.linear(last) + self.bias)
