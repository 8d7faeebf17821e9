"""Two steps with each optimizer of optax and optax.contrib are those of plain optax."""

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import assert_close, lenient, make_mesh, once
from optax import contrib

import eqxshard

KEY = jax.random.key(0)


class Net(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(8, 16, key=k1)
        self.last = eqx.nn.Linear(16, 8, key=k2)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def make_batch(seed):
    x = np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x)}


def by_layer(params):
    """Labels by attribute."""
    return eqx.tree_at(lambda p: (p.first, p.last), params, ("first", "last"))


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


RATE = 1e-2
ALIASES: dict[str, Any] = {
    name: function
    for module in (optax, contrib)
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and "learning_rate" in inspect.signature(function).parameters
    and not name.startswith(("_", "scale_by", "inject", "apply"))
}
#: Why these are left out.
LEFT_OUT = {
    "optimistic_adam": "deprecated",
    "dpsgd": "needs the gradients of single examples",
    "sophia": "needs the objective itself, and says so",
    "lbfgs": "with its line search, needs the objective itself",
}
WRAPPED: dict[str, optax.GradientTransformation] = {
    "multi_transform": optax.multi_transform(
        {"first": optax.adam(RATE), "last": optax.sgd(RATE, momentum=0.9)}, by_layer
    ),
    "partition": optax.partition(
        {"first": optax.adam(RATE), "last": optax.sgd(RATE)}, by_layer
    ),
    "masked": optax.masked(optax.adam(RATE), matrices),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)),
    "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(RATE))),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
    "apply_if_finite": optax.apply_if_finite(optax.adam(RATE), 3),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(RATE)),
    "flatten": optax.flatten(optax.adam(RATE)),
    "MultiSteps": optax.MultiSteps(
        optax.adam(RATE), every_k_schedule=2
    ).gradient_transformation(),
    "ema": optax.chain(optax.adam(RATE), optax.ema(0.9)),
    "trace": optax.chain(optax.trace(0.9), optax.scale(-RATE)),
    "schedule_free": contrib.schedule_free(optax.sgd(RATE), learning_rate=RATE),
    "sam": contrib.sam(optax.sgd(RATE), contrib.normalize()),
    "mechanize": contrib.mechanize(optax.sgd(RATE)),
    "reduce_on_plateau": optax.chain(optax.sgd(RATE), contrib.reduce_on_plateau()),
    "prodigy": contrib.prodigy(),
    "cocob": contrib.cocob(),
    "noisy_sgd": optax.noisy_sgd(RATE, key=3),
    "lbfgs without line search": optax.lbfgs(RATE, linesearch=None),
}
OPTIMS = {k: v for k, v in ALIASES.items() if k not in LEFT_OUT} | WRAPPED
QUICK = ("adam", "multi_transform", "sam")
#: Of each kind of state: none, factored, counted, projected, with copies, with constants.
SLOW = ("sgd", "adafactor", "muon", "MultiSteps", "lbfgs without line search", "dog")


def plain(optim, steps):
    """The same steps, by hand on one device, in a state like ours."""
    model = Net(KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = optim.init(params)
    extended = optax.with_extra_args_support(optim)
    takes = inspect.signature(extended.update).parameters
    for seed in range(steps):

        def mean(params, batch):
            return jnp.mean(loss_fn(eqx.combine(params, static), batch, None))

        value, grads = jax.value_and_grad(mean)(params, make_batch(seed))
        extra = {"value": value} if "value" in takes or "extra_args" in takes else {}
        updates, opt_state = extended.update(grads, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
    return eqx.combine(params, static)


def train(optim, steps):
    placed: dict[str, Any] = {
        "mesh": make_mesh("data=2,fsdp=4"),
        "rule": eqxshard.fsdp(min_size=1),
    }
    state = eqxshard.init_state(Net, optim, key=KEY, **placed)
    train_step = eqxshard.make_train_step(loss_fn, optim, **placed)
    for seed in range(steps):
        state, _ = train_step(state, make_batch(seed))
    return state.model


@pytest.mark.parametrize("name", graded(OPTIMS, QUICK, SLOW))
def test_two_steps_are_those_of_plain_optax(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        optim = OPTIMS[name]
        if not isinstance(optim, tuple):
            optim = optim(learning_rate=RATE)
        assert_close(train(optim, 2), plain(optim, 2))


class Counted(NamedTuple):
    count: Any
    rate: Any = 0.5
    fresh: Any = True
    scale: Any = None


def counted(init, update):
    """Gradient descent with a state of one's own."""

    def step(updates, state, params=None):
        rate = 0.1 * (state.count + 1)
        return jax.tree.map(lambda g: -rate * g, updates), update(state)

    return lenient(optax.GradientTransformation(lambda params: init, step))


def start(optim):
    placed: dict[str, Any] = {"mesh": make_mesh("data=8"), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(Net, optim, key=KEY, **placed)
    return state, eqxshard.make_train_step(once(loss_fn), optim)


def test_numbers_in_the_state_of_an_optimizer_change():
    first = Counted(0, scale=np.ones(2))
    optim = counted(
        first, lambda s: Counted(s.count + 1, s.rate * 0.5, ~s.fresh, 2 * s.scale)
    )
    state, train_step = start(optim)
    for seed in range(3):
        state, _ = train_step(state, make_batch(seed))
    found = jax.tree.map(np.asarray, state.opt_state)
    assert (found.count, found.rate, found.fresh) == (3, 0.5**4, False)
    np.testing.assert_array_equal(found.scale, [8, 8])
    by_hand = eqx.tree_at(lambda s: s.opt_state.count, state, 0)
    with pytest.raises(
        ValueError, match=r"opt_state\.count is 0, and a step changes arrays alone"
    ):
        start(optim)[1](by_hand, make_batch(0))


@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
@pytest.mark.parametrize(
    "first, update, says",
    [
        (
            Counted(0),
            lambda s: Counted(s.count * 0.5),
            r"opt_state\.count float32\[\]",
        ),
        (Counted(0), lambda s: (s.count,), "returned a state of another structure"),
        (Counted(0, "warm"), lambda s: s._replace(rate="up"), "from 'warm' to 'up'"),
        (Counted(0, scale=()), lambda s: s._replace(scale=None), "another structure"),
    ],
)
def test_an_update_changes_only_the_values_of_the_state(first, update, says, nonfinite):
    optim = counted(first, update)
    state, _ = start(optim)
    train_step = eqxshard.make_train_step(loss_fn, optim, nonfinite=nonfinite)
    with pytest.raises(ValueError, match=rf"(?s)the optimizer's update .*{says}.*; "):
        train_step(state, make_batch(0))


def test_an_optimizer_that_takes_any_keywords_gets_the_value_of_the_loss_alone():
    inner, given = optax.sgd(1e-2), list[str]()

    def update(updates, state, params=None, **others):
        given.extend(others)
        return inner.update(updates, state, params)

    optim = optax.GradientTransformationExtraArgs(inner.init, update)
    state, train_step = start(optim)
    train_step(state, make_batch(0))
    assert {*given} == {"value"}


def test_the_guide_lists_what_is_tested():
    page = Path(__file__).parents[2] / "docs/pages/guide/optimizers.md"
    table = page.read_text().split("<!-- optimizers -->")[1].split("**not these**")[0]
    listed = {*re.findall(r"`(\w+)`", table)} - {"optax"}
    assert listed == {*OPTIMS} - {"lbfgs without line search"}
