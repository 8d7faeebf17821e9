from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import (
    arrays,
    lenient,
    make_batch,
    make_mesh,
    squared_errors,
)
from jax.sharding import PartitionSpec as P
from step_helpers import make, setup, with_nan

import eqxshard
from eqxshard.training import Metrics
from eqxshard.training._guard import all_finite


# The slope of the root at 0 is infinite, so a batch can have a finite loss and a gradient
# that is not. The last term is the other way around.
def rooted(model, batch, key):
    root = jnp.sqrt(jnp.abs(batch["x"][:, 0] * jnp.sum(model.last.bias)))
    far = jnp.where(batch["x"][:, 1] > 100, jnp.inf, 0)
    return squared_errors(model, batch, key) + 0 * root + far


BAD = {
    "nan": with_nan,
    "infinite": lambda batch: {**batch, "y": batch["y"] + np.float32(np.inf)},
    "gradient only": lambda batch: {**batch, "x": 0 * batch["x"]},
    "loss only": lambda batch: {**batch, "x": batch["x"] + np.float32(200)},
}


WHOLE, SPLIT = ("data=8", "replicate"), ("fsdp=8", "fsdp")
SPLITS = graded([WHOLE, SPLIT], [SPLIT], [WHOLE])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mesh, rule", SPLITS)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(mesh, rule, bad):
    state, train_step = setup(mesh, rule, loss_fn=rooted)
    state, _ = train_step(state, make_batch())
    before = arrays((state.model, state.opt_state))
    _, good = train_step(setup(mesh, rule, loss_fn=rooted)[0], make_batch(seed=1))
    state, metrics = train_step(state, BAD[bad](make_batch(seed=1)))
    for path, array in arrays((state.model, state.opt_state)).items():
        np.testing.assert_array_equal(array, before[path], err_msg=path)
    assert int(state.step) == 2
    assert metrics.compute()["nonfinite"] == 1
    both = Metrics.stack([metrics, good]).compute()
    assert both == pytest.approx({**good.compute(), "nonfinite": 1})
    state, metrics = train_step(state, make_batch(seed=2))
    assert "nonfinite" not in metrics.compute()
    assert not np.array_equal(state.model.last.weight, before["[0].last.weight"])


HUGE = optax.chain(optax.scale(1e38), optax.scale(1e38))


def with_a_product():
    """SGD whose update has a matrix product, which a step does not compute twice."""

    def turn(grads, params):
        return jax.tree.map(lambda g: g @ jnp.eye(8) if g.shape[-1] == 8 else g, grads)

    return optax.chain(optax.stateless(turn), HUGE)


# Gradients are finite, and what is made of them is not: a parameter, in the first two; the
# square of a gradient, in the third; a number that the optimizer keeps, in the last.
OVERFLOWS = {
    "a parameter": HUGE,
    "a product": with_a_product(),
    "a division": optax.adam(1e-2, eps=0.0),
    "a square": optax.chain(optax.scale(1e25), optax.scale_by_adam(), optax.scale(0.0)),
    "an average": optax.chain(optax.scale(3e38), optax.trace(2.0), optax.scale(0.0)),
}


@pytest.mark.parametrize("name", OVERFLOWS)
@pytest.mark.parametrize("mesh, rule", SPLITS)
def test_a_step_whose_update_is_not_finite_is_skipped(mesh, rule, name):
    batch = make_batch()
    if name == "a division":
        batch["x"] *= np.arange(8) > 0  # A column of gradients that are 0.
    state, train_step = setup(mesh, rule, optim=lenient(OVERFLOWS[name]))
    before = arrays((state.model, state.opt_state))
    state, _ = train_step(state, batch)
    state, metrics = train_step(state, batch)
    after = arrays((state.model, state.opt_state))
    assert all(np.isfinite(x).all() for x in after.values() if x.dtype == np.float32)
    assert metrics.compute()["nonfinite"] == 1
    if name != "an average":  # Its second step is the first that overflows.
        for path, array in after.items():
            np.testing.assert_array_equal(array, before[path], err_msg=path)


@pytest.mark.versions
@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
def test_an_update_that_calls_the_host_does_so_once_a_step(mesh):
    calls = []

    def update(updates, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return jax.tree.map(lambda grad: -0.1 * grad, updates), state

    optim = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    state, train_step = make(mesh, "replicate", optim=optim, lint="off")
    before = int(state.step)
    for _ in range(3):
        state, _ = train_step(state, make_batch())
    jax.effects_barrier()
    assert int(state.step) == before + 3 and len(calls) == 3


def test_what_was_infinite_before_may_stay():
    """Such as the best loss so far, before there is one."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, (state[0], state[1] + 1)

    first = jnp.float32(jnp.inf), jnp.array([jnp.nan, 1.0])
    keep = optax.GradientTransformation(lambda params: first, update)
    state, train_step = setup(optim=lenient(optax.chain(optax.sgd(0.1), keep)))
    state, _ = train_step(state, make_batch())
    state, metrics = train_step(state, make_batch())
    assert "nonfinite" not in metrics.compute()
    np.testing.assert_array_equal(state.opt_state[1][1], [np.nan, 3.0])


def test_a_models_state_that_is_not_finite_is_not_kept():
    class Counts(eqx.Module):
        linear: eqx.nn.Linear
        total: eqx.nn.StateIndex

        def __init__(self, key):
            self.linear = eqx.nn.Linear(8, 4, key=key)
            self.total = eqx.nn.StateIndex(jnp.zeros(()))

    def losses(model, batch, key):
        model, state = model
        state = state.set(model.total, state.get(model.total) + jnp.sum(batch["y"]))
        return jnp.sum(jax.vmap(model.linear)(batch["x"]) ** 2, axis=-1), state

    make_model = eqx.nn.make_with_state(Counts)
    state, train_step = make("data=8", "replicate", losses, make_model=make_model)
    batch = make_batch()
    state, _ = train_step(state, batch)
    kept = float(state.model_state.get(state.model.total))
    state, metrics = train_step(state, {**batch, "y": batch["y"] + np.float32(np.inf)})
    assert metrics.compute()["nonfinite"] == 1
    assert float(state.model_state.get(state.model.total)) == kept


def test_only_gradients_that_do_not_fit_shrink_the_loss_scale():
    options: Any = {"precision": eqxshard.Precision(compute=jnp.float16), "lint": "off"}
    for optim, batch, scale in (
        (HUGE, make_batch(), 2.0**15),
        (optax.sgd(0.1), with_nan(make_batch()), 2.0**14),
    ):
        state, train_step = make("data=8", "replicate", optim=optim, **options)
        state, metrics = train_step(state, batch)
        assert metrics.compute()["nonfinite"] == 1
        assert float(state.loss_scale.scale) == scale


def test_nonfinite_raise_names_the_step_and_ignore_does_not_check():
    state, train_step = setup(nonfinite="raise")
    state, _ = train_step(state, make_batch())
    said = (
        r"not finite in step 2; find the line with eqxshard\.first_nonfinite and a state "
        r"from before, such as a checkpoint's, or "
    )
    with pytest.raises(FloatingPointError, match=said):
        train_step(state, with_nan(make_batch()))
    state, train_step = setup(nonfinite="ignore")
    state, _ = train_step(state, with_nan(make_batch()))
    assert np.isnan(state.model.last.weight).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [None, "small", "large", "split"])
def test_each_device_checks_its_own_part(where, bad):
    mesh = make_mesh("data=2,fsdp=4")
    specs = {"small": P(), "large": P(), "split": P(None, "fsdp")}
    shardings = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    grads = {
        name: np.zeros((2**17 if name != "small" else 3, 4), np.float32) for name in specs
    }
    if where is not None:
        grads[where][-1, -1] = bad
    placed = jax.device_put(grads, shardings)
    check = jax.jit(
        lambda grads: all_finite([(grads[n], None, shardings[n]) for n in grads], mesh)
    )
    assert bool(check(placed)) == (where is None)
