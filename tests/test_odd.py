"""Legal but unusual cases: each works, or is refused in one sentence."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RULES, assert_equal, lenient, make_batch, make_mesh

import eqxshard

ADAM = lenient(optax.adam(1e-2))
ROWS = 16


class Linear(eqx.Module):
    """A layer beside any other leaves."""

    weight: jax.Array
    other: object

    def __init__(self, key, dtype=jnp.float32, other=None):
        # Random numbers take long to compile.
        values = jnp.sin(jnp.arange(32, dtype=jnp.float32)).reshape(4, 8)
        self.weight, self.other = values.astype(dtype), other

    def __call__(self, x):
        return self.weight @ x.astype(self.weight.dtype)


def losses(model, batch, key):
    out = jax.vmap(model)(batch["x"])
    return jnp.sum(jnp.abs(out - batch["y"].astype(out.dtype)) ** 2, axis=-1)


@functools.cache
def make_step(loss_fn, optim, mesh, **options):
    """A step for the states of one mesh, which tests share."""
    return eqxshard.make_train_step(loss_fn, optim, **options)


def setup(
    make_model: Any = Linear, loss_fn=losses, mesh="data=2,fsdp=4", optim=ADAM, **options
):
    """A state, split wherever that is possible, and its step."""
    key = options.pop("key", jax.random.key(0))
    where = {"mesh": make_mesh(mesh), "rule": RULES["fsdp"]}
    state = eqxshard.init_state(make_model, optim, key=key, **where)
    return state, make_step(loss_fn, optim, mesh, **options)


def train(*args, batch=None, steps=2, **options):
    """The losses of some steps, each of which must be finite, and the state after them."""
    state, train_step = setup(*args, **options)
    batch, found = make_batch(ROWS) if batch is None else batch, []
    for _ in range(steps):
        state, metrics = train_step(state, batch)
        values = metrics.compute()
        assert values.keys() == {"loss"}
        found.append(values["loss"])
    return found, state


def check_like_one_device(folder, *args, rel=1e-5, **options):
    """Train on eight devices and on one, save, and restore on one."""
    found, state = train(*args, **options)
    expected, alone = train(*args, mesh="data=1", **options)
    assert found == pytest.approx(expected, rel=rel)
    checkpointer = eqxshard.Checkpointer(folder)
    checkpointer.save(state)
    checkpointer.wait()
    assert_equal(checkpointer.restore(alone), state)
    return found, state


# Keys and leaves


@pytest.mark.slow
def test_keys_of_another_generator(tmp_path):
    def noisy(model, batch, key):
        keys = jax.random.split(key, ROWS)
        return losses(model, batch, key) + jax.vmap(jax.random.uniform)(keys)

    key = jax.random.key(0, impl="rbg")
    found, state = check_like_one_device(tmp_path, Linear, noisy, key=key)
    assert "rbg" in str(state.key.dtype)
    assert found[0] != pytest.approx(train(Linear, noisy, steps=1)[0][0], rel=1e-5)


@pytest.mark.slow
def test_leaves_of_many_types_and_no_size(tmp_path):
    kinds = {
        "bytes": lambda: jnp.arange(16, dtype=jnp.uint8),
        "half": lambda: jnp.ones((8, 2), jnp.bfloat16),
        "flags": lambda: jnp.arange(8) % 2 == 0,
        "complex": lambda: jnp.ones(8, jnp.complex64),
        "no rows": lambda: jnp.zeros((0, 8)),
        "no columns": lambda: jnp.zeros((8, 0)),
        "none": lambda: (None, {}, []),
    }

    def make_model(key):
        return Linear(key, other={name: make() for name, make in kinds.items()})

    def loss_fn(model, batch, key):
        other = model.other
        factor = jnp.sum(other["half"].astype(jnp.float32)) / 16
        factor += jnp.sum(jnp.abs(other["complex"]) * other["bytes"][8:].astype("float32"))
        factor += jnp.sum(other["no rows"]) + jnp.sum(other["no columns"] ** 2)
        return losses(model, batch, key) + factor * jnp.sum(other["flags"], dtype="float32")

    _, state = check_like_one_device(tmp_path, make_model, loss_fn)
    other = state.model.other
    assert {name: str(other[name].dtype) for name in list(kinds)[:4]} == {
        "bytes": "uint8",
        "half": "bfloat16",
        "flags": "bool",
        "complex": "complex64",
    }
    assert other["no rows"].shape == (0, 8)
    # All leaves that can be trained are.
    for name, was in kinds.items():
        if name in ("half", "complex"):
            assert not np.array_equal(other[name], was())
        elif name in ("bytes", "flags"):
            np.testing.assert_array_equal(other[name], was())


@pytest.mark.parametrize(
    "make_model",
    [lambda key: {"n": jnp.arange(8)}, lambda key: jnp.zeros((0, 8))],
    ids=["ints", "no size"],
)
def test_models_without_parameters(make_model, tmp_path):
    found, state = train(make_model, lambda model, batch, key: batch["x"][:, 0])
    assert found == pytest.approx([np.mean(make_batch(ROWS)["x"][:, 0])] * 2, rel=1e-5)
    assert int(state.step) == 2
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    assert_equal(checkpointer.restore(state), state)


# Complex and double precision


def test_complex_parameters_go_downhill():
    """JAX's gradient is the conjugate of the direction, which optimizers take as it is."""
    aim = 3 - 4j

    def loss_fn(model, batch, key):
        return jnp.abs(model["z"] - aim) ** 2 + 0 * batch["x"][:, 0]

    found, state = train(
        lambda key: {"z": jnp.zeros((), jnp.complex64)},
        loss_fn,
        optim=lenient(optax.sgd(0.1)),
        accumulate=2,
    )
    # Each step is a fifth of the way.
    assert found == pytest.approx([25, 25 * 0.8**2])
    assert complex(state.model["z"]) == pytest.approx(aim * (1 - 0.8**2))


@pytest.mark.slow
def test_double_precision(tmp_path):
    with jax.enable_x64(True):
        batch = {name: x.astype(np.float64) for name, x in make_batch(ROWS).items()}
        _, state = check_like_one_device(
            tmp_path, lambda key: Linear(key, jnp.float64), batch=batch, rel=1e-12
        )
        assert state.model.weight.dtype == jnp.float64
        # Models in float32 stay so.
        state = train(Linear, batch=batch, lint="off")[1]
        assert state.model.weight.dtype == jnp.float32 and state.step.dtype == jnp.int32


# Examples of weight 0

WEIGHT = np.float32(np.arange(ROWS) != 3)


def test_what_is_not_finite_in_examples_of_weight_0_is_masked():
    clean = make_batch(ROWS, weight=WEIGHT)
    x, y = clean["x"].copy(), clean["y"].copy()
    x[3, 1], y[3] = np.nan, np.inf
    found, state = train(batch={**clean, "x": x, "y": y})
    expected, other = train(batch=clean)
    assert found == pytest.approx(expected, rel=1e-6)
    assert_equal(state, other)


def rooted(model, batch, key):
    """Losses whose slope is infinite for rows of zeros."""
    squares = jnp.sum(jax.vmap(model)(batch["x"]) ** 2, axis=-1)
    if batch.get("guarded") is not None:
        squares = jnp.where(batch["guarded"], 1.0, squares)
    return jnp.sqrt(squares)


def test_an_infinite_slope_in_an_example_of_weight_0_skips_the_step():
    """Zero times infinity: only the loss function itself can keep away from it."""
    batch = make_batch(ROWS, weight=WEIGHT)
    batch["x"][3] = 0
    state, train_step = setup(Linear, rooted)
    weight = np.array(state.model.weight)
    state, metrics = train_step(state, batch)
    assert metrics.compute()["nonfinite"] == 1
    np.testing.assert_array_equal(state.model.weight, weight)
    train(Linear, rooted, batch={**batch, "guarded": WEIGHT == 0})


# States that were donated


def test_states_that_were_donated_are_not_saved(tmp_path):
    state, train_step = setup()
    train_step(state, make_batch(ROWS))
    for save in (
        lambda: eqxshard.Checkpointer(tmp_path / "run").save(state),
        lambda: eqxshard.save_weights(tmp_path / "a.safetensors", state.model),
    ):
        with pytest.raises(ValueError, match="this state was donated to an earlier step"):
            save()
    assert not (tmp_path / "a.safetensors").exists()


# Debugging


def make_nan():
    batch = make_batch(ROWS)
    return {**batch, "y": np.full_like(batch["y"], np.nan)}


@pytest.mark.slow
def test_jax_debug_nans_raises_at_nan_and_keeps_the_state():
    state, _ = setup()
    train_step = eqxshard.make_train_step(losses, ADAM)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            train_step(state, make_nan())
        # JAX donates nothing then.
        state, _ = train_step(state, make_batch(ROWS))
    state, metrics = train_step(state, make_nan())
    assert metrics.compute()["nonfinite"] == 1 and int(state.step) == 2


def test_jax_debug_nans_that_is_turned_on_later_says_that_the_state_is_lost():
    state, train_step = setup()
    state, _ = train_step(state, make_batch(ROWS))
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match="turn it on before the step is first call"),
    ):
        train_step(state, make_nan())


def test_jax_disable_jit_is_refused():
    state, train_step = setup()
    eval_step = eqxshard.make_eval_step(lambda model, batch: {"x": batch["x"][:, 0]})
    with jax.disable_jit():
        for call in (
            setup,
            lambda: train_step(state, make_batch(ROWS)),
            lambda: eval_step(state.model, make_batch(ROWS)),
        ):
            with pytest.raises(ValueError, match="jax_disable_jit is on, and it"):
                call()
    train_step(state, make_batch(ROWS))
