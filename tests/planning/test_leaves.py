import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from helpers import lenient
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.planning._leaves import plan_leaves, stored_gradients


class Model(eqx.Module):
    up: jax.Array
    scale: jax.Array
    table: jax.Array

    def __init__(self, key):
        self.up = jax.random.normal(key, (8, 16))
        self.scale = jnp.ones(8)
        self.table = jnp.zeros((4, 2), jnp.int32)


RULES = {"up": P(("data", "fsdp"), "tensor"), "scale": P("fsdp"), "table": P()}


def leaves(optim, rule=None, trainable=True):
    state = eqxshard.abstract_state(
        Model,
        optim,
        key=jax.random.key(0),
        mesh=eqxshard.make_mesh(data=4, fsdp=2),
        rule=eqxshard.by_path(RULES) if rule is None else rule,
        trainable=trainable,
    )
    return {leaf.path: leaf for leaf in plan_leaves(state, stored_gradients(state))}


def sizes(leaf):
    return leaf.bytes, leaf.gradient, leaf.optimizer


def test_bytes_are_those_of_one_device():
    found = leaves(lenient(optax.adam(1e-3)))
    assert sizes(found["up"]) == (64, 64, 128) and found["up"].total == 256
    assert sizes(found["scale"]) == (16, 16, 32)
    assert sizes(found["table"]) == (32, 0, 0)
    up = found["up"]
    assert (up.shape, up.dtype, found["table"].dtype) == ((8, 16), "float32", "int32")


def test_specs_name_the_axes_that_split_something():
    found = leaves(optax.sgd(0.1))
    assert [found[name].spec for name in RULES] == ["data+fsdp, None", "fsdp", "whole"]


def test_what_is_frozen_has_neither_gradient_nor_optimizer_state():
    trainable = Model(jax.random.key(0))
    trainable = jax.tree.map(lambda _: False, trainable)
    trainable = eqx.tree_at(lambda model: model.up, trainable, replace=True)
    found = leaves(lenient(optax.adam(1e-3)), trainable=trainable)
    assert sizes(found["scale"]) == (16, 0, 0) and sizes(found["up"]) == (64, 64, 128)


def test_gradients_may_be_split_unlike_their_parameters():
    rule = eqxshard.zero1(min_size=1)
    up = leaves(lenient(optax.adam(1e-3)), rule)["up"]
    assert (up.spec, up.bytes) == ("whole", 512)
    assert up.gradient < 512 and up.optimizer == 2 * up.gradient


def test_they_are_all_that_the_plan_counts(plan):
    memory = plan.memory
    assert sum(leaf.bytes for leaf in plan.leaves) == memory.parameters
    assert sum(leaf.gradient for leaf in plan.leaves) == memory.gradients
    counters = memory.optimizer - sum(leaf.optimizer for leaf in plan.leaves)
    assert 0 <= counters <= 8
