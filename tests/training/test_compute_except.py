"""`Precision(compute_except=...)`: arrays that keep their own type in a step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_helpers
from helpers import lenient, make_mesh

import eqxshard

F32 = np.float32
OPTIM = lenient(optax.sgd(0.1))
EXCEPT = (r"rotary\.table", r"^layers\.scale$", r"^batch\.clock\.time$")
MESHES = [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")]


class Rotary(eqx.Module):
    table: jax.Array


class Layer(eqx.Module):
    weight: jax.Array
    scale: jax.Array

    def __call__(self, x):
        scaled = jnp.tanh(self.weight @ x).astype(jnp.float32) * self.scale
        return scaled.astype(x.dtype)


class Timed(eqx.Module):
    """A table of angles to turn by, and stacked layers with a scale each."""

    layers: Layer
    rotary: Rotary

    def __init__(self, key):
        weight = jax.random.normal(key, (3, 16, 16)) / 4
        # 1.001 is 1 in bfloat16.
        self.layers = Layer(weight, jnp.full((3, 16), 1.001))
        self.rotary = Rotary(1 + jnp.arange(16 * 40).reshape(16, 40) / 1024)

    def __call__(self, x, time):
        angle = time * self.rotary.table[:, 3]
        x = x + jnp.sin(angle).astype(x.dtype)
        return eqxshard.scan_layers(self.layers, x)


def by_hand(model, x, time):
    """The model in plain JAX, which knows nothing of steps."""
    x = x + jnp.sin(time * model.rotary.table[:, 3]).astype(x.dtype)
    for weight, scale in zip(model.layers.weight, model.layers.scale):
        x = (jnp.tanh(weight @ x).astype(jnp.float32) * scale).astype(x.dtype)
    return x


def losses(model, batch, call):
    out = jax.vmap(call, (None, 0, 0))(model, batch["x"], batch["clock"]["time"])
    return jnp.sum(out.astype(jnp.float32) ** 2, axis=-1)


def loss_fn(model, batch, key):
    return losses(model, batch, lambda model, x, time: model(x, time))


def make_batch():
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(F32)
    # None of these is a number of bfloat16.
    return {"x": x, "clock": {"time": 2.0**12 + 1 + np.arange(32, dtype=F32) % 7}}


def make(mesh, rule, patterns=EXCEPT, loss_fn=loss_fn, **options):
    precision = eqxshard.Precision(compute_except=patterns)
    options |= {"make_model": Timed, "precision": precision}
    return step_helpers.make(mesh, rule, loss_fn, OPTIM, **options)


def reference(model, batch):
    """Loss and gradients in bfloat16, except for the named arrays."""
    kept = lambda model: (model.rotary.table, model.layers.scale)  # noqa: E731
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731

    def mean(model):
        for_use = eqx.tree_at(kept, half(model), kept(model))
        return jnp.mean(losses(for_use, {**batch, "x": half(batch["x"])}, by_hand))

    return jax.value_and_grad(mean)(model)


@pytest.mark.parametrize("mesh, rule", MESHES)
@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_is_what_one_would_write_by_hand(mesh, rule, accumulate):
    state, step = make(mesh, rule, accumulate=accumulate)
    before = jax.tree.map(jnp.asarray, jax.device_get(state.model))
    batch = jax.tree.map(jnp.asarray, make_batch())
    loss, grads = reference(before, batch)
    state, metrics = step(state, make_batch())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-2)
    # With a time that is off by 2 or more, the loss is quite different.
    rounded = batch["clock"]["time"].astype(jnp.bfloat16).astype(F32)
    other, _ = reference(before, {**batch, "clock": {"time": rounded}})
    assert abs(other - loss) > 0.1 * loss
    for name in ("rotary.table", "layers.scale", "layers.weight"):
        part, array = name.split(".")
        of = lambda tree: getattr(getattr(tree, part), array)  # noqa: B023, E731
        change = (of(before) - np.asarray(of(state.model))) / 0.1
        size = float(jnp.max(jnp.abs(of(grads))))
        np.testing.assert_allclose(change, of(grads), atol=3e-2 * size, err_msg=name)


@pytest.mark.parametrize("mesh, rule", MESHES)
def test_what_is_named_has_its_own_type_everywhere(mesh, rule):
    seen = []

    def looks(model, batch, key=None):
        arrays = {"table": model.rotary.table, "scale": model.layers.scale}
        arrays |= {"time": batch["clock"]["time"], "weight": model.layers.weight}
        arrays |= {"x": batch["x"]}
        seen.append({name: str(x.dtype) for name, x in arrays.items()})
        return loss_fn(model, batch, key)

    state, step = make(mesh, rule, loss_fn=looks)
    text = step.lower(state, make_batch()).as_text("hlo")
    # The layers are cast one at a time.
    assert "bf16[16,16]" in text and "f32[16,40]" in text
    assert "bf16[16,40]" not in text and "bf16[16]" not in text
    precision = eqxshard.Precision(compute_except=(*EXCEPT, "not_here"))
    eval_step = eqxshard.make_eval_step(
        lambda model, batch: {"loss": looks(model, batch)}, precision=precision
    )
    eval_step.lower(state.model, make_batch())
    kept = dict.fromkeys(("table", "scale", "time"), "float32")
    expected = kept | dict.fromkeys(("weight", "x"), "bfloat16")
    assert len(seen) == 2 and seen == [expected] * 2


@pytest.mark.slow
def test_predictions_keep_what_is_named():
    state, _ = make(*MESHES[0])
    batch = make_batch()
    source = eqxshard.data.ArraySource({"x": batch["x"], "time": batch["clock"]["time"]})
    loader = eqxshard.Loader(source, batch_size=32, mesh=make_mesh("data=1"), shuffle=False)

    def times(model, batch):
        assert model.layers.weight.dtype == batch["x"].dtype == jnp.bfloat16
        return batch["time"] * model.rotary.table[3, 3]

    precision = eqxshard.Precision(compute_except=("table", r"batch\.time"))
    found = eqxshard.predict(state.model, times, loader, precision=precision)
    table = np.asarray(state.model.rotary.table)
    np.testing.assert_array_equal(found, batch["clock"]["time"] * table[3, 3])


@pytest.mark.slow
def test_extra_is_named_too():
    def teach(model, batch, key, extra):
        assert (extra["a"].dtype, extra["b"].dtype) == (jnp.float32, jnp.bfloat16)
        return jnp.sum(batch["x"], axis=-1) * model.layers.scale[0, 0]

    state, step = make("data=8", "replicate", (r"^extra\.a$",), loss_fn=teach)
    step(state, make_batch(), {"a": np.ones(3, F32), "b": np.ones(3, F32)})


def test_patterns_that_are_wrong_are_refused():
    with pytest.raises(TypeError, match="compute_except='table'"):
        eqxshard.Precision(compute_except="table")
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        eqxshard.Precision(compute_except=("(",))
    state, step = make(*MESHES[0], (r"batch.clock.tiem",))
    with pytest.raises(ValueError, match=r"mean 'batch\.clock\.time'"):
        step(state, make_batch())
    assert not state.step.is_deleted()


@pytest.mark.slow
def test_a_gradient_of_what_is_named_is_summed_in_float32():
    def linear(model, batch, key):
        return model.rotary.table[0, 0] * batch["clock"]["time"]

    state, step = make("data=8", "replicate", loss_fn=linear)
    before = float(state.model.rotary.table[0, 0])
    batch = make_batch()
    state, _ = step(state, batch)
    change = (before - float(state.model.rotary.table[0, 0])) / 0.1
    # bfloat16 would be off by as much as 16.
    np.testing.assert_allclose(change, batch["clock"]["time"].mean(), rtol=1e-6)
