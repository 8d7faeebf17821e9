"""Options of a step on Explicit axes: the same losses as on Auto ones, bit for bit."""

import dataclasses
import functools as ft
import itertools
from typing import Any

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equinox import nn
from grades import graded
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from loop_helpers import make_loader
from run_train_helpers import CONFIG, STEPS, make_sgd
from run_train_helpers import train as train_run

import eqxshard

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_scripts_run")]

FSDP = eqxshard.fsdp(min_size=0)


def mesh_of(explicit):
    return eqxshard.make_mesh(data=2, fsdp=4, explicit=explicit)


class Net(eqx.Module):
    first: nn.Linear
    dropout: nn.Dropout
    last: nn.Linear

    def __init__(self, key):
        self.first, self.last = nn.Linear(4, 16, key=key), nn.Linear(16, 4, key=key)
        self.dropout = nn.Dropout(0.3)

    def __call__(self, x, key=None):
        hidden = self.dropout(jax.nn.gelu(self.first(x)), key=key, inference=key is None)
        return self.last(hidden)


class Normed(eqx.Module):
    linear: nn.Linear
    norm: nn.BatchNorm

    def __init__(self, key):
        self.linear = nn.Linear(4, 4, key=key)
        self.norm = nn.BatchNorm(4, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def conv_net(key):
    one, two = jax.random.split(key)
    return nn.Sequential(
        [
            nn.Lambda(lambda x: x.reshape(1, 2, 2)),
            nn.Conv2d(1, 4, 3, padding=1, key=one),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Lambda(jnp.ravel),
            nn.Linear(4, 4, key=two),
        ]
    )


class Tokens(eqx.Module):
    table: nn.Embedding
    last: nn.Linear

    def __init__(self, key):
        self.table, self.last = nn.Embedding(16, 8, key=key), nn.Linear(8, 4, key=key)

    def __call__(self, x):
        ids = jnp.int32(jnp.abs(x) * 5) % 16
        look_up: Any = lambda table, ids: table[ids]  # noqa: E731
        if jax.typeof(self.table.weight).sharding.mesh.explicit_axes:
            look_up = jax.sharding.auto_axes(look_up, axes=None, out_sharding=P())
        rows = jax.vmap(look_up, in_axes=(None, 0))(self.table.weight, ids)
        return self.last(jnp.mean(rows, 0))


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["x"]) ** 2, -1)


def loss_with_dropout(model, batch, key):
    x = batch["x"]
    keys = jax.random.split(key, len(x))
    if rows := jax.typeof(x).sharding.spec[0]:
        keys = jax.sharding.reshard(keys, P(rows))
    return jnp.mean((jax.vmap(model)(x, keys) - x) ** 2, -1)


def loss_with_state(model_and_state, batch, key):
    model, state = model_and_state
    axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
    out, state = jax.vmap(model, axis_name="batch", **axes)(batch["x"], state)
    return jnp.mean((out - batch["x"]) ** 2, -1), state


def loss_with_teacher(model, batch, key, teacher):
    return jnp.mean((jax.vmap(model)(batch["x"]) - jax.vmap(teacher)(batch["x"])) ** 2, -1)


def checked_loss(model, batch, key):
    out = jax.vmap(model)(batch["x"])
    out = eqx.error_if(out, jnp.any(batch["x"] > 100), "too large")
    return jnp.mean(out**2, -1)


def batches():
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((16, 4)).astype(np.float32)} for _ in range(3)]


def run(
    explicit,
    make: Any = Net,
    loss: Any = loss_fn,
    optim=None,
    rule=FSDP,
    teacher=False,
    init: Any = None,
    data=None,
    **options,
):
    """The losses of some steps, and the last state."""
    optim = optax.adam(1e-2) if optim is None else optim
    where = {"mesh": mesh_of(explicit), "rule": rule, **(init or {})}
    state = eqxshard.init_state(make, optim, key=jax.random.key(0), **where)
    step, losses = eqxshard.make_train_step(loss, optim, **options), []
    for batch in data or batches():
        extra = [jax.tree.map(lambda x: x, state.model)] if teacher else []
        state, metrics = step(state, batch, *extra)
        losses.append(float(metrics["loss"]))
    return losses, state


def precision(dtype):
    return {"init": {"precision": eqxshard.Precision(dtype)}}


EMA = optax.chain(optax.adam(1e-2), eqxshard.ema_weights(0.9))
STATEFUL = {"make": nn.make_with_state(Normed), "loss": loss_with_state}
CASES: dict[str, dict[str, Any]] = {
    "averaged weights": {"optim": EMA},
    "BatchNorm": STATEFUL,
    "BatchNorm, accumulated": {**STATEFUL, "accumulate": 2},
    "dropout": {"loss": loss_with_dropout},
    "extra": {"loss": loss_with_teacher, "teacher": True},
    "bfloat16": precision("bfloat16"),
    "float16": precision("float16"),
    "trainable": {"init": {"trainable": lambda x: getattr(x, "ndim", 0) == 2}},
    "offload": {"rule": eqxshard.offload(FSDP)},
    "zero1": {"rule": eqxshard.zero1(min_size=0)},
    "convolutions": {"make": conv_net},
    "lookup": {"make": Tokens},
    "checks": {"loss": checked_loss},
    "Muon": {"optim": optax.contrib.muon(1e-2)},
}


#: With `EQXSHARD_REWRITE=off`, which leaves types in the gradient.
REFUSED_BY_JAX = {
    "checks": "Equinox's own check is a callback, whose mesh has to be the step's",
    "BatchNorm": "the gradient of lax.pmean gives a channel the type of the batch",
    "BatchNorm, accumulated": "as above",
}


# Without rewriting, it is mostly JAX that is tested.
WITHOUT = [(name, "off") for name in ("checks", "dropout", "Muon")]
EACH = graded(
    itertools.product(CASES, ["on", "off"]),
    slow=[*((name, "on") for name in CASES), *WITHOUT],
)


@pytest.mark.parametrize("name, rewriting", EACH)
def test_trains_as_on_auto_axes(name, rewriting, monkeypatch):
    if rewriting == "off" and name in REFUSED_BY_JAX:
        pytest.skip(REFUSED_BY_JAX[name])
    monkeypatch.setenv("EQXSHARD_REWRITE", rewriting)
    explicit, auto = [run(kind, **CASES[name])[0] for kind in (True, False)]
    rtol = 5e-3 if name in ("float16", "bfloat16") else 1e-6
    np.testing.assert_allclose(explicit, auto, rtol=rtol)


def test_a_check_that_fails_raises_and_does_not_hang():
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        run(True, loss=checked_loss, data=[{"x": np.full((16, 4), 200, np.float32)}])


def test_constants_that_are_computed_while_tracing_need_set_mesh():
    class Rotated(Net):
        rope: nn.RotaryPositionalEmbedding

        def __init__(self, key):
            super().__init__(key)
            # Equinox keeps its constants for all models of one size.
            self.rope = nn.RotaryPositionalEmbedding(4, theta=123.0, dtype=jnp.float32)

        def __call__(self, x, key=None):
            return self.rope(super().__call__(x)[None])[0]

    # Clear the table, which a model on other axes may have left.
    nn._embedding.internal_rope_embedding_cache.clear()
    with pytest.raises(ValueError, match="AbstractMesh"):
        run(True, Rotated)
    with jax.set_mesh(mesh_of(True)):
        found, _ = run(True, Rotated)
    nn._embedding.internal_rope_embedding_cache.clear()
    np.testing.assert_allclose(found, run(False, Rotated)[0], rtol=1e-6)
    nn._embedding.internal_rope_embedding_cache.clear()


def test_weights_go_between_the_kinds_of_axes(tmp_path):
    _, state = run(True)
    eqxshard.save_weights(tmp_path / "w.safetensors", state.model)
    load = ft.partial(eqxshard.load_weights, tmp_path / "w.safetensors")
    for explicit in (True, False):
        mesh = mesh_of(explicit)
        loaded = eqxshard.init_state(
            Net, optax.sgd(1e-2), key=jax.random.key(1), mesh=mesh, rule=FSDP, load=load
        )
        weight = loaded.model.first.weight
        assert weight.sharding.mesh == mesh
        np.testing.assert_array_equal(weight, state.model.first.weight)


def scale(example, rng):
    return {"x": example["x"] * np.float32(rng.random())}


def test_explain_and_random_transforms_of_examples():
    rows = grain.MapDataset.source([{"x": x} for x in batches()[0]["x"]])
    dataset = rows.seed(0).random_map(scale)
    found = []
    for explicit in (True, False):
        mesh = mesh_of(explicit)
        loader = eqxshard.Loader(dataset, batch_size=8, mesh=mesh, epochs=1)
        losses, state = run(explicit, data=[*loader])
        found.append((losses, str(eqxshard.explain(state.model, mesh, FSDP))))
    assert found[0] == found[1]


def test_the_first_value_that_is_not_finite_is_found():
    mesh = mesh_of(True)
    optim = optax.adam(1e-2)
    state = eqxshard.init_state(Net, optim, key=jax.random.key(0), mesh=mesh, rule=FSDP)
    batch = next(iter(make_loader(mesh=mesh)))

    def broken(model, batch, key):
        return jnp.log(loss_fn(model, batch, key) * 0 - 1)

    step = eqxshard.make_train_step(loss_fn, optim)
    assert eqxshard.first_nonfinite(step, state, batch) is None
    found = eqxshard.first_nonfinite(eqxshard.make_train_step(broken, optim), state, batch)
    assert found is not None and found.line is not None
    assert (found.operation, found.rows) == ("log", (*range(8),))
    assert found.line.endswith(
        f":{broken.__code__.co_firstlineno + 1} ({broken.__qualname__})"
    )


def test_a_run_goes_on_on_the_other_kind_of_axes(tmp_path):
    config = dataclasses.replace(CONFIG, devices=None)
    train = ft.partial(train_run, make_optim=make_sgd)
    expected = train(tmp_path / "expected", config, mesh=mesh_of(False), rule=FSDP)
    train(tmp_path / "run", config, mesh=mesh_of(True), rule=FSDP, epochs=1)
    config = dataclasses.replace(config, resume="yes")
    result = train(tmp_path / "run", config, mesh=mesh_of(False), rule=FSDP)
    assert int(result.state.step) == STEPS
    config = dataclasses.replace(config, resume="no")
    whole = train(tmp_path / "whole", config, mesh=mesh_of(True), rule=FSDP)
    assert AxisType.Explicit in whole.state.step.sharding.mesh.axis_types
    for run in (result, whole):
        assert run.metrics == pytest.approx(expected.metrics, rel=1e-5)
