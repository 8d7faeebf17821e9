"""Functions of per-device code, and arrays on a mesh of two axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxshard

ROWS = ("data", "fsdp")
MESH = eqxshard.make_mesh(data=2, fsdp=4)


def per_device(
    fn: Any, in_specs: Any, out_specs: Any, mesh: Any = MESH, **kwargs: Any
) -> Any:
    mapped = eqxshard.filter_shard_map(fn, mesh, in_specs, out_specs, **kwargs)
    return eqxshard.filter_jit(mapped)


def place(tree, mesh, min_size=1):
    """A PyTree placed by fsdp(), and its specs."""
    shardings = eqxshard.shardings(tree, mesh, eqxshard.fsdp(min_size=min_size))
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    return eqxshard.filter_shard(tree, shardings), specs


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def one_based_index(axis):
    return (1 + jax.lax.axis_index(axis)).astype(jnp.float32)
