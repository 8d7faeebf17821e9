from typing import Any

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, make_mesh

import eqxshard
from eqxshard.sharding._leaves import stacked_depth

KEY = jax.random.key(0)
OPTIM = lenient(optax.sgd(0.1))
WHERE: dict[str, Any] = {"mesh": make_mesh("data=2"), "rule": eqxshard.replicate()}
PLACE = jax.NamedSharding(WHERE["mesh"], jax.P())


def test_stacked_layers_have_a_depth():
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(2, 3, key=k))(jax.random.split(KEY, 5))
    assert stacked_depth(layers) == 5
    for other in ({"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.float32(0)}, {}):
        with pytest.raises(ValueError, match="without a common leading dim; stack the la"):
            stacked_depth(other)


class Scale(eqx.Module):
    """A model with a field for anything."""

    scale: Any
    names: Any

    def __call__(self, x):
        return self.scale * x


def init(make: Any):
    return eqxshard.init_state(lambda key: make(), OPTIM, key=KEY, **WHERE)


@pytest.fixture(scope="module")
def state():
    return init(lambda: Scale(jnp.ones(2), np.ones(2, np.float32)))


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory, state):
    checkpointer = eqxshard.Checkpointer(tmp_path_factory.mktemp("checkpoints"))
    checkpointer.save(state)
    checkpointer.wait()
    return checkpointer


def loss_fn(model, batch, key):
    return jax.vmap(model)(batch["x"]).sum(-1)


BATCH = {"x": np.ones((4, 2), np.float32)}
STEP = eqxshard.make_train_step(loss_fn, OPTIM)
EVAL_STEP = eqxshard.make_eval_step(lambda model, batch: {"x": batch["x"][:, 0]}, **WHERE)


@pytest.mark.parametrize(
    "names",
    [
        np.array(["a", None], dtype=object),
        np.array(["a", "b"]),
        np.str_("a"),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros(2, [("x", np.float32)]),
        np.ones(2, np.longdouble),
        np.ones(2, ">f4"),
    ],
    ids=lambda names: str(names.dtype),
)
def test_arrays_that_jax_has_no_type_for_are_named(state, checkpointer, unannotated, names):
    model = Scale(jnp.ones(2), names)
    odd = eqx.tree_at(lambda s: s.model.names, state, names)
    for use in (
        lambda: init(lambda: model),
        lambda: eqxshard.shardings(model, **WHERE),
        lambda: eqxshard.explain(model, **WHERE),
        lambda: eqxshard.filter_shard(model, PLACE),
        lambda: eqxshard.filter_jit(lambda model: model.scale)(model),
        lambda: STEP(odd, BATCH),
        lambda: EVAL_STEP(model, BATCH),
        lambda: checkpointer.save(odd),
        lambda: checkpointer.restore(odd),
    ):
        with pytest.raises(TypeError) as error:
            use()
        says = f"names is a NumPy array of dtype {names.dtype}, which JAX does not have; "
        assert says in str(error.value) and str(error.value).count("\n") == 0


X: Any = np.arange(16).reshape(8, 2)
ODD_NUMBERS = {
    'x.astype(x.dtype.newbyteorder("="))': X.astype(">f4"),
    "x.astype(np.float64)": X.astype(np.longdouble),
    "x.astype(np.complex128)": X.astype(np.clongdouble),
    "x['a']": np.rec.fromarrays([X], dtype=[("a", np.int32, (2,))]),
}


@pytest.mark.parametrize("remedy", ODD_NUMBERS)
def test_errors_say_how_to_convert_numbers_that_jax_lacks(state, unannotated, remedy):
    x, mesh = ODD_NUMBERS[remedy], WHERE["mesh"]
    options: Any = {"batch_size": 8, "mesh": mesh, "shuffle": False}

    def load(x, **placement):
        source = eqxshard.data.ArraySource({"x": x})
        return next(iter(eqxshard.Loader(source, **options, **placement)))

    def load_records(x):
        dataset = grain.MapDataset.source(x).map(lambda row: {"x": row})
        return next(iter(eqxshard.Loader(dataset, batch_size=8, mesh=mesh)))

    def load_batches(x):
        return next(iter(eqxshard.Loader([{"x": x}], mesh=mesh)))

    def load_transformed(x):
        source = eqxshard.data.ArraySource({"i": np.arange(8)})
        return next(iter(eqxshard.Loader(source, **options, transform=lambda b: {"x": x})))

    ways = [load, load_batches, load_transformed]
    ways += [lambda x: load(x, placement="device"), lambda x: STEP(state, {"x": x})]
    ways += [lambda x: eqxshard.filter_shard({"x": x}, PLACE)]
    # NumPy has stacked the rows of others in JAX's byte order, or as scalars.
    ways += [load_records] if x.dtype.isnative and not x.dtype.names else []
    for way in ways:
        with pytest.raises(TypeError, match=r"x'? is a NumPy array of dtype .*; ") as error:
            way(x)
        assert remedy in str(error.value)
    converted = eval(remedy, {"x": x, "np": np})
    np.testing.assert_array_equal(load(converted)["x"], X)


def test_a_model_without_arrays_is_refused(state):
    says = r"the model \(Identity\) has no arrays, so there is nothing to train; give it"
    with pytest.raises(ValueError, match=says):
        init(eqx.nn.Identity)
    with pytest.raises(ValueError, match=says):
        STEP(eqx.tree_at(lambda s: s.model, state, eqx.nn.Identity()), BATCH)
