"""`offload`: the optimizer's state in the host's memory, and the same steps."""

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
    squared_errors,
    stack,
)

import eqxshard

#: One release of JAX that we support cannot do it.
OLD = jax.__version_info__ < (0, 10, 2)
new_jax = pytest.mark.skipif(OLD, reason="offload needs JAX 0.10.2 or newer")
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


def run(rule, many=False, **options):
    mesh = make_mesh(MESH)
    state = eqxshard.init_state(Model, OPTIM, key=KEY, mesh=mesh, rule=rule)
    step = eqxshard.make_train_step(squared_errors, OPTIM, mesh=mesh, rule=rule, **options)
    batches = [make_batch(seed=i) for i in range(3)]
    if many:
        return step.many(state, stack(batches))[0]
    for batch in batches:
        state, _ = step(state, batch)
    return state


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.shape}


@new_jax
@pytest.mark.parametrize("inner", INNER)
def test_steps_are_the_same_bit_for_bit(inner):
    state = run(eqxshard.offload(INNER[inner]))
    assert_equal(state, run(INNER[inner]))
    assert kinds(state.opt_state) == {"pinned_host"}
    assert kinds(eqx.filter(state.model, eqx.is_array)) == {"device"}


@new_jax
@pytest.mark.parametrize("options", [{"many": True}, {"accumulate": 2}])
def test_in_loops_too(options):
    rule = INNER["fsdp"]
    assert_equal(run(eqxshard.offload(rule), **options), run(rule, **options))


@new_jax
def test_the_state_is_born_there_and_split_as_before():
    mesh, rule = make_mesh(MESH), INNER["fsdp"]
    there = eqxshard.init_state(
        Model, OPTIM, key=KEY, mesh=mesh, rule=eqxshard.offload(rule)
    )
    here = eqxshard.init_state(Model, OPTIM, key=KEY, mesh=mesh, rule=rule)
    assert kinds(there.opt_state) == {"pinned_host"}
    for ours, theirs in zip(*map(jax.tree.leaves, (there.opt_state, here.opt_state))):
        assert ours.sharding.spec == theirs.sharding.spec
        np.testing.assert_array_equal(ours, theirs)


@new_jax
def test_checkpoints_come_back_to_where_they_were(tmp_path):
    rule = eqxshard.offload(INNER["fsdp"])
    state = run(rule)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    like = eqxshard.abstract_state(Model, OPTIM, key=KEY, mesh=make_mesh(MESH), rule=rule)
    restored = checkpointer.restore(like)
    assert kinds(restored.opt_state) == {"pinned_host"}
    assert_equal(restored, state)


@new_jax
def test_donated_memory_of_the_host_is_used_again():
    mesh, rule = make_mesh(MESH), eqxshard.offload(INNER["fsdp"])
    state = eqxshard.init_state(Model, OPTIM, key=KEY, mesh=mesh, rule=rule)
    step = eqxshard.make_train_step(squared_errors, OPTIM, mesh=mesh, rule=rule)
    old = jax.tree.leaves(state.opt_state)
    step(state, make_batch())
    assert all(leaf.is_deleted() for leaf in old)


@new_jax
def test_a_state_of_another_memory_is_refused():
    mesh, rule = make_mesh(MESH), INNER["fsdp"]
    state = eqxshard.init_state(Model, OPTIM, key=KEY, mesh=mesh, rule=rule)
    step = eqxshard.make_train_step(
        squared_errors, OPTIM, mesh=mesh, rule=eqxshard.offload(rule)
    )
    with pytest.raises(ValueError, match=r"opt_state.* lies as .*; make the state and"):
        step(state, make_batch())


@pytest.mark.parametrize("maker", [eqxshard.combine, eqxshard.first_match])
def test_it_goes_around_all_rules(maker):
    with pytest.raises(ValueError, match=r"write offload\("):
        maker(eqxshard.offload(eqxshard.fsdp()), eqxshard.replicate())


@new_jax
def test_devices_without_such_memory_are_refused(monkeypatch):
    class Device:
        def addressable_memories(self):
            return []

        def __str__(self):
            return "a device"

    local_devices = property(lambda mesh: [Device()])
    monkeypatch.setattr(jax.sharding.Mesh, "local_devices", local_devices)
    tree, rule = {"x": jax.numpy.ones(4)}, eqxshard.offload(eqxshard.replicate())
    with pytest.raises(ValueError, match="needs memory of the kind 'pinned_host'"):
        eqxshard.shardings(tree, make_mesh(MESH), rule)


@new_jax
def test_it_is_explained_by_its_name():
    explained = eqxshard.explain(
        {"x": jax.numpy.ones(4)}, make_mesh(MESH), eqxshard.offload(eqxshard.replicate())
    )
    assert "replicate()" in str(explained)
    assert repr(eqxshard.offload(eqxshard.fsdp())) == "offload(fsdp())"


def test_an_older_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    tree, rule = {"x": jax.numpy.ones(4)}, eqxshard.offload(eqxshard.replicate())
    with pytest.raises(ValueError, match="needs JAX"):
        eqxshard.shardings(tree, make_mesh(MESH), rule)
