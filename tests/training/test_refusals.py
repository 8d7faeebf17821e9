"""Mistakes that train and eval steps refuse: one table, with the words that matter."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    RULES,
    Model,
    copied,
    make_batch,
    make_loader,
    make_mesh,
    squared_errors,
)
from step_helpers import KEY, OPTIM, mean_of_x

import eqxshard

MESH, REPLICATE = make_mesh("data=2"), RULES["replicate"]
ONES = np.ones(32, np.float32)


class Counter(eqx.Module):
    """A model with state."""

    seen: eqx.nn.StateIndex
    last: eqx.nn.Linear

    def __init__(self, key):
        self.seen = eqx.nn.StateIndex(jnp.zeros(()))
        self.last = eqx.nn.Linear(8, 4, key=key)


def start(make_model: Any = Model, **options):
    placed: dict[str, Any] = {"mesh": MESH, "rule": REPLICATE}
    return eqxshard.init_state(make_model, OPTIM, key=KEY, **placed, **options)


first_state = functools.cache(start)


def step(batch=None, *, loss_fn=squared_errors, optim: Any = OPTIM, state=None, **options):
    train_step = eqxshard.make_train_step(loss_fn, optim, **options)
    train_step(state or copied(first_state()), batch or make_batch())


def loader(mesh):
    return make_loader(placement="device", mesh=mesh)


def several(mesh):
    train_step = eqxshard.make_train_step(squared_errors, OPTIM)
    train_step.many(start(), loader(mesh).stacked(2))


class Foreign:
    """An array of another library, such as a tensor of PyTorch."""

    shape = (32, 8)


def returning(change):
    """A step whose loss function returns something else."""
    step(loss_fn=lambda model, batch, key: change(squared_errors(model, batch, key)))


def stateful(change, batch=None):
    """A step of a model with state, whose loss function returns something else."""

    def loss_fn(pair, batch, key):
        model, state = pair
        losses = jnp.sum(jax.vmap(model.last)(batch["x"]) ** 2, axis=-1)
        return change(losses, state)

    state = start(eqx.nn.make_with_state(Counter))
    step(batch, loss_fn=loss_fn, state=state)


def evaluate(metric_fn, model=None):
    eqxshard.make_eval_step(metric_fn)(model or first_state().model, make_batch())


def other_state():
    """The state of a model with two of its own."""

    class Two(eqx.Module):
        first: Counter
        second: Counter

    make = eqx.nn.make_with_state(lambda key: Two(Counter(key), Counter(key)))
    return make(KEY)[1]


def by_hand():
    state = start()
    return eqxshard.TrainState(state.step, state.model, state.opt_state, state.key)


def without_bias():
    state = start(trainable=eqx.is_array)
    return eqx.tree_at(lambda s: s.model.last.bias, state, None)


FROZEN = jax.tree.map(lambda _: False, eqx.filter_eval_shape(Model, KEY))
LAST = eqx.tree_at(lambda model: model.last, FROZEN, replace=True)
NOTHING: Any = None
HALF = eqxshard.Precision(jnp.float16)
ON_ONE = {name: jax.device_put(x, jax.devices()[0]) for name, x in make_batch().items()}
PADDED = make_batch(weight=ONES)
Mistakes = dict[str, Callable[[], Any]]

#: By the words that matter in the message.
VALUES: Mistakes = {
    r"loss has shape \(32, 1\) for a batch of 32": lambda: returning(lambda x: x[:, None]),
    "No such compile option: 'xla_gpu_speed'": lambda: step(
        compiler_options={"xla_gpu_speed": 9}
    ),
    "names are text, and values text": lambda: step(compiler_options={"xla_gpu_speed": {}}),
    "a metric is named 'loss'": lambda: returning(lambda x: (x, {"loss": x})),
    r"accuracy has shape \(4,\)": lambda: evaluate(lambda *_: {"accuracy": ONES[:4]}),
    "remainder='drop'": lambda: stateful(lambda *out: out, PADDED),
    r"'__weight__' has shape \(32, 1\)": lambda: step(make_batch(weight=ONES[:, None])),
    "batch size 13 does not divide over data=2": lambda: step(make_batch(13)),
    "batch size 0 is not positive": lambda: step(make_batch(0)),
    r"'z': \(\).* same leading dim": lambda: step(make_batch() | {"z": 3.0}),
    "'y': .* the same leading dim": lambda: step(make_batch() | {"y": make_batch(16)["y"]}),
    "the loader's dataset is on .*; make the loader": lambda: several(make_mesh()),
    "accumulate=3 parts; use a multiple of 6": lambda: step(accumulate=3),
    "batch entry x is sharded as .*; make the loader": lambda: step(ON_ONE),
    "not on a mesh; place them": lambda: evaluate(mean_of_x, Model(KEY)),
    "give make_train_step rule=": lambda: step(state=by_hand()),
    "give make_train_step trainable=": lambda: step(state=without_bias()),
    "use the optimizer, and trainable=": lambda: step(optim=optax.sgd(0.1)),
    "optimizer, and trainable=, that": lambda: step(trainable=LAST),
    "trainable is not a prefix": lambda: start(trainable={"last": True}),
    "both with the same precision=": lambda: step(precision=HALF),
    "accumulate=0 must be at least 1": lambda: step(accumulate=0),
    "is not 'skip', 'raise' or 'ignore'": lambda: step(nonfinite="stop"),
    "use 'skip', or bfloat16": lambda: step(precision=HALF, nonfinite="raise"),
    "none is called data or fsdp": lambda: step(mesh=jax.make_mesh((8,), ("dp",))),
    "not a floating-point type": lambda: eqxshard.Precision(jnp.int8),
    "params=None": lambda: eqxshard.Precision(params=NOTHING),
    "must be at least 1 each": lambda: eqxshard.Precision(initial_scale=0.5),
}
TYPES: Mistakes = {
    "entry z is a NumPy array of dtype <U1": lambda: step(
        make_batch() | {"z": np.array(["z"] * 32)}
    ),
    "loss is NoneType; return an array": lambda: returning(lambda x: None),
    "complex64; return an array with one real": lambda: returning(
        lambda x: jax.lax.complex(x, x)
    ),
    "metrics is a float; return a dict": lambda: returning(lambda x: (x, 3.0)),
    "returned 3 values besides": lambda: returning(lambda x: (x, x, x)),
    "metric_fn is an array; return a dict": lambda: evaluate(lambda m, batch: batch["x"]),
    r"return \(losses, state\) or": lambda: stateful(lambda x, state: x),
    "the state that the model returned": lambda: stateful(lambda x, _: (x, other_state())),
    r"entry x is a .*\.Foreign; convert": lambda: step(make_batch() | {"x": Foreign()}),
    "returns batches for several steps; give": lambda: step(loader(MESH).stacked(2)),
    "a Model is not a TrainState": lambda: step(state=Model(KEY)),
    r"takes a model; give it state\.model": lambda: evaluate(mean_of_x, start()),
    r"call it, as sgd\(1e-3\)": lambda: step(optim=optax.sgd),
    "use optax.adamw": lambda: step(optim=3),
    "loss_fn is an optimizer": lambda: eqxshard.make_train_step(
        OPTIM,  # pyright: ignore[reportArgumentType]
        squared_errors,  # pyright: ignore[reportArgumentType]
    ),
}


@pytest.mark.parametrize("words", VALUES)
def test_values_that_are_refused(words, unannotated):
    with pytest.raises(ValueError, match=words):
        VALUES[words]()


@pytest.mark.parametrize("words", TYPES)
def test_types_that_are_refused(words, unannotated):
    with pytest.raises(TypeError, match=words):
        TYPES[words]()


def test_a_step_knows_its_settings_and_takes_a_rule_for_a_state_made_by_hand():
    train_step = eqxshard.make_train_step(squared_errors, OPTIM, rule=REPLICATE)
    config = train_step.config
    assert (config.accumulate, config.nonfinite, config.precision) == (1, "skip", None)
    assert config.loss_fn is squared_errors
    assert int(train_step(by_hand(), make_batch())[0].step) == 1
