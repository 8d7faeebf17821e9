import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, make_batch
from invariance_helpers import Affine, check_invariant, cross_entropies, squares
from jax.sharding import PartitionSpec as P

import eqxshard

#: Like Adam, it divides by each element of a gradient; it also divides by norms.
LAMB = lenient(optax.lamb(1e-2))


@pytest.mark.versions
def test_a_correct_model_passes_and_the_report_has_the_differences():
    report = check_invariant(
        loss_fn=cross_entropies,
        optim=LAMB,
        batch=[make_batch(seed=seed) for seed in range(2)],
        rules=[eqxshard.replicate(), eqxshard.fsdp(min_size=8)],
        meshes=[{"data": 2, "fsdp": 4}],
        steps=2,
        accumulate=2,
    )
    assert (report.steps, report.rtol) == (2, 2e-5)
    whole, split = report.rows
    assert (whole.mesh, whole.rule, whole.devices) == ("data=2, fsdp=4", "replicate()", 8)
    assert (whole.split, split.split, split.arrays) == (0, 2, 3)
    for row in report.rows:
        assert 0 < row.gradients < 2e-6
        assert row.loss < 2e-6
        # The optimizer takes whole steps along a gradient that is only rounding.
        assert row.parameters > 1e-3
    table = str(report)
    assert "data=2, fsdp=4" in table and "2 of 3" in table
    assert f"{split.gradients:.1e}" in table


# Mistakes in a model, each a function that returns options of `check_invariant`


def model_from_numpy_random():
    rng = np.random.default_rng(0)

    def make_model(key):
        weight = rng.normal(size=(4, 8)).astype(np.float32)
        return eqx.tree_at(lambda m: m.weight, Affine(key), jnp.asarray(weight))

    return {"make_model": make_model}


def per_device(fn, *args):
    """The result of the first device, as if all had the same: a psum is missing."""
    specs = (P(), *[P("data")] * (len(args) - 1))
    return eqxshard.filter_shard_map(fn, None, specs, P(), check_vma=False)(*args)


def loss_with_the_mean_of_one_device():
    """Only in the second batch does one device's mean differ from that of all."""

    def loss_fn(model, batch, key):
        mean = per_device(lambda model, z: jnp.mean(z), model, batch["z"])
        return squares(model, batch, key) * (1 + mean)

    first, second = make_batch(), make_batch(seed=1)
    return {
        "loss_fn": loss_fn,
        "batch": [{**first, "z": 0 * first["x"]}, {**second, "z": second["x"]}],
    }


def dropout_with_one_key():
    def drop(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    def loss_fn(model, batch, key):
        mapped = eqxshard.filter_shard_map(drop, None, (P(), P("data")), P("data"))
        return squares(model, {**batch, "x": mapped(key, batch["x"])}, key)

    return {"loss_fn": loss_fn}


def loss_divided_by_the_weight_of_one_device():
    """The rows of the first device do not count, so its mean is 0 / 0."""

    def mean(model, mask):
        return jnp.sum(mask) / jnp.sum(mask)

    def loss_fn(model, batch, key):
        return squares(model, batch, key) * per_device(mean, model, batch["mask"])

    mask = (np.arange(32) >= 16).astype(np.float32)
    return {"loss_fn": loss_fn, "batch": {**make_batch(), "mask": mask}}


def gradient_that_is_not_summed():
    @jax.custom_vjp
    def apply(weight, x):
        return x @ weight.T

    def backward(saved, grad):
        weight, x = saved
        summed = per_device(lambda _, grad, x: grad.T @ x, weight, grad, x)
        return summed, grad @ weight

    apply.defvjp(lambda weight, x: (apply(weight, x), (weight, x)), backward)

    def loss_fn(model, batch, key):
        return jnp.sum((apply(model.weight, batch["x"]) - batch["y"]) ** 2, axis=-1)

    return {"loss_fn": loss_fn}


def learning_rate_from_a_counter():
    calls = itertools.count(1)

    def update(updates, params):
        rate = -0.01 * next(calls)
        return jax.tree.map(lambda x: rate * x, updates)

    return {"optim": optax.stateless(update)}


def loss_that_magnifies_rounding():
    """Each step is the same to rounding, which the next magnifies by ten thousand."""

    def loss_fn(model, batch, key):
        return 1 + jnp.sin(1e4 * jax.vmap(model)(batch["x"])[:, 0]) / 2

    return {"loss_fn": loss_fn, "optim": optax.sgd(1e-2)}


BY = "differs from one device's by"
MISTAKES = {
    model_from_numpy_random: r"before step 1: model.weight is .*numpy.random",
    loss_with_the_mean_of_one_device: rf"step 2: loss \(and \d more\) {BY} .* a psum",
    dropout_with_one_key: rf"step 1: loss .*{BY} .* one key on every device",
    loss_divided_by_the_weight_of_one_device: rf"step 1: nonfinite .*{BY} .* that may be 0",
    gradient_that_is_not_summed: r"step 1: the gradient of weight \(and 1 more\) differs "
    r"between devices that .* no psum or pmean",
    learning_rate_from_a_counter: rf"step 1: model.weight .*{BY} .* look at the optimizer",
    loss_that_magnifies_rounding: rf"step 2, with all steps .* the loss {BY} .* magnifies",
}

#: One of each kind of difference is quick: before a step, in one, and after several.
SLOW = {
    *(dropout_with_one_key, loss_divided_by_the_weight_of_one_device),
    *(loss_with_the_mean_of_one_device, learning_rate_from_a_counter),
}


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[pytest.mark.slow] * (make in SLOW)) for make in MISTAKES],
    ids=lambda make: make.__name__,
)
def test_mistakes_are_located(make):
    with pytest.raises(AssertionError) as error:
        check_invariant(**make())
    assert str(error.value).startswith("on the mesh data=2 under replicate(), ")
    assert error.match(MISTAKES[make])


class Attending(eqx.Module):
    """The softmax is independent of the bias of the keys: another gradient of rounding."""

    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, 8, use_key_bias=True, key=key)

    def __call__(self, x):
        return self.attention(x, x, x)


@pytest.mark.thorough
def test_updates_that_normalize_a_gradient_of_rounding_are_allowed():
    def loss_fn(model, batch, key):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=(1, 2))

    rng = np.random.default_rng(0)
    report = check_invariant(
        make_model=Attending,
        loss_fn=loss_fn,
        batch={name: rng.normal(size=(32, 8, 8)).astype(np.float32) for name in "xy"},
        optim=lenient(optax.lamb(1e-2)),
        steps=4,
    )
    assert report.rows[0].gradients < 2e-6


@pytest.mark.slow
def test_the_default_rtol_is_that_of_the_least_precise_dtype():
    float16 = eqxshard.Precision(compute="float16")
    assert check_invariant(steps=1, precision=float16).rtol == 1e-2

    def make_model(key):
        return jax.tree.map(lambda x: x.astype("bfloat16"), Affine(key))

    batch = jax.tree.map(lambda x: x.astype("bfloat16"), make_batch())
    report = check_invariant(
        make_model=make_model, loss_fn=cross_entropies, batch=batch, steps=1
    )
    assert report.rtol == 2e-2


def test_a_loss_that_is_not_finite_on_one_device_is_an_error():
    with pytest.raises(AssertionError, match="step 1: the loss is nan on one device"):
        check_invariant(loss_fn=lambda *args: squares(*args) * jnp.nan)


def test_other_errors_get_a_note_with_the_mesh_and_rule():
    with pytest.raises(ValueError, match="batch size 3 does not divide") as error:
        check_invariant(batch=make_batch(rows=3))
    assert error.value.__notes__ == ["This happened on the mesh data=2 under replicate()."]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"meshes": [{"data": 2, "fsdp": 8}]}, "'jax_num_cpu_devices', 16"),
        ({"meshes": [{"data": -1}]}, "needs -1 devices"),
        ({"meshes": {"data": 2}}, "is one mesh"),
        ({"meshes": []}, "0 meshes and 1 rules leave nothing"),
        ({"rules": []}, "1 meshes and 0 rules leave nothing"),
        ({"steps": 0}, "0 steps on 1 batches"),
    ],
)
def test_nothing_to_compare_is_an_error(options, message, unannotated):
    with pytest.raises((ValueError, TypeError), match=message):
        check_invariant(**options)
