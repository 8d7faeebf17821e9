"""Rules applied to small trees, and the dims that rules see."""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import lenient
from jaxtyping import Float

import eqxshard

# Rules


def make_mesh(fsdp=4, tensor=1):
    return eqxshard.make_mesh(fsdp=fsdp, tensor=tensor)


def struct(*shape, dtype=jnp.float32) -> Any:
    """An array without values, for fields that are annotated as arrays."""
    return jax.ShapeDtypeStruct(shape, dtype)


def fsdp(min_size=1, axis="fsdp"):
    return eqxshard.fsdp(min_size=min_size, axis=axis)


class Block(eqx.Module):
    """Annotated fields, a layer, and an array without names."""

    up: Float[jax.Array, "mlp embed"]
    down: Float[jax.Array, "embed mlp"]
    bias: Float[jax.Array, " mlp"]
    norm: eqx.nn.LayerNorm
    table: jax.Array

    def __init__(self, key=None):
        self.up, self.down = jnp.zeros((32, 8)), jnp.zeros((8, 32))
        self.bias, self.norm, self.table = jnp.zeros(32), eqx.nn.LayerNorm(8), jnp.zeros(8)


BLOCK = Block()


def spec_of(rule, *shape, mesh=None, path="w"):
    """The spec that a rule decides for one array."""
    return eqxshard.shardings({path: struct(*shape)}, mesh or make_mesh(), rule)[path].spec


def specs(rule, mesh=None, tree: Any = BLOCK):
    """The spec that a rule decides for each array of a tree, by path."""
    found = eqxshard.shardings(tree, mesh or make_mesh(2, 2), rule)
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x.spec for p, x in leaves}


def error(rule, *shape, path="w", mesh=None):
    """The error of a rule for one array."""
    with pytest.raises(ValueError) as info:
        eqxshard.shardings({path: struct(*shape)}, mesh or make_mesh(), rule)
    return str(info.value)


def opt_specs(rule, mesh=None):
    """The specs of the parameters of a `Block`, and of their moments under Adam."""
    state = eqxshard.init_state(
        Block,
        lenient(optax.adam(0.1)),
        key=jax.random.key(0),
        mesh=mesh or make_mesh(2, 2),
        rule=rule,
    )
    mu = state.opt_state[0].mu
    return (
        {name: getattr(state.model, name).sharding.spec for name in ("up", "down", "bias")},
        {name: getattr(mu, name).sharding.spec for name in ("up", "down", "bias")},
    )


# Dims


def dims(tree):
    """The names of the dims of every array of a PyTree, as rules see them."""
    seen = {}

    def rule(path, leaf, mesh):
        seen[path] = found = leaf.dims
        assert found is None or len(found) == len(leaf.shape), path
        return jax.P()

    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    eqxshard.shardings(tree, mesh, rule)
    return seen


def dims_of(annotation, value):
    """The dims in a module with one field, relative to the field."""
    # Strings in the annotation name definitions of the test's own module.
    caller = sys._getframe(1).f_globals["__name__"]
    found = dims(module(x=annotation, defined_in=caller)(value))
    return {path[2:]: names for path, names in found.items()}


def dims_error(annotation, value):
    """The error about the annotation of a module's field."""
    caller = sys._getframe(1).f_globals["__name__"]
    with pytest.raises(ValueError) as info:
        dims(module(x=annotation, defined_in=caller)(value))
    return str(info.value)


def module(*bases, defined_in=__name__, **annotations):
    """A new class of modules, called Block."""
    namespace = {"__annotations__": annotations, "__module__": defined_in}
    return type("Block", bases or (eqx.Module,), namespace)


def names(text):
    """`"mlp _ embed"` as dims."""
    return (
        text
        if text is None
        else tuple(None if name == "_" else name for name in text.split())
    )


def shapes(make):
    """The result of a function, without allocating the arrays."""
    return eqx.filter_eval_shape(make)
