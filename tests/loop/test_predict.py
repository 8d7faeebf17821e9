import os
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RULES, Model, copied, lenient, make_loader, make_mesh, source
from process_helpers import finished

import eqxshard

KEY = jax.random.key(0)
MESH = "data=2,fsdp=4"
OPTIM = lenient(optax.sgd(0.1))


@pytest.fixture(scope="module")
def state():
    return eqxshard.init_state(
        Model, OPTIM, key=KEY, mesh=make_mesh(MESH), rule=RULES["fsdp"]
    )


def outputs(model, batch):
    return {"out": jax.vmap(model)(batch["x"]), "index": batch["index"]}


def loader_of(**options):
    return make_loader(**{"mesh": make_mesh(MESH), "shuffle": False, **options})


@pytest.fixture(scope="module")
def expected(state):
    model = eqx.nn.inference_mode(jax.tree.map(host, state.model))
    return np.asarray(jax.vmap(model)(source().gather(np.arange(100))["x"]))


def host(leaf):
    return jnp.asarray(np.asarray(leaf)) if eqx.is_array(leaf) else leaf


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 104}, {"shuffle": True, "seed": 3}, {"placement": "device"}],
    ids=str,
)
def test_outputs_are_those_of_each_example_in_order(state, expected, options):
    loader = loader_of(**options)
    loader.seek(2)
    found = eqxshard.predict(state.model, outputs, loader)
    assert found["index"].tolist() == [*range(100)]
    assert isinstance(found["out"], np.ndarray) and found["out"].dtype == np.float32
    np.testing.assert_allclose(found["out"], expected, rtol=1e-5, atol=1e-6)


def test_outputs_are_of_a_whole_epoch_after_the_batch_size_changed(state):
    before = loader_of(shuffle=True)
    before.seek(2)
    loader = loader_of(shuffle=True, batch_size=16)
    loader.restore(before.state())
    found = eqxshard.predict(state.model, outputs, loader)
    assert found["index"].tolist() == [*range(100)]
    assert loader.state()["step"] == 2


def test_the_function_is_compiled_once(state):
    traced = []

    def fn(model, batch):
        traced.append(batch["x"].shape)
        return jax.vmap(model)(batch["x"])

    first = eqxshard.predict(state.model, fn, loader_of())
    again = eqxshard.predict(state.model, fn, loader_of())
    assert traced == [(32, 8)]
    np.testing.assert_array_equal(first, again)


class Shifted(eqx.Module):
    """A model with a state that it adds."""

    scale: jax.Array
    shift: eqx.nn.StateIndex

    def __init__(self, key):
        self.scale = jnp.full(8, 2.0)
        self.shift = eqx.nn.StateIndex(jnp.float32(5))

    def __call__(self, x, state):
        return self.scale * x + state.get(self.shift).astype(x.dtype)


def test_a_model_with_state_in_other_precision():
    mesh, rule = make_mesh(MESH), RULES["fsdp"]
    state = eqxshard.init_state(
        eqx.nn.make_with_state(Shifted), OPTIM, key=KEY, mesh=mesh, rule=rule
    )
    seen = []

    def fn(pair, batch):
        model, model_state = pair
        seen.append((model.scale.dtype, batch["x"].dtype))
        out = jax.vmap(model, in_axes=(0, None))(batch["x"], model_state)
        return out.astype(jnp.float32)

    precision = eqxshard.Precision(jnp.bfloat16)
    both = state.model, state.model_state
    found = eqxshard.predict(both, fn, loader_of(), precision=precision)
    assert seen == [(jnp.bfloat16, jnp.bfloat16)]
    x = source().gather(np.arange(100))["x"]
    np.testing.assert_allclose(found, 2 * x + 5, rtol=0.02, atol=0.02)


def gone(state):
    model = copied(state.model)
    model.first.weight.delete()
    return model


def mean(model, batch):
    return {"mean": batch["x"].mean()}


#: The model, the function, options of the loader, and the error.
REFUSED = {
    "state": (lambda state: state, outputs, {}, r"give it state\.model"),
    "drop": (lambda state: state.model, outputs, {"remainder": "drop"}, "96 of 100 exam"),
    "shape": (lambda state: state.model, mean, {}, r"mean of fn is of shape \(\) for a ba"),
    "text": (lambda state: state.model, lambda *_: {"x": ""}, {}, "x of fn is a str for"),
    "donated": (gone, outputs, {}, "was donated to an earlier call, or deleted; take"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_predicted_is_refused(state, kind):
    model_of, fn, options, says = REFUSED[kind]
    with pytest.raises((TypeError, ValueError), match=says):
        eqxshard.predict(model_of(state), fn, loader_of(**options))


SCRIPT = """
import equinox as eqx, jax, numpy as np, optax
import eqxshard

eqxshard.initialize()
mesh, rule = eqxshard.make_mesh(data=2, fsdp=2), eqxshard.fsdp(min_size=1)
make_model = lambda key: eqx.nn.MLP(4, 8, 16, 1, key=key)
key = jax.random.key(0)
state = eqxshard.init_state(make_model, optax.sgd(0.1), key=key, mesh=mesh, rule=rule)
data = {"x": np.arange(120, dtype=np.float32).reshape(30, 4) / 100, "index": np.arange(30)}
loader = eqxshard.Loader(eqxshard.data.ArraySource(data), batch_size=8, mesh=mesh)

def fn(model, batch):
    return jax.vmap(model)(batch["x"]), batch["index"]

out, index = eqxshard.predict(state.model, fn, loader)
expected = jax.vmap(make_model(key))(data["x"])
print(index.tolist() == [*range(30)] and np.allclose(out, expected, atol=1e-6))
"""


@pytest.mark.slow
def test_every_process_gets_all_outputs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "eqxshard.launch", "--processes=2"]
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    status, out, err = finished([*command, "--devices-per-process=2", script], env=env)
    assert status == 0, out + err
    assert out.count("True") == 2
