import jax
import jax.numpy as jnp
import pytest

from eqxshard import TrainState
from eqxshard.training._states import map_models, step_of


def state(step, model="model", model_state=None):
    return TrainState(jnp.int32(step), model, None, jax.random.key(0), model_state)


def test_states_of_a_run_have_taken_the_same_number_of_steps():
    assert step_of(state(3)) == 3
    assert step_of({"a": state(3), "b": [state(3)]}) == 3
    with pytest.raises(ValueError, match=r"but a is at step 3, b\.0 is at step 4; let"):
        step_of({"a": state(3), "b": [state(4)]})


@pytest.mark.parametrize("other, name", [("model", "str"), ({}, "dict"), ([1.0], "float")])
def test_other_things_than_states_are_refused(other, name):
    with pytest.raises(TypeError, match=f"a {name} is not a TrainState; make one"):
        step_of(other)


def test_models_come_as_user_code_gets_them():
    assert map_models(state(1)) == "model"
    assert map_models({"g": state(1, "a"), "d": state(1, "b")}) == {"g": "a", "d": "b"}
