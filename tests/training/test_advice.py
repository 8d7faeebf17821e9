"""The notes on errors of a user's loss and metric functions, and their tracebacks."""

import json
import traceback
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxshard
from eqxshard.training._advice import short_traceback

CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
BATCH = "The batch was: image float32[8,4], label int32[8]."
#: The files whose frames are left out.
HIDDEN = tuple(f"{Path(str(x.__file__)).parent}/" for x in (eqxshard, jax, eqx))


class Model(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self, key):
        self.layer = eqx.nn.Linear(4, 3, key=key)

    def __call__(self, x):
        return self.layer(x)


def no_vmap(model, batch, key=None):
    return CROSS_ENTROPY(model(batch["image"]), batch["label"])


def wrong_key(model, batch, key=None):
    return jax.vmap(model)(batch["images"])


def other_key(model, batch, key=None):
    return {}["image"]


MISTAKES: dict[str, Any] = {
    "no vmap": (no_vmap, ["no_vmap", "__call__"], None),
    "a key": (wrong_key, ["wrong_key"], "The batch has no 'images'; did you mean 'image'?"),
    "a key of another dict": (other_key, ["other_key"], None),
}
OPTIM = optax.sgd(0.1)
IMAGES = {"image": jnp.ones((8, 4)), "label": np.zeros(8, np.int32)}


def start():
    where = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
    return eqxshard.init_state(Model, OPTIM, key=jax.random.key(0), **where)


def frames(error):
    """The frames of a traceback, without those of the type checks in tests."""
    found = traceback.extract_tb(error.__traceback__)
    return [x for x in found if "beartype" not in x.filename and "jaxtyp" not in x.filename]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_an_error_says_what_the_batch_was_at_the_users_line(kind, mistake):
    fn, names, advice = MISTAKES[mistake]
    kinds = TypeError, ValueError, KeyError
    if kind == "train":
        step, given = eqxshard.make_train_step(fn, OPTIM), start()
    else:
        step = eqxshard.make_eval_step(lambda *args: {"loss": fn(*args)})
        given: Any = start().model
    with pytest.raises(kinds) as caught:
        step(given, IMAGES)
    error = caught.value
    # JAX's own note, of the frames that it hides, comes last.
    first, *more = [note for note in error.__notes__ if "JAX" not in note]
    assert first == BATCH
    assert [note.startswith(advice) for note in more] == [True] if advice else more == []
    found = [x.name for x in frames(error) if x.filename == __file__]
    assert [name for name in found[1:] if name != "<lambda>"] == names
    ours = [x.name for x in frames(error) if x.filename.startswith(HIDDEN)]
    assert ours == ["__call__"]  # The frame of the step.


def test_an_error_for_users_is_left_as_it_is():
    def weighted(model, batch, key):
        return CROSS_ENTROPY(jax.vmap(model)(batch["image"]), batch["label"]).mean()

    batch = IMAGES | {"__weight__": jnp.ones(8)}
    with pytest.raises(ValueError, match="one number for the batch") as caught:
        eqxshard.make_train_step(weighted, OPTIM)(start(), batch)
    assert not any("batch was" in note for note in caught.value.__notes__)


def fails(call, error: Any = ZeroDivisionError):
    """The names of the functions in a shortened traceback."""
    with pytest.raises(error) as caught, short_traceback():
        call()
    return [frame.name for frame in frames(caught.value)]


def test_frames_of_other_libraries_stay():
    names = fails(lambda: json.loads("{}", object_hook=lambda found: 1 / 0))
    assert names[-1] == "<lambda>" and "raw_decode" in names
    assert "raw_decode" in fails(lambda: json.loads("{"), json.JSONDecodeError)


def test_frames_of_jax_are_left_out_unless_its_filtering_is_off():
    def hidden():
        with pytest.raises(IndexError) as caught, short_traceback():
            eqx.filter_jit(lambda x: x[:, :, None])(jnp.ones(1))
        return [x for x in frames(caught.value) if x.filename.startswith(HIDDEN)]

    assert hidden() == []
    filtering = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert hidden()
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def test_a_mistake_of_this_library_keeps_all_frames(monkeypatch):
    step, state = eqxshard.make_train_step(no_vmap, OPTIM), start()
    monkeypatch.setattr("eqxshard.training._step.flatten_state", int)
    with pytest.raises(TypeError) as caught, short_traceback():
        step(state, IMAGES)
    assert "look_up" in [frame.name for frame in frames(caught.value)]


def test_a_function_of_other_arguments_is_refused():
    def loss_fn(model, batch):
        return batch

    def metric_fn(model, batch, key):
        return {"loss": batch}

    other: Any = metric_fn
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    optim = optax.sgd(0.1)
    placed: dict = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(lambda key: model, optim, key=jax.random.key(0), **placed)
    with pytest.raises(
        TypeError,
        match=r"loss_fn\(model, batch\) is called as loss_fn\(model, batch, key\), which",
    ):
        eqxshard.make_train_step(loss_fn, optim)(state, np.ones((8, 2), np.float32))
    with pytest.raises(
        TypeError,
        match=r"metric_fn\(model, batch, key\) is called as metric_fn\(model, batch\), wh",
    ):
        eqxshard.make_eval_step(other)(state.model, np.ones((8, 2), np.float32))
