import copy
import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import RULES, assert_equal, make_batch, make_mesh
from jax.sharding import PartitionSpec as P
from step_helpers import setup

import eqxshard
from eqxshard.training._state import flatten_state, map_models, step_of


def trained():
    """A state from a step, whose modules are not built yet."""
    state, train_step = setup()
    return train_step(state, make_batch())[0]


LOOKS = {
    "map": lambda state: jax.tree.map(lambda x: x, state),
    "flatten": lambda state: jax.tree.unflatten(
        jax.tree.structure(state), jax.tree.leaves(state)
    ),
    "copy": copy.copy,
    "tree_at": lambda state: eqx.tree_at(lambda s: s.step, state, state.step),
    "partition": lambda state: eqx.combine(*eqx.partition(state, eqx.is_array)),
    "attributes": lambda state: eqxshard.TrainState(
        state.step, state.model, state.opt_state, state.key, made_with=state.made_with
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_a_state_from_a_step_is_a_pytree_like_others(look):
    state = trained()
    seen = LOOKS[look](state)
    assert isinstance(seen, eqxshard.TrainState)
    assert_equal(seen, state)
    assert jax.tree.structure(seen) == jax.tree.structure(state)
    assert int(seen.step) == 1
    assert eqx.tree_equal(seen, state)
    assert repr(seen).startswith("TrainState(\n  step=i32[],\n  model=Model(")


@dataclasses.dataclass
class Whole:
    """A rule that cannot be hashed."""

    axes: list

    def __call__(self, path, leaf, mesh):
        return P()


@pytest.mark.slow
def test_each_state_keeps_its_own_rule_whatever_was_traced_before():
    optim = optax.sgd(0.1)

    def start(rule):
        placed = {"mesh": make_mesh("data=2,fsdp=4"), "rule": rule}
        make_model = lambda key: eqx.nn.Linear(8, 4, key=key)  # noqa: E731
        return eqxshard.init_state(make_model, optim, key=jax.random.key(0), **placed)

    def losses(model, batch, key):
        return jax.vmap(model)(batch["x"])[:, 0] ** 2

    train_step = eqxshard.make_train_step(losses, optim)
    same = jax.jit(lambda state: state)
    for rule in (RULES["fsdp"], RULES["replicate"], Whole(["fsdp"]), Whole([])):
        for change in (same, lambda state: jax.tree.map(lambda x: x, state)):
            state = change(start(rule))
            assert state.made_with.rule is rule
            state, _ = train_step(state, make_batch())
            assert change(state).made_with.rule is rule


def test_a_state_from_a_step_pickles():
    state = trained()
    state = eqx.tree_at(lambda s: s.key, state, jax.random.key_data(state.key))
    model = eqx.filter(state.model, eqx.is_array)
    state = eqx.tree_at(lambda s: s.model, state, model)
    assert_equal(pickle.loads(pickle.dumps(state)), state)


def test_reading_the_step_builds_no_modules():
    state = trained()
    assert int(state.step) == 1 and state._values is None
    assert flatten_state(state)[0][0] is state.step
    assert state.model.last.bias.shape == (4,) and state._values is not None


def test_a_step_or_key_that_is_not_an_array_is_refused(unannotated):
    state = trained()
    broken = eqxshard.TrainState(3, state.model, state.opt_state, state.key)  # pyright: ignore
    with pytest.raises(TypeError, match=r"write jnp\.int32\(0\) and jax\.random\.key\(0\)"):
        flatten_state(broken)


def at_step(step, model="model", model_state=None):
    return eqxshard.TrainState(jnp.int32(step), model, None, jax.random.key(0), model_state)


def test_states_of_a_run_have_taken_the_same_number_of_steps():
    assert step_of(at_step(3)) == 3
    assert step_of({"a": at_step(3), "b": [at_step(3)]}) == 3
    with pytest.raises(ValueError, match=r"but a is at step 3, b\.0 is at step 4; let"):
        step_of({"a": at_step(3), "b": [at_step(4)]})


@pytest.mark.parametrize("other, name", [("model", "str"), ({}, "dict"), ([1.0], "float")])
def test_other_things_than_states_are_refused(other, name):
    with pytest.raises(TypeError, match=f"a {name} is not a TrainState; make one"):
        step_of(other)


def test_models_come_as_user_code_gets_them():
    assert map_models(at_step(1)) == "model"
    assert map_models({"g": at_step(1, "a"), "d": at_step(1, "b")}) == {"g": "a", "d": "b"}
