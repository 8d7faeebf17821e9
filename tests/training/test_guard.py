import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import arrays, make_batch, make_mesh, squared_errors, stack
from jax.sharding import PartitionSpec as P
from step_helpers import setup, with_nan

import eqxshard
from eqxshard.training._guard import all_finite


# The slope of the root at 0 is infinite, so a batch can have a finite loss and a gradient
# that is not.
def rooted(model, batch, key):
    return squared_errors(model, batch, key) + 0 * jnp.sqrt(
        jnp.abs(batch["x"][:, 0] * jnp.sum(model.last.bias))
    )


BAD = {
    "nan": with_nan,
    "infinite": lambda batch: {**batch, "y": batch["y"] + np.float32(np.inf)},
    "gradient only": lambda batch: {**batch, "x": 0 * batch["x"]},
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("fsdp=8", "fsdp")])
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
    both = eqxshard.Metrics.stack([metrics, good]).compute()
    assert both == pytest.approx({**good.compute(), "nonfinite": 1})
    state, metrics = train_step(state, make_batch(seed=2))
    assert "nonfinite" not in metrics.compute()
    assert not np.array_equal(state.model.last.weight, before["[0].last.weight"])


def test_nonfinite_raise_names_the_step_and_ignore_does_not_check():
    state, train_step = setup(nonfinite="raise")
    state, _ = train_step(state, make_batch())
    with pytest.raises(FloatingPointError, match="not finite in step 2; look at its batch"):
        train_step(state, with_nan(make_batch()))
    state, train_step = setup(nonfinite="ignore")
    state, _ = train_step(state, with_nan(make_batch()))
    assert np.isnan(state.model.last.weight).all()


def test_the_step_that_is_not_finite_is_named_among_many():
    state, train_step = setup(nonfinite="raise")
    state, _ = train_step(state, make_batch())
    batches = [make_batch(seed=1), with_nan(make_batch()), *map(make_batch, (32, 32))]
    with pytest.raises(FloatingPointError, match="not finite in step 3"):
        train_step.many(state, stack(batches))


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
    check = jax.jit(lambda grads: all_finite(grads, shardings, mesh))
    assert bool(check(placed)) == (where is None)
