import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import part
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard


def make_mesh(fsdp=4, tensor=1):
    return eqxshard.make_mesh(fsdp=fsdp, tensor=tensor)


FSDP = eqxshard.fsdp(min_size=1)


class Model(eqx.Module):
    linear: eqx.nn.Linear
    activation: object
    table: np.ndarray
    rate: float
    missing: None = None

    def __init__(self):
        self.linear = eqx.nn.Linear(4, 8, key=jax.random.key(0))
        self.activation = jax.nn.relu
        self.table = np.arange(8)
        self.rate = 0.5


def test_a_leaf_that_the_rule_does_not_claim_is_an_error_with_both_remedies():
    tree = {"up": jnp.zeros((8, 8)), "down": jnp.zeros(8), "rest": [jnp.zeros(3)]}
    rule = eqxshard.by_path({"up": P("fsdp")})
    message = r"by_path\('up'\) does not claim down \(8,\) \(nor 1 more\); .*first_match\("
    with pytest.raises(ValueError, match=message):
        eqxshard.shardings(tree, make_mesh(), rule)


def test_filter_shard_moves_arrays_and_leaves_the_rest_alone():
    model, mesh = Model(), make_mesh()
    placed = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, FSDP))
    assert part(placed.linear.weight) == (2, 4)
    assert placed.linear.weight.sharding == NamedSharding(mesh, P("fsdp"))
    assert isinstance(placed.table, jax.Array)
    assert part(placed.table) == (2,)
    np.testing.assert_array_equal(placed.table, np.arange(8))
    np.testing.assert_array_equal(placed.linear.weight, model.linear.weight)
    assert placed.activation is jax.nn.relu
    assert placed.rate == 0.5
    assert jax.tree.structure(placed) == jax.tree.structure(model)


def test_a_prefix_with_none_leaves_arrays_where_they_are():
    mesh = make_mesh()
    tree = {"a": [np.zeros(8), jnp.zeros(4)], "b": np.zeros(8), "c": jnp.zeros(8), "d": "x"}
    split = NamedSharding(mesh, P("fsdp"))
    placed = eqxshard.filter_shard(tree, {"a": split, "b": None, "c": None, "d": split})
    assert [part(leaf) for leaf in placed["a"]] == [(2,), (1,)]
    assert placed["b"] is tree["b"]
    assert placed["c"] is tree["c"]
    assert placed["d"] == "x"


@pytest.mark.versions
def test_inside_jit_it_constrains():
    mesh = make_mesh()
    split = NamedSharding(mesh, P("fsdp"))

    @jax.jit
    def double(x):
        tree = eqxshard.filter_shard(
            {"x": 2 * x, "host": np.ones(8), "name": "x"},
            {"x": split, "host": split, "name": None},
        )
        assert tree["name"] == "x"
        return tree["x"], tree["host"]

    whole = jax.device_put(np.arange(8.0), NamedSharding(mesh, P()))
    for out in double(whole):
        assert out.sharding == split
    np.testing.assert_array_equal(double(whole)[0], 2 * np.arange(8.0))


@pytest.mark.versions
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["outside", "inside jit"])
def test_an_indivisible_dim_is_an_error_in_jit_and_out(transform):
    # JAX 0.10 would quietly replicate it inside jit.
    split = NamedSharding(make_mesh(), P("fsdp"))
    message = r"a\.0 \(6,\).* splits dim 0 of size 6 over fsdp=4.* a multiple of 4"
    with pytest.raises(ValueError, match=message):
        transform(lambda x: eqxshard.filter_shard({"a": [x]}, split))(jnp.zeros(6))


def test_what_is_not_a_sharding_or_of_another_tree_is_refused(unannotated):
    with pytest.raises(TypeError, match=r"not a sharding; write jax\.NamedSharding"):
        eqxshard.filter_shard({"a": jnp.zeros(8)}, {"a": P("fsdp")})  # pyright: ignore
    place = NamedSharding(make_mesh(), P())
    with pytest.raises(ValueError, match="not a prefix of the PyTree"):
        eqxshard.filter_shard({"a": jnp.zeros(8)}, {"b": place})


# constrain


BATCH = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)}


def loss_with(spec):
    """A loss that constrains its hidden activations, if there is a spec."""

    def loss_fn(model, batch, key):
        def one(x):
            hidden = jnp.tanh(x @ model["up"])
            if spec is not None:
                hidden = eqxshard.constrain({"hidden": [hidden]}, spec)["hidden"][0]
            return jnp.sum((hidden @ model["down"]) ** 2)

        return jax.vmap(one)(batch["x"])

    return loss_fn


def train_step_and_state(spec, width=32):
    """A step and a state for the loss with this spec, and a model of this width."""
    mesh, rule, optim = make_mesh(fsdp=1, tensor=4), eqxshard.replicate(), optax.sgd(0.1)

    def make_model(key):
        up = jax.random.normal(key, (6, width))
        return {"up": up, "down": jnp.ones((width, 3))}

    state = eqxshard.init_state(
        make_model, optim, key=jax.random.key(0), mesh=mesh, rule=rule
    )
    return eqxshard.make_train_step(loss_with(spec), optim, mesh=mesh, rule=rule), state


def test_without_a_mesh_constrain_does_nothing():
    x = {"a": jnp.zeros(7)}
    assert eqxshard.constrain(x, P("tensor")) is x
    out = jax.jit(lambda x: eqxshard.constrain(x, P("no such axis")))(x["a"])
    assert out.shape == (7,)
    # Arrays on a mesh do not make a context.
    placed = jax.device_put(np.zeros(8), NamedSharding(make_mesh(), P("fsdp")))
    out = jax.jit(lambda x: eqxshard.constrain(x, P("data")))(placed)
    assert out.sharding.spec == P("fsdp")


@pytest.mark.versions
@pytest.mark.parametrize("spec", [None, P("tensor")])
def test_constrain_splits_an_activation_inside_a_train_step(spec):
    train_step, state = train_step_and_state(spec)
    text = train_step.lower(state, BATCH).compile().as_text() or ""
    # Each device has 4 rows, of 32 features or of a quarter of them.
    assert ("f32[4,8]" in text) == (spec is not None)


@pytest.mark.parametrize(
    "spec, width, message",
    [
        (P("tensor"), 30, r"hidden\.0 \(30,\).* splits dim 0 of size 30 over tensor=4"),
        (P("tensr"), 32, "did you mean 'tensor'"),
        (P(None, "tensor"), 32, "has 2 entries and the array 1 dims"),
    ],
)
def test_constrain_refuses_what_does_not_fit(spec, width, message):
    train_step, state = train_step_and_state(spec, width)
    with pytest.raises(ValueError, match=message):
        train_step(state, BATCH)


@pytest.mark.versions
@pytest.mark.parametrize("spec", [P("fsdp"), P("fsdp", "tensor")])
def test_axes_that_code_is_per_device_along_are_left_out(spec):
    along_fsdp = jax.shard_map(
        lambda x: eqxshard.constrain(jnp.sin(x), spec),
        mesh=make_mesh(fsdp=4, tensor=2),
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
        axis_names={"fsdp"},
    )
    # Four rows, which do not divide over `fsdp` once more.
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    np.testing.assert_allclose(jax.jit(along_fsdp)(x), np.sin(x), rtol=1e-5)
    text = jax.jit(along_fsdp).lower(x).compile().as_text() or ""
    assert ("f32[1,4]" in text) == (spec == P("fsdp", "tensor"))
