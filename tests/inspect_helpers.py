"""A small model with arrays of many kinds, and the rule that it is explained by."""

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import eqxshard


class Model(eqx.Module):
    """Weights, one without a bias, a key, a NumPy array and a function."""

    layers: list[eqx.nn.Linear]
    key: jax.Array
    table: np.ndarray
    activation: object = jax.nn.relu

    def __init__(self):
        self.layers = [
            eqx.nn.Linear(6, 8, key=jax.random.key(0)),
            eqx.nn.Linear(8, 3, use_bias=False, key=jax.random.key(1)),
        ]
        self.key = jax.random.key(2)
        self.table = np.arange(9, dtype=np.int16)


def user_rule(path, leaf, mesh):
    """Claims one bias."""
    return P("data") if path == "layers.0.bias" else None


RULE = eqxshard.first_match(
    eqxshard.by_path({r"[a-z]+\.1": P(None, "fsdp")}), user_rule, eqxshard.fsdp(min_size=2)
)


def make_mesh():
    """Eight devices, two by four."""
    return eqxshard.make_mesh(data=2, fsdp=4)
