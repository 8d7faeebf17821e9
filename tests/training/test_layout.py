"""Shardings of training states: the optimizer's follow the parameters', or the host."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from helpers import (
    Model,
    assert_equal,
    lenient,
    make_batch,
    make_mesh,
    needs_new_jax,
    stack,
)
from step_helpers import make

import eqxshard

OPTIM = lenient(optax.adamw(1e-2))
KEY = jax.random.key(0)
INNER = {
    "replicate": eqxshard.replicate(),
    "fsdp": eqxshard.fsdp(min_size=1),
    "zero1": eqxshard.zero1(min_size=1),
    "combine": eqxshard.combine(
        eqxshard.by_path({"last.weight": jax.P("data")}), eqxshard.fsdp(min_size=1)
    ),
}
MESH = "data=2,fsdp=4"
#: The optimizers whose states differ most.
OPTIMIZERS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "partitioned": optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1)},
        lambda tree: jax.tree.map(lambda x: "a" if x.ndim > 1 else "b", tree),
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "lbfgs memory": optax.scale_by_lbfgs(memory_size=3),
}


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_sharded_explicitly(name):
    """Arrays shaped like a parameter are sharded like it, and no array moves in a step."""
    state, train_step = make(MESH, "fsdp", optim=lenient(OPTIMIZERS[name]))
    params = jax.tree_util.tree_leaves_with_path(
        eqx.filter(state.model, eqx.is_inexact_array)
    )
    before = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        for of, param in params:
            if path[-len(of) :] == of and leaf.shape == param.shape:
                assert leaf.sharding == param.sharding, path
        before[path] = leaf.sharding
    state, metrics = train_step(state, make_batch())
    assert np.isfinite(metrics.compute()["loss"])
    after = dict(jax.tree_util.tree_leaves_with_path(state.opt_state))
    assert {path: leaf.sharding for path, leaf in after.items()} == before


# Host memory


def run(rule, many=False, **options):
    state, step = make(MESH, rule, optim=OPTIM, **options)
    batches = [make_batch(seed=i) for i in range(3)]
    if many:
        return step.many(state, stack(batches))[0]
    for batch in batches:
        state, _ = step(state, batch)
    return state


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.shape}


@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize("inner", INNER)
def test_steps_are_the_same_bit_for_bit(inner):
    state = run(eqxshard.offload(INNER[inner]))
    assert_equal(state, run(INNER[inner]))
    assert kinds(state.opt_state) == {"pinned_host"}
    assert kinds(eqx.filter(state.model, eqx.is_array)) == {"device"}


@needs_new_jax
def test_checkpoints_are_restored_to_host_memory(tmp_path):
    rule = eqxshard.offload(INNER["fsdp"])
    state = run(rule)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    like = eqxshard.abstract_state(Model, OPTIM, key=KEY, mesh=make_mesh(MESH), rule=rule)
    restored = checkpointer.restore(like)
    assert kinds(restored.opt_state) == {"pinned_host"}
    assert_equal(restored, state)
