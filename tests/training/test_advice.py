"""The notes on errors of a user's loss and metric functions, and their tracebacks."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxshard
from eqxshard.compiled._causes import is_ours
from eqxshard.training._advice import short_traceback, traceback_steps

CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
BATCH = "The batch was: image float32[8,4], label {}."


class Model(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self, key):
        self.layer = eqx.nn.Linear(4, 3, key=key)

    def __call__(self, x):
        return self.layer(x)


def loss_fn(model, batch, key=None):
    return CROSS_ENTROPY(jax.vmap(model)(batch["image"]), batch["label"])


def no_vmap(model, batch, key=None):
    return CROSS_ENTROPY(model(batch["image"]), batch["label"])


def filtered(model, batch, key=None):
    return eqx.filter_vmap(model)(batch["image"].T)


def one_key(model, batch, key=None):
    key = jax.random.key(0) if key is None else key
    return jax.vmap(lambda x, key: model(x))(batch["image"], key)


def no_key(model, batch, key=None):
    return jax.vmap(eqx.nn.Dropout(0.5))(batch["image"]).sum(-1)


def other_dtype(model, batch, key=None):
    return Halves(model.layer)(batch["image"])


class Halves(Model):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return jax.lax.scan(lambda x, _: (x.astype("bfloat16"), 0), x, None, length=2)[0]


def wrong_key(model, batch, key=None):
    return jax.vmap(model)(batch["images"])


CLASSES = np.zeros(8, np.int32)
MISTAKES = {
    "float labels": (loss_fn, CLASSES.astype("f"), "write labels.astype(jnp.int32)."),
    "one-hot": (loss_fn, np.eye(8, 3, dtype="f"), "use optax.softmax_cross_entropy("),
    "a column": (loss_fn, CLASSES[:, None], "shape (8, 1); write labels[..., 0]."),
    "no vmap": (no_vmap, CLASSES, "Model got the whole batch; if it takes one example"),
    "a key": (
        wrong_key,
        CLASSES,
        "no 'images'; did you mean 'image'? it has image, label.",
    ),
    "one key": (one_key, CLASSES, "own: jax.vmap(model)(x, jax.random.split(key, len(x)))"),
    "no key": (no_key, CLASSES, "loss_fn gets one key; give each example its own: "),
    "another": (filtered, CLASSES, None),
    "another dtype": (other_dtype, CLASSES, None),
}


OPTIM = optax.sgd(0.1)
IMAGES = {"image": jnp.ones((8, 4)), "label": CLASSES}


def start():
    where = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
    return eqxshard.init_state(Model, OPTIM, key=jax.random.key(0), **where)


def raised(fn, batch=IMAGES, error: Any = Exception, match=None):
    """What a train step of a loss function raises."""
    with pytest.raises(error, match=match) as caught:
        eqxshard.make_train_step(fn, OPTIM)(start(), batch)
    return caught.value


def notes(error):
    return getattr(error, "__notes__", [])


def files(error):
    """The files of a traceback, without those of the type checks in tests."""
    found = [step.tb_frame.f_code.co_filename for step in traceback_steps(error)]
    return [file for file in found if "beartype" not in file and "jaxtyping" not in file]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_an_error_says_what_the_batch_was_and_what_to_do(kind, mistake):
    fn, labels, advice = MISTAKES[mistake]
    batch = {"image": jnp.ones((8, 4)), "label": jnp.asarray(labels)}
    kinds = TypeError, ValueError, KeyError, RuntimeError
    if kind == "train":
        error = raised(fn, batch, kinds)
    else:
        eval_step = eqxshard.make_eval_step(lambda *args: {"loss": fn(*args)})
        with pytest.raises(kinds) as caught:
            eval_step(start().model, batch)
        error = caught.value
    label = f"{labels.dtype}[{','.join(map(str, labels.shape))}]"
    # JAX's own note, of the frames that it hides, comes last.
    first, *more = [note for note in notes(error) if "JAX" not in note]
    assert first == BATCH.format(label)
    assert [advice in note for note in more] == [True] if advice else more == []
    assert error.__cause__ is None
    # The test, the step's call, its machine, and the function.
    assert [*map(is_ours, files(error))][:4] == [False, True, True, False]


def test_an_error_of_this_library_is_left_as_it_is():
    def weighted(model, batch, key):
        return loss_fn(model, batch).mean()

    batch = IMAGES | {"__weight__": jnp.ones(8)}
    error = raised(weighted, batch, ValueError, "one number for the batch")
    assert not any("batch was" in note for note in notes(error))
    # The test, the step's call, its machine, and what raises. (And `raised`.)
    assert [*map(is_ours, files(error))] == [False, True, True, True]


def fails(*, in_users_code):
    """An error below frames that are not the user's."""
    text, hook = ("{}", lambda found: 1 / 0) if in_users_code else ("{", None)
    with pytest.raises((ValueError, ZeroDivisionError)) as caught, short_traceback():
        json.loads(text, object_hook=hook)
    return [Path(file).parent.name for file in files(caught.value)]


def test_only_what_is_above_the_users_code_is_left_out():
    assert fails(in_users_code=True) == ["training", "training"]
    filtering = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        assert "json" in fails(in_users_code=True)
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    # Anybody's bug.
    assert "json" in fails(in_users_code=False)


def test_the_arguments_of_a_loss_function_are_named():
    def two_arguments(model, batch):
        return loss_fn(model, batch)

    def helper(x):
        return x

    def mistaken(model, batch, key):
        return helper(batch, key)  # pyright: ignore[reportCallIssue]

    says = "takes (model, batch, key)"
    error = raised(two_arguments, error=TypeError, match="positional argument")
    assert any(says in note for note in notes(error))
    # A call of the user's own gets no such advice.
    error = raised(mistaken, error=TypeError, match="positional argument")
    assert not any(says in note for note in notes(error))
