from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P

import eqxshard

MESH = eqxshard.make_mesh(data=2, fsdp=4)
WHOLE = P()
ROWS = P(("data", "fsdp"))
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def make_model():
    return eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))


def identity(*args):
    return args


def shard_map(
    fn: Any = identity,
    in_specs: Any = WHOLE,
    out_specs: Any = WHOLE,
    mesh: Any = MESH,
    **kwargs: Any,
) -> Any:
    return eqxshard.filter_shard_map(fn, mesh, in_specs, out_specs, **kwargs)


# Filtering


@pytest.mark.versions
def test_arrays_are_split_and_the_rest_passes_through():
    seen = []

    def fn(model, batch, activation, name, nothing):
        seen.append((batch["x"].shape, batch["scale"], activation, name, nothing))
        y = batch["scale"] * activation(jax.vmap(model)(batch["x"]))
        total = jax.lax.psum(jnp.sum(y), ("data", "fsdp"))
        return {"y": y, "total": total}, model, activation, name, nothing

    model = make_model()
    batch = {"x": X, "scale": 2}
    mapped = shard_map(
        fn, (P(), ROWS, None, P(), P()), ({"y": ROWS, "total": P()}, P(), P(), P(), None)
    )
    expected = 2 * jnp.tanh(jax.vmap(model)(jnp.asarray(X)))
    for call in (mapped, eqxshard.filter_jit(mapped)):
        out, same_model, *rest = call(model, batch, jnp.tanh, "name", None)
        np.testing.assert_allclose(out["y"], expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(out["total"], jnp.sum(expected), rtol=1e-5)
        assert eqx.tree_equal(same_model, model)
        assert rest == [jnp.tanh, "name", None]
    assert seen == [((2, 4), 2, jnp.tanh, "name", None)] * 2


def test_the_mesh_of_the_context():
    mapped = shard_map(lambda x: x + jax.lax.axis_size("data"), ROWS, ROWS, None)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(mapped(X), X + 2)
        np.testing.assert_array_equal(jax.jit(mapped)(X), X + 2)


@pytest.mark.versions
def test_the_mesh_of_the_step_inside_a_step():
    def squares(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2, axis=-1)

    def per_device(model, x):
        assert x.shape == (2, 4)
        return squares(model, x)

    def loss_fn(model, batch, key):
        return shard_map(per_device, (P(), ROWS), ROWS, None)(model, batch["x"])

    rule, optim = eqxshard.fsdp(min_size=1), optax.sgd(0.125)
    state = eqxshard.init_state(
        lambda key: make_model(), optim, key=jax.random.key(0), mesh=MESH, rule=rule
    )
    train_step = eqxshard.make_train_step(loss_fn, optim, mesh=MESH, rule=rule)
    state, _ = train_step(state, {"x": X})
    model = make_model()
    grads = eqx.filter_grad(lambda model: jnp.mean(squares(model, X)))(model)
    updates = jax.tree.map(lambda grad: -grad / 8, grads)
    assert_close(state.model, eqx.apply_updates(model, updates))


# Functions that hold arrays


class Rows(eqx.Module):
    model: eqx.nn.MLP

    def __call__(self, x):
        return jax.vmap(self.model)(x)


@pytest.mark.parametrize("of", [lambda rows: rows, lambda rows: rows.__call__])
def test_a_module_is_a_function_that_every_device_has_whole(of):
    def loss(rows):
        return jnp.sum(shard_map(of(rows), ROWS, ROWS)(X) ** 2)

    rows = Rows(make_model())
    grads = eqx.filter_grad(lambda rows: jnp.sum(rows(X) ** 2))(rows)
    assert_close(eqxshard.filter_jit(eqx.filter_grad(loss))(rows), grads)


def test_the_arrays_of_a_module_are_arguments_and_not_constants():
    mapped = shard_map(Rows(make_model()), ROWS, ROWS)
    grads = eqx.filter_grad(lambda mapped: jnp.sum(mapped(X)))(mapped)
    assert_close(grads.fn, eqx.filter_grad(lambda rows: jnp.sum(rows(X)))(mapped.fn))


# Mistakes


@pytest.mark.parametrize(
    "kwargs, kind, word",
    [
        ({"in_specs": ({"x": P("fsdp")},)}, ValueError, "args.0.x (6, 4)"),
        ({"in_specs": P("fdsp")}, ValueError, "did you mean 'fsdp'"),
        ({"out_specs": ({"x": P("dta")},)}, ValueError, "did you mean 'data'"),
        ({"axis_names": {"dta"}}, ValueError, "did you mean 'data'"),
        ({"in_specs": (P(), P())}, ValueError, "2 entries for 1 positional arguments"),
        ({"in_specs": ({"y": P()},)}, ValueError, "in_specs is not a prefix of args"),
        ({"out_specs": ({"y": P()},)}, ValueError, "out_specs is not a prefix of result"),
        ({"in_specs": ({"x": None},)}, ValueError, "None for the array args.0.x"),
        ({"mesh": None}, ValueError, "filter_shard_map has no mesh"),
        ({"in_specs": {"x": P()}}, ValueError, "in_specs is not a prefix of args"),
        ({"in_specs": ("data",)}, TypeError, "in_specs.0 is a str, not a PartitionSpec"),
        ({"out_specs": ({"x": "data"},)}, TypeError, "out_specs.0.x is a str"),
    ],
)
def test_what_does_not_fit_is_named(kwargs, kind, word, unannotated):
    with pytest.raises(kind) as error:
        shard_map(**kwargs)({"x": X[:6]})
    assert word in str(error.value)
