import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_helpers
from helpers import Model, assert_equal, lenient, make_batch, make_mesh
from step_helpers import KEY

import eqxshard

OPTIM = lenient(optax.sgd(0.1))
BF16 = eqxshard.Precision(jnp.bfloat16)


def make(loss_fn, precision, mesh="data=1", rule="replicate", optim=OPTIM, **options):
    return step_helpers.make(mesh, rule, loss_fn, optim, precision=precision, **options)


def errors(model, batch, key):
    """Losses without dropout, in the type of the model and the batch."""
    model = eqx.nn.inference_mode(model)
    return jnp.sum((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def dtypes(tree):
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return {str(leaf.dtype) for leaf in leaves}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_only_the_loss_function_sees_the_compute_type(accumulate):
    seen = []

    def loss_fn(model, batch, key):
        seen.append((dtypes(model), {name: x.dtype.name for name, x in batch.items()}))
        return errors(model, batch, key)

    optim = lenient(optax.adam(0.1))
    state, train_step = make(loss_fn, BF16, optim=optim, accumulate=accumulate)
    batch = make_batch(weight=np.ones(32)) | {"index": np.arange(32)}
    state, metrics = train_step(state, batch)
    for model, entries in seen:
        assert model == {"bfloat16"}
        assert entries == {
            "x": "bfloat16",
            "y": "bfloat16",
            "__weight__": "float32",
            "index": "int32",
        }
    assert dtypes(state.model) == dtypes(state.opt_state) == {"float32"}
    assert metrics["loss"].dtype == jnp.float32


@pytest.mark.versions
@pytest.mark.parametrize("mesh, rule", [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_a_step_in_bfloat16_is_what_one_would_write_by_hand(mesh, rule):
    state, train_step = make(errors, BF16, mesh, rule)
    batch = make_batch()
    params, static = eqx.partition(state.model, eqx.is_inexact_array)
    params = jax.tree.map(np.asarray, params)
    static = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, static)

    def mean(params):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
        losses = errors(eqx.combine(half[0], static), half[1], None)
        return jnp.mean(losses.astype(jnp.float32))

    loss, grads = jax.value_and_grad(mean)(jax.tree.map(jnp.asarray, params))
    assert dtypes(grads) == {"float32"}
    state, metrics = train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=5e-3)
    for new, old, grad in zip(
        jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array)),
        jax.tree.leaves(params),
        jax.tree.leaves(grads),
    ):
        # The update itself, to the 8 bits that bfloat16 has.
        scale = float(jnp.max(jnp.abs(grad)))
        np.testing.assert_allclose((old - new) / 0.1, grad, atol=3e-2 * scale)


def test_rounding_in_the_loss_function_is_part_of_it():
    """The gradient of what is rounded is rounded, on several devices as on one."""

    def loss_fn(model, batch, key):
        rounded = model.first.bias[0].astype(jnp.bfloat16).astype(jnp.float32)
        return rounded * batch["x"][:, 0]

    state, train_step = make(loss_fn, None, *step_helpers.SPLITS[1])
    before = np.asarray(state.model.first.bias[0])
    batch = make_batch() | {"x": np.full((32, 8), 1.001, np.float32)}
    state, _ = train_step(state, batch)
    change = (before - np.asarray(state.model.first.bias[0])) / 0.1
    # 1.001 is 1 in bfloat16.
    np.testing.assert_allclose(change, 1, rtol=1e-5)


def test_gradients_are_accumulated_in_float32():
    def loss_fn(model, batch, key):
        # One part's gradient is 256 times that of each other.
        return model.first.bias[0] * batch["x"][:, 0]

    x = np.ones((32, 8), np.float32)
    x[::16] = 256
    state, train_step = make(loss_fn, BF16, accumulate=16)
    before = np.asarray(state.model.first.bias[0])
    state, _ = train_step(state, make_batch() | {"x": x})
    change = (before - np.asarray(state.model.first.bias[0])) / 0.1
    np.testing.assert_allclose(change, x[:, 0].mean(), rtol=1e-5)


class Adapted(eqx.Module):
    """A base in bfloat16, and an adapter of rank 2 (LoRA) in float32."""

    base: jax.Array
    down: jax.Array
    up: jax.Array

    def __init__(self, key):
        self.base = jax.random.normal(key, (96, 64), jnp.bfloat16)
        self.down = jnp.full((2, 64), 0.1)
        self.up = jnp.zeros((96, 2))

    def __call__(self, x):
        base = self.base @ x.astype(self.base.dtype)
        adapter = self.up @ (self.down @ x.astype(self.up.dtype))
        return base.astype(jnp.float32) + adapter.astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [BF16, eqxshard.Precision(None)], ids=str)
def test_a_frozen_base_is_never_cast_up(precision):
    trainable = eqx.tree_at(
        lambda model: (model.down, model.up),
        jax.tree.map(lambda _: False, Adapted(KEY)),
        (True, True),
    )

    def loss_fn(model, batch, key):
        assert model.base.dtype == jnp.bfloat16
        return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, axis=-1)

    optim, options = lenient(optax.adam(0.1)), {"make_model": Adapted}
    options |= {"trainable": trainable}
    state, train_step = make(loss_fn, precision, "fsdp=8", "fsdp", optim, **options)
    kept = np.asarray(state.model.base)
    assert kept.dtype == jnp.bfloat16 and dtypes(state.opt_state) == {"float32"}
    batch = {"x": np.ones((8, 64), np.float32)}
    lowered = train_step.lower(state, batch)
    # The compiled program of a CPU, which has no bfloat16, would have copies.
    assert "f32[96,64]" not in str(lowered.as_text("hlo"))
    stats = lowered.compile().memory_analysis()
    assert stats is not None
    assert stats.argument_size_in_bytes < 1.3 * (2 * 96 * 64 + 3 * 4 * 2 * 160 + 256) / 8
    state, _ = train_step(state, batch)
    assert_equal(state.model.base, kept)
    assert np.any(np.asarray(state.model.up))


@pytest.mark.parametrize(
    "made, given, message",
    [
        (None, {"params": jnp.bfloat16}, r"params=bfloat16\), .* of float32"),
        ({"params": "bfloat16"}, {}, r"params=float32\), .* of bfloat16"),
        (
            {"compute": "float16"},
            {"compute": "float16", "initial_scale": 4.0},
            r"initial_scale=4.0\), .* with 32768.0",
        ),
    ],
)
def test_what_only_init_state_does_is_refused_of_a_step(made, given, message):
    """A step changes neither the types of parameters nor the first loss scale."""
    placed: dict = {"mesh": make_mesh("data=1"), "rule": eqxshard.replicate()}
    made = None if made is None else eqxshard.Precision(**made)
    state = eqxshard.init_state(Model, OPTIM, key=KEY, precision=made, **placed)
    step = eqxshard.make_train_step(errors, OPTIM, precision=eqxshard.Precision(**given))
    with pytest.raises(ValueError, match=rf"{message}.*; give init_state and the step"):
        step(state, make_batch())


# float16


def half(**options):
    return eqxshard.Precision(jnp.float16, **options)


def test_small_gradients_of_float16_do_not_vanish():
    def loss_fn(model, batch, key):
        return (model.first.bias[0] * jnp.float16(2.0**-14)) * jnp.float16(2.0**-12)

    def change(precision):
        state, train_step = make(loss_fn, precision)
        before = np.asarray(state.model.first.bias[0])
        state, _ = train_step(state, make_batch())
        return before - np.asarray(state.model.first.bias[0])

    optim_change = change(half(initial_scale=2.0**20))
    np.testing.assert_allclose(optim_change, 0.1 * 2.0**-26, rtol=1)
    assert change(half(initial_scale=1.0)) == 0


def test_the_scale_falls_until_a_step_is_finite_and_rises_after_some_that_were():
    state, train_step = make(errors, half(initial_scale=2.0**24, scale_every=3))
    batch, scales, skipped = make_batch(), [], []
    for _ in range(16):
        before = state.model
        kept = jax.tree.map(np.asarray, eqx.filter(before, eqx.is_array))
        state, metrics = train_step(state, batch)
        assert state.loss_scale is not None
        scales.append(float(state.loss_scale.scale))
        skipped.append(bool(metrics.nonfinite))
        if skipped[-1]:
            assert_equal(eqx.filter(state.model, eqx.is_array), kept)
    falls = skipped.index(False)
    assert 0 < falls < 12
    assert scales[:falls] == [2.0 ** (23 - i) for i in range(falls)]
    # The scale of the first finite step holds for three, and then doubles.
    assert scales[falls : falls + 3] == [scales[falls - 1]] * 2 + [2 * scales[falls - 1]]
