"""Batches from anywhere: one program for all, and none is read late, wrapped or cut."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    RULES,
    make_batch,
    make_loader,
    make_mesh,
    once,
    squared_errors,
    stack,
)
from jax.sharding import NamedSharding, PartitionSpec
from step_helpers import make, mean_of_x, setup, without_dropout

import eqxshard
from eqxshard.sharding import batch_sharding


def from_anywhere(mesh):
    """The same rows: on the host, uncommitted, placed, and placed by another name."""
    batch = make_batch()
    rows = batch_sharding(mesh)
    other = jax.make_mesh((mesh.size,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return {
        "numpy": batch,
        "jax": jax.tree.map(jnp.asarray, batch),
        "placed": jax.device_put(batch, rows),
        "equivalent": jax.device_put(
            batch, NamedSharding(other, PartitionSpec("rows", None))
        ),
        "mixed": {"x": batch["x"], "y": jax.device_put(batch["y"], rows)},
        "wide": {**batch, "x": batch["x"].astype(np.float64)},
    }


@pytest.mark.versions
@pytest.mark.parametrize("mesh", ["data=1", "data=2,fsdp=4"])
def test_one_program_serves_batches_from_anywhere(mesh):
    batches = from_anywhere(make_mesh(mesh))
    state, train_step = make(mesh, "replicate", once(without_dropout))
    eval_step = eqxshard.make_eval_step(once(mean_of_x))
    # Also after it was lowered, or linted, for shapes alone.
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in make_batch().items()
    }
    train_step.lower(state, shapes)
    eqxshard.lint(train_step, state, batches["numpy"])
    eqxshard.lint(eval_step, state.model, batches["jax"])
    losses, expected = {}, float(np.mean(make_batch()["x"][:, 0]))
    for name, batch in batches.items():
        measured = eval_step(state.model, batch).compute()["x"]
        assert measured == pytest.approx(expected, abs=1e-6), name
        fresh, _ = setup(mesh, loss_fn=without_dropout)
        _, metrics = train_step(fresh, batch)
        losses[name] = metrics.compute()["loss"]
    assert len({*losses.values()}) == 1, losses


def test_several_batches_from_anywhere_too():
    mesh = make_mesh("fsdp=8")
    several = stack([make_batch(), make_batch()])
    placed = jax.device_put(several, batch_sharding(mesh, stacked=True))
    state, train_step = make("fsdp=8", "fsdp", once(without_dropout))
    for batches in (several, placed, jax.tree.map(jnp.asarray, several)):
        state, _ = train_step.many(state, batches)
    assert int(state.step) == 6


def test_predictions_take_numpy_batches_of_a_loader_of_ones_own():
    class Own:
        """A loader of NumPy batches."""

        def __len__(self):
            return 2

        def seek(self, step):
            """Starts again."""

        def __iter__(self):
            return iter([make_batch(seed=seed) for seed in range(2)])

    state, _ = setup("data=8")
    found = eqxshard.predict(state.model, lambda m, b: b["x"], Own())
    rows = np.concatenate([make_batch(seed=seed)["x"] for seed in range(2)])
    np.testing.assert_array_equal(found, rows)


def test_a_numpy_batch_may_be_changed_as_soon_as_a_step_returns():
    def loss_fn(model, batch, key):
        # The devices are still at this when the step returns.
        busy = jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ x), batch["busy"][0])
        return model.weight[0, 0] * 0 + jnp.mean(batch["x"], 1) + 0 * jnp.sum(busy)

    optim = optax.sgd(0.1)
    placed = {"mesh": make_mesh("data=1"), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(
        lambda key: eqx.nn.Linear(2, 2, key=key), optim, key=jax.random.key(0), **placed
    )
    train_step = eqxshard.make_train_step(loss_fn, optim, lint="off")
    x, busy = np.empty((8, 4096), np.float32), np.ones((8, 256, 256), np.float32)
    for number in range(10):
        x[:] = number
        state, metrics = train_step(state, {"x": x, "busy": busy})
        x[:] = -1
        assert metrics.compute()["loss"] == number


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_that_do_not_fit_are_refused_and_others_pass(dtype):
    eval_step = eqxshard.make_eval_step(lambda m, b: {"i": b["i"] > 0})
    state, _ = setup("data=8")
    fits = np.arange(32, dtype=dtype)
    assert eval_step(state.model, {"i": fits}).compute()["i"] == pytest.approx(31 / 32)
    says = (
        r"^'i' has integers from 0 to 1099511627776, which do not fit JAX's u?int32; make "
        "them fit, or turn jax_enable_x64 on.$"
    )
    wide = np.where(fits == 3, np.asarray(2**40, dtype), 0).astype(dtype)
    with pytest.raises(ValueError, match=says):
        eval_step(state.model, {"i": wide})


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_nothing_but_the_error_is_printed_of_rows_that_do_not_divide(kind, capfd):
    state, train_step = make("data=8", "replicate")
    batch = make_batch(30)
    capfd.readouterr()  # XLA may warn about programs that were compiled before.
    with pytest.raises(ValueError, match="batch size 30 does not divide over data=8"):
        train_step(state, batch if kind == "numpy" else jax.tree.map(jnp.asarray, batch))
    assert capfd.readouterr() == ("", "")


def test_a_loaders_batch_after_one_of_numpy_compiles_nothing():
    state, train_step = make("data=8", RULES["replicate"], once(squared_errors))
    state, _ = train_step(state, make_batch())
    drawn = ({"x": b["x"], "y": b["y"]} for b in make_loader(remainder="drop"))
    state, _ = train_step(state, next(drawn))
    assert int(state.step) == 2


def test_masks_of_arrays_are_not_dropped():
    state, train_step = setup()
    batch = {**make_batch(), "x": np.ma.masked_less(make_batch()["x"], 0)}
    with pytest.raises(TypeError, match=r"x is a masked array, and JAX has no masks; fill"):
        train_step(state, batch)
