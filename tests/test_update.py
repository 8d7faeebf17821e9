"""What a step computes beyond a plain model: frozen parts, state, ZeRO, clipping."""

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
    arrays,
    assert_close,
    assert_equal,
    lenient,
    make_batch,
    make_mesh,
    part,
    squared_errors,
)
from jax.sharding import PartitionSpec as P

import eqxshard

KEY = jax.random.key(0)
OPTIM = lenient(optax.adam(1e-2))
MESHES = [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")]


def train(make_model, loss_fn, mesh, rule, *, optim=OPTIM, steps=3, batch=None, **options):
    """The losses of some steps, the state after them, and the step."""
    placed: dict = dict(mesh=make_mesh(mesh), rule=RULES.get(rule, rule))
    kept = {name: options[name] for name in ("trainable",) if name in options}
    state = eqxshard.init_state(make_model, optim, key=KEY, **placed, **kept)
    train_step = eqxshard.make_train_step(loss_fn, optim, **placed, **options)
    losses = []
    for seed in range(steps):
        state, metrics = train_step(state, batch or make_batch(seed=seed))
        losses.append(metrics.compute()["loss"])
    return losses, state, train_step


# Frozen parameters


def only_last(make_model=Model):
    """A filter spec: the last layer is trained."""
    model = eqx.filter_eval_shape(make_model, KEY)
    frozen = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda model: model.last, frozen, replace=True)


@pytest.mark.parametrize("mesh, rule", MESHES)
def test_what_is_frozen_stays_as_it_is_and_has_no_optimizer_state(mesh, rule):
    _, state, _ = train(Model, squared_errors, mesh, rule, trainable=only_last())
    fresh = Model(KEY)
    assert_equal(state.model.first, fresh.first)
    for new, old in zip(jax.tree.leaves(state.model.last), jax.tree.leaves(fresh.last)):
        assert np.all(np.asarray(new) != np.asarray(old))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sorted(leaf.shape for leaf in moments) == [(4,), (4,), (4, 32), (4, 32)]


def test_the_rest_is_trained_as_if_the_frozen_part_were_a_constant():
    fixed = Model(KEY)

    def loss_fn(last, batch, key):
        return squared_errors(eqx.tree_at(lambda m: m.last, fixed, last), batch, key)

    losses, state, _ = train(
        Model, squared_errors, "data=8", "replicate", trainable=only_last()
    )
    alone, expected, _ = train(lambda key: Model(key).last, loss_fn, "data=1", "replicate")
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert_close(state.model.last, expected.model)


def test_functions_of_leaves_say_what_is_trained():
    matrices = lambda leaf: eqx.is_array(leaf) and leaf.ndim == 2  # noqa: E731
    _, state, _ = train(Model, squared_errors, "data=1", "replicate", trainable=matrices)
    fresh = Model(KEY)
    assert_equal(state.model.first.bias, fresh.first.bias)
    assert np.any(np.asarray(state.model.first.weight) != np.asarray(fresh.first.weight))


def test_a_spec_for_another_model_is_refused():
    with pytest.raises(
        ValueError, match=r"trainable is not a prefix of the model; make it"
    ):
        train(Model, squared_errors, "data=1", "replicate", trainable={"last": True})


def test_a_step_of_another_spec_is_refused():
    _, state, _ = train(Model, squared_errors, "data=1", "replicate", steps=1)
    other = eqxshard.make_train_step(
        squared_errors,
        OPTIM,
        mesh=make_mesh("data=1"),
        rule=RULES["replicate"],
        trainable=only_last(),
    )
    with pytest.raises(ValueError, match="use the optimizer, and trainable=, that"):
        other(state, make_batch())


# Models with state


class Normed(eqx.Module):
    # What comes before a BatchNorm needs no bias: its gradient would be noise.
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(8, 32, use_bias=False, key=k1)
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        self.last = eqx.nn.Linear(32, 4, key=k2)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.gelu(x)), state


make_normed = eqx.nn.make_with_state(Normed)


def predict(pair, x):
    model, state = pair
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return run(x, state)


def normed_errors(pair, batch, key):
    out, state = predict(pair, batch["x"])
    return jnp.sum((out - batch["y"]) ** 2, axis=-1), state


@pytest.fixture(scope="module")
def normed():
    runs = {mesh: train(make_normed, normed_errors, mesh, rule) for mesh, rule in MESHES}
    return {mesh: (losses, state) for mesh, (losses, state, _) in runs.items()}


def test_batch_norm_takes_its_statistics_over_the_whole_batch(normed):
    (one, state_one), (eight, state_eight) = normed.values()
    np.testing.assert_allclose(one, eight, rtol=1e-5)
    assert_close(state_one.model_state, state_eight.model_state)
    assert_close(state_one.model, state_eight.model, rtol=1e-4)
    # By hand, after the first step.
    model, _ = make_normed(KEY)
    hidden = make_batch()["x"] @ np.asarray(model.first.weight).T
    _, state, _ = train(make_normed, normed_errors, "data=8", "replicate", steps=1)
    _, mean, variance = jax.tree.leaves(state.model_state)
    np.testing.assert_allclose(mean, 0.01 * hidden.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, 0.99 + 0.01 * hidden.var(0), rtol=1e-4, atol=1e-6)


def test_evaluation_uses_the_running_statistics(normed):
    _, state = normed["data=2,fsdp=4"]

    def metric_fn(pair, batch):
        return {"loss": jnp.sum((predict(pair, batch["x"])[0] - batch["y"]) ** 2, axis=-1)}

    eval_step = eqxshard.make_eval_step(
        metric_fn, mesh=make_mesh("data=2,fsdp=4"), rule=RULES["fsdp"]
    )
    batch = make_batch(seed=9)
    # A batch of one kind: with its own statistics it would be another loss.
    batch["x"] += 3
    pair = (state.model, state.model_state)
    found = eval_step(pair, batch).compute()["loss"]
    host = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, pair)
    inference = eqx.nn.inference_mode(host[0])
    out = jax.vmap(lambda x: inference(x, host[1])[0], axis_name="batch")(batch["x"])
    expected = float(np.mean(np.sum((np.asarray(out) - batch["y"]) ** 2, axis=-1)))
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_state_goes_through_the_parts_of_a_batch_in_turn():
    batch = make_batch()
    _, state, _ = train(
        make_normed,
        normed_errors,
        "data=2",
        "replicate",
        accumulate=2,
        steps=1,
        batch=batch,
    )
    model, expected = make_normed(KEY)
    # Part i is every second row from row i: no row leaves its device.
    for i in range(2):
        _, expected = predict((model, expected), batch["x"][i::2])
    assert_close(state.model_state, expected)


def test_a_skipped_step_keeps_the_state_too():
    placed: dict = dict(mesh=make_mesh("data=2"), rule=RULES["replicate"])
    state = eqxshard.init_state(make_normed, OPTIM, key=KEY, **placed)
    train_step = eqxshard.make_train_step(normed_errors, OPTIM, **placed)
    before = arrays((state.model, state.opt_state, state.model_state))
    batch = make_batch()
    batch["x"][3, 3] = np.nan
    state, metrics = train_step(state, batch)
    assert int(metrics.nonfinite) == 1
    after = arrays((state.model, state.opt_state, state.model_state))
    for path, array in before.items():
        np.testing.assert_array_equal(after[path], array, err_msg=path)


class Counter(eqx.Module):
    seen: eqx.nn.StateIndex
    last: eqx.nn.Linear

    def __init__(self, key):
        self.seen = eqx.nn.StateIndex(jnp.zeros(()))
        self.last = eqx.nn.Linear(8, 4, key=key)


def test_state_may_be_set_outside_of_vmap():
    def loss_fn(pair, batch, key):
        model, state = pair
        state = state.set(model.seen, state.get(model.seen) + jnp.sum(batch["x"]))
        errors = jax.vmap(model.last)(batch["x"]) - batch["y"]
        return jnp.sum(errors**2, axis=-1), state

    make_model, batch = eqx.nn.make_with_state(Counter), make_batch()
    _, state, _ = train(make_model, loss_fn, "data=8", "replicate", batch=batch, steps=2)
    (seen,) = jax.tree.leaves(state.model_state)
    np.testing.assert_allclose(seen, 2 * batch["x"].sum(), rtol=1e-4)


def test_a_loss_function_that_forgets_the_state_is_told():
    def loss_fn(pair, batch, key):
        return normed_errors(pair, batch, key)[0]

    with pytest.raises(
        TypeError, match=r"return \(losses, state\) or \(losses, metrics, st"
    ):
        train(make_normed, loss_fn, "data=1", "replicate")


def test_fit_hands_the_pair_to_the_evaluation():
    placed: dict = dict(mesh=make_mesh("data=1"), rule=RULES["replicate"])
    state = eqxshard.init_state(make_normed, OPTIM, key=KEY, **placed)
    train_step = eqxshard.make_train_step(normed_errors, OPTIM, **placed)
    source = eqxshard.data.ArraySource(make_batch(64))
    loader = eqxshard.Loader(source, batch_size=32, mesh=placed["mesh"])
    seen = []

    def evaluate(pair):
        model, model_state = pair
        seen.append((type(model), type(model_state)))
        return {}

    eqxshard.fit(state, train_step, loader, epochs=1, evaluate=evaluate)
    assert seen == [(Normed, eqx.nn.State)]


# Gradients and optimizer state elsewhere than the parameters


@pytest.mark.parametrize("options", [{}, {"accumulate": 4}])
def test_zero1_trains_as_one_device_does(options):
    given: dict = dict(steps=5, **options)
    one, state_one, _ = train(Model, squared_errors, "data=1", "replicate", **given)
    rule = eqxshard.zero1(min_size=1)
    many, state, train_step = train(Model, squared_errors, "data=8", rule, **given)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert_close(state.model, state_one.model)
    assert state.model.first.weight.sharding.spec == P()
    moments = state.opt_state[0]
    assert part(moments.mu.first.weight) == part(moments.nu.first.weight) == (4, 8)
    text: Any = train_step.lower(state, make_batch()).compile().as_text()
    # The updated parts are gathered, and nothing else; the last bias has but 4 elements.
    assert sum(text.count(f" {name}(") for name in ("all-gather", "all-gather-start")) == 3


def test_zero1_keeps_what_was_where_a_step_is_skipped():
    rule = eqxshard.zero1(min_size=1)
    _, state, train_step = train(Model, squared_errors, "data=8", rule, steps=1)
    before = arrays((state.model, state.opt_state))
    batch = make_batch()
    batch["x"][3, 3] = np.inf
    state, metrics = train_step(state, batch)
    assert int(metrics.nonfinite) == 1
    for path, array in arrays((state.model, state.opt_state)).items():
        np.testing.assert_array_equal(array, before[path], err_msg=path)


@pytest.mark.parametrize("returned", [3, 0])
def test_a_loss_function_that_returns_too_much_or_little_is_told(returned):
    def loss_fn(model, batch, key):
        return (squared_errors(model, batch, key),) * returned

    with pytest.raises(TypeError, match=f"returned {returned} things besides a model's st"):
        train(Model, loss_fn, "data=1", "replicate", steps=1)


@pytest.mark.parametrize(
    "rule", [RULES["fsdp"], eqxshard.zero1(min_size=1, axis=("data", "fsdp"))]
)
def test_the_norm_that_clips_is_that_of_the_whole_gradient(rule):
    optim = lenient(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)))
    one = train(Model, squared_errors, "data=1", "replicate", optim=optim)
    many = train(Model, squared_errors, "data=2,fsdp=4", rule, optim=optim)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    assert_close(many[1].model, one[1].model)
    # It did clip.
    _, state, _ = train(Model, squared_errors, "data=2,fsdp=4", rule, optim=optim, steps=1)
    change = jax.tree.map(
        lambda new, old: np.asarray(new) - np.asarray(old),
        *(eqx.filter(model, eqx.is_inexact_array) for model in (state.model, Model(KEY))),
    )
    assert float(optax.tree.norm(change)) == pytest.approx(0.05, rel=1e-4)
