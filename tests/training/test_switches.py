"""JAX's own switches for finding mistakes work on steps, and do not blame ours."""

import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RULES, lenient, make_batch, make_loader, make_mesh, squared_errors
from step_helpers import KEY, OPTIM, make

import eqxshard


def with_log(model, batch, key):
    return jnp.log(batch["x"][:, 0] - 100) + squared_errors(model, batch, key)


PRECISION = {"precision": eqxshard.Precision("bfloat16")}


@pytest.mark.versions
@pytest.mark.parametrize(
    "mesh, rule, options",
    [
        ("data=8", "replicate", {}),
        ("data=2,fsdp=4", "fsdp", {"nonfinite": "ignore"}),
        ("fsdp=8", "fsdp", PRECISION),
    ],
)
def test_debug_nans_names_the_line(mesh, rule, options, capfd):
    with jax.debug_nans(True):
        state, train_step = make(mesh, rule, with_log, lint="off", **options)
        with pytest.raises(FloatingPointError, match="encountered in log") as caught:
            train_step(state, make_batch())
    lines = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "with_log" in lines
    # Nothing was donated.
    assert not np.isnan(np.asarray(state.model.first.weight)).any()


@pytest.mark.slow
def test_debug_nans_names_the_line_on_explicit_axes(as_scripts_run):
    mesh = jax.make_mesh((8,), ("fsdp",))
    placed: dict = {"mesh": mesh, "rule": RULES["fsdp"]}

    def loss_fn(model, batch, key):
        return jnp.log(jnp.sum(jax.vmap(model)(batch["x"]), -1) * 0 - 1)

    with jax.debug_nans(True):
        state = eqxshard.init_state(
            lambda key: eqx.nn.MLP(8, 8, 32, 1, key=key), OPTIM, key=KEY, **placed
        )
        train_step = eqxshard.make_train_step(loss_fn, OPTIM, lint="off")
        with pytest.raises(FloatingPointError, match="encountered in log"):
            train_step(state, {"x": make_batch()["x"]})


class Layer(eqx.Module):
    weight: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (32, 32)) / 6

    def __call__(self, x):
        return jnp.tanh(x @ self.weight)


class Deep(eqx.Module):
    layers: Layer

    def __init__(self, key):
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(key, 3))

    def __call__(self, x):
        return eqxshard.scan_layers(self.layers, x)


# JAX looks at every object of the process for a leak, which takes ten seconds.
@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"precision": eqxshard.Precision("bfloat16")}]
)
def test_no_tracer_leaks(options):
    def loss_fn(model, batch, key):
        return jnp.sum(jax.vmap(model)(batch["x"]).astype(jnp.float32) ** 2, -1)

    rule = eqxshard.fsdp(min_size=16)
    init = {name: options[name] for name in ("precision",) if name in options}
    placed: dict = {"mesh": make_mesh("fsdp=8"), "rule": rule}
    batch = {"x": np.ones((32, 32), np.float32)}
    with jax.checking_leaks():
        state = eqxshard.init_state(Deep, OPTIM, key=KEY, **placed, **init)
        train_step = eqxshard.make_train_step(loss_fn, OPTIM, lint="off", **options)
        state, _ = train_step(state, batch)
        eval_step = eqxshard.make_eval_step(lambda m, b: {"x": loss_fn(m, b, None)})
        eval_step(state.model, batch)


@pytest.mark.versions
@pytest.mark.parametrize("placement", ["host", "device"])
def test_transfers_that_are_meant_pass_a_guard(placement):
    mesh, optim = (
        make_mesh("data=2,fsdp=4"),
        lenient(optax.inject_hyperparams(optax.adam)(1e-3)),
    )
    placed: dict = {"mesh": mesh, "rule": RULES["fsdp"]}

    def make_model(key):
        return eqx.nn.MLP(8, 4, 16, 1, key=key)

    def loss_fn(model, batch, key):
        return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, -1)

    def measure(model, batch):
        return {"x": jax.vmap(model)(batch["x"])[:, 0]}

    eval_step = eqxshard.make_eval_step(measure)
    with jax.transfer_guard("disallow"):
        state = eqxshard.init_state(make_model, optim, key=KEY, **placed)
        loader = make_loader(mesh=mesh, placement=placement)
        train_step = eqxshard.make_train_step(loss_fn, optim, lint="off")
        state = eqxshard.fit(
            state,
            train_step,
            loader,
            steps=6,
            log_every=2,
            evaluate=lambda model: eqxshard.evaluate(
                model, eval_step, make_loader(mesh=mesh, placement=placement)
            ),
        )
        eqxshard.predict(state.model, lambda m, b: b["x"], make_loader(mesh=mesh))
        # The guard still refuses the user's own transfers.
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            train_step(state, make_batch())
