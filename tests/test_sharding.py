import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard

SIZES = (1, 2, 4, 8)


def make_mesh(fsdp=4, tensor=1):
    return eqxshard.make_mesh(fsdp=fsdp, tensor=tensor)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def spec_of(rule, *shape, mesh=None, path="w"):
    return eqxshard.shardings({path: struct(*shape)}, mesh or make_mesh(), rule)[path].spec


def fsdp(min_size=1, axis="fsdp"):
    return eqxshard.fsdp(min_size=min_size, axis=axis)


def error(rule, *shape, path="w", mesh=None):
    with pytest.raises(ValueError) as info:
        eqxshard.shardings({path: struct(*shape)}, mesh or make_mesh(), rule)
    return str(info.value)


def part(array):
    """The shape of each device's part, if that is the same on all of them."""
    (shape,) = {shard.data.shape for shard in array.addressable_shards}
    return shape


# Rules


def test_replicate_leaves_every_leaf_whole():
    assert spec_of(eqxshard.replicate(), 8, 8) == P()
    assert spec_of(eqxshard.replicate()) == P()


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((8, 16), P(None, "fsdp")),
        ((16, 8), P("fsdp")),
        ((8, 8), P("fsdp")),  # the first of equals
        ((30, 8, 9), P(None, "fsdp")),  # 30 is larger, and does not divide
        ((3, 5, 8), P(None, None, "fsdp")),
        ((3, 5), P()),
        ((2,), P()),
        ((0, 4), P(None, "fsdp")),
        ((), P()),
    ],
)
def test_fsdp_splits_the_largest_dim_that_divides(shape, spec):
    assert spec_of(fsdp(min_size=0), *shape) == spec


def test_fsdp_leaves_small_leaves_whole():
    assert spec_of(fsdp(min_size=65), 8, 8) == P()
    assert spec_of(fsdp(min_size=64), 8, 8) == P("fsdp")
    assert spec_of(eqxshard.fsdp(), 2**9, 2**9) == P("fsdp")
    assert spec_of(eqxshard.fsdp(), 2**9, 2**9 - 4) == P()


def test_fsdp_over_another_axis():
    mesh = make_mesh(fsdp=1)
    assert spec_of(fsdp(axis="data"), 4, 8, mesh=mesh) == P(None, "data")


@pytest.mark.parametrize("size", SIZES)
def test_a_rule_holds_on_every_mesh(size):
    mesh = make_mesh(fsdp=size)
    placed = eqxshard.filter_shard(
        np.zeros((16, 3)), eqxshard.shardings(np.zeros((16, 3)), mesh, fsdp())
    )
    assert part(placed) == (16 // size, 3)


def test_by_path_searches_and_the_first_match_decides():
    rule = eqxshard.by_path(
        {r"attention.*weight$": P("tensor"), r"^layers\.1\.": P("fsdp"), "weight": P()}
    )
    tree = {
        "layers": [
            {"attention": {"q": {"weight": struct(8, 8), "bias": struct(8)}}},
            {"weight": struct(8, 8), "bias": struct(8)},
        ],
        "deep": {"layers": [struct(8), struct(8)]},
    }
    places = eqxshard.shardings(tree, make_mesh(), rule)
    assert places["layers"][0]["attention"]["q"]["weight"].spec == P("tensor")
    assert places["layers"][0]["attention"]["q"]["bias"].spec == P()
    assert places["layers"][1]["weight"].spec == P("fsdp")
    assert places["layers"][1]["bias"].spec == P("fsdp")
    assert places["deep"]["layers"][1].spec == P()  # `^` anchors
    assert rule("layers.0.attention.q.bias", struct(8), make_mesh()) is None


def test_by_path_refuses_what_is_no_expression():
    with pytest.raises(ValueError, match=r"'w\(' is not a regular expression .*escape"):
        eqxshard.by_path({"w": P(), "w(": P()})


def test_first_match_asks_in_order():
    calls = []

    def mine(path, leaf, mesh):
        calls.append(path)
        return P("tensor") if leaf.ndim == 1 else None

    rule = eqxshard.first_match(eqxshard.by_path({"a": P()}), mine, fsdp())
    mesh = make_mesh()
    tree = {"a": struct(8), "b": struct(8), "c": struct(8, 8)}
    places = eqxshard.shardings(tree, mesh, rule)
    assert [places[name].spec for name in "abc"] == [P(), P("tensor"), P("fsdp")]
    assert calls == ["b", "c"]
    nested = eqxshard.first_match(eqxshard.first_match(mine), fsdp())
    assert spec_of(nested, 8, mesh=mesh) == P("tensor")
    assert eqxshard.first_match(mine)("c", struct(8, 8), mesh) is None


def test_a_rule_is_any_function():
    seen = []

    def rule(path, leaf, mesh):
        seen.append((path, leaf.shape, leaf.dtype, mesh))

    mesh = make_mesh()
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    places = eqxshard.shardings([linear], mesh, rule)
    assert seen == [
        ("0.weight", (2, 3), jnp.float32, mesh),
        ("0.bias", (2,), jnp.float32, mesh),
    ]
    assert places[0].weight == NamedSharding(mesh, P())  # claimed by no rule


def test_rules_say_what_they_are():
    rule = eqxshard.first_match(eqxshard.by_path({"a": P(), "b": P()}), fsdp(axis="data"))
    assert repr(rule) == "first_match(by_path('a', 'b'), fsdp('data'))"
    assert repr(eqxshard.fsdp()) == "fsdp()"
    assert repr(eqxshard.replicate()) == "replicate()"


# Specs that do not fit


def test_an_unknown_axis_is_named_with_its_neighbour():
    message = error(eqxshard.by_path({"w": P("tensr")}), 8)
    assert "w (8,): P('tensr',) names the axis 'tensr'" in message
    assert "did you mean 'tensor'? its axes are stage, data, fsdp" in message
    assert "did you mean" not in error(eqxshard.by_path({"w": P("qqq")}), 8)
    message = error(fsdp(axis="fdsp"), 8)
    assert "fsdp('fdsp') names the axis 'fdsp'" in message
    assert "did you mean 'fsdp'?" in message


@pytest.mark.parametrize(
    "spec", [P("fsdp", "fsdp"), P(("fsdp", "fsdp")), P(("fsdp",), "fsdp")]
)
def test_an_axis_splits_one_dim_only(spec):
    assert "uses the axis 'fsdp' twice" in error(eqxshard.by_path({"w": spec}), 16, 16)


def test_no_more_entries_than_dims():
    message = error(eqxshard.by_path({"w": P(None, None, "fsdp")}), 8, 8)
    assert "has 3 entries and the array 2 dims; give at most one entry per dim" in message
    assert "has 1 entries and the array 0 dims" in error(lambda *_: P("fsdp"))


def test_a_dim_that_does_not_divide_is_an_error_with_its_arithmetic():
    mesh = make_mesh(fsdp=2, tensor=2)
    rule = eqxshard.by_path({"w": P(None, ("fsdp", "tensor"))})
    assert spec_of(rule, 3, 8, mesh=mesh) == P(None, ("fsdp", "tensor"))
    message = error(rule, 3, 6, mesh=mesh)
    assert "w (3, 6): P(None, ('fsdp', 'tensor')) splits dim 1 of size 6" in message
    assert "over fsdp=2 x tensor=2, which does not divide it" in message
    assert "choose a dim that is a multiple of 4, or leave this one whole" in message


def test_a_lone_array_has_a_name_in_errors():
    with pytest.raises(ValueError, match=r"^the array \(3,\): P\('fsdp',\) splits dim 0"):
        eqxshard.shardings(struct(3), make_mesh(), lambda *_: P("fsdp"))


@pytest.mark.parametrize("answer", ["fsdp", ("fsdp", None), True])
def test_an_answer_that_is_no_spec_is_named(answer):
    def rule(path, leaf, mesh):
        return answer

    message = rf"rule rule answers {re.escape(repr(answer))} for w; answer with a jax\.P"
    with pytest.raises(TypeError, match=message):
        eqxshard.shardings({"w": struct(8, 8)}, make_mesh(), rule)


@settings(deadline=None, max_examples=150)
@given(
    shapes=st.lists(st.lists(st.integers(0, 24), max_size=3).map(tuple), max_size=4),
    size=st.sampled_from(SIZES),
    min_size=st.integers(0, 200),
    axis=st.sampled_from(["fsdp", "tensor"]),
)
def test_fsdp_divides_exactly_or_leaves_whole(shapes, size, min_size, axis):
    mesh = eqxshard.make_mesh(**{axis: size})
    tree = {f"leaf{i}": np.zeros(shape, np.float16) for i, shape in enumerate(shapes)}
    rule = fsdp(min_size, axis)
    places = eqxshard.shardings(tree, mesh, rule)
    placed = eqxshard.filter_shard(tree, places)
    explained = {leaf.path: leaf for leaf in eqxshard.explain(tree, mesh, rule).leaves}
    for name, whole in tree.items():
        parts = [shard.data.nbytes for shard in placed[name].addressable_shards]
        divides = any(n and n % size == 0 for n in whole.shape)
        split = divides and math.prod(whole.shape) >= min_size
        assert parts == [whole.nbytes // (size if split else 1)] * 8
        assert explained[name].bytes_per_device == parts[0]
        assert explained[name].bytes_whole == whole.nbytes
        assert sum(entry is not None for entry in places[name].spec) == split


# shardings and filter_shard


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


def test_shardings_are_like_the_tree():
    model = Model()
    places = eqxshard.shardings(model, make_mesh(), fsdp())
    assert isinstance(places, Model)
    split = NamedSharding(make_mesh(), P("fsdp"))
    assert [places.linear.weight, places.linear.bias, places.table] == [split] * 3
    assert (places.activation, places.rate, places.missing) == (None, None, None)


def test_shapes_do_instead_of_arrays():
    mesh = make_mesh()
    shapes = eqx.filter_eval_shape(Model)
    places = eqxshard.shardings(shapes, mesh, fsdp())
    assert jax.tree.leaves(places) == jax.tree.leaves(
        eqxshard.shardings(Model(), mesh, fsdp())
    )
    # There is nothing to move, and so they come back as they are.
    assert eqx.tree_equal(eqxshard.filter_shard(shapes, places), shapes)


def test_filter_shard_moves_arrays_and_leaves_the_rest_alone():
    model, mesh = Model(), make_mesh()
    placed = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, fsdp()))
    assert part(placed.linear.weight) == (2, 4)
    assert placed.linear.weight.sharding == NamedSharding(mesh, P("fsdp"))
    assert isinstance(placed.table, jax.Array)
    assert part(placed.table) == (2,)
    np.testing.assert_array_equal(placed.table, np.arange(8))
    np.testing.assert_array_equal(placed.linear.weight, model.linear.weight)
    assert placed.activation is jax.nn.relu
    assert placed.rate == 0.5
    assert jax.tree.structure(placed) == jax.tree.structure(model)


def test_one_sharding_for_all():
    mesh = make_mesh()
    placed = eqxshard.filter_shard(Model(), NamedSharding(mesh, P("fsdp")))
    assert part(placed.linear.bias) == part(placed.table) == (2,)


def test_a_prefix_with_none_leaves_arrays_where_they_are():
    mesh = make_mesh()
    tree = {"a": [np.zeros(8), jnp.zeros(4)], "b": np.zeros(8), "c": jnp.zeros(8), "d": "x"}
    split = NamedSharding(mesh, P("fsdp"))
    placed = eqxshard.filter_shard(tree, {"a": split, "b": None, "c": None, "d": split})
    assert [part(leaf) for leaf in placed["a"]] == [(2,), (1,)]
    assert placed["b"] is tree["b"]
    assert placed["c"] is tree["c"]
    assert placed["d"] == "x"


def test_other_shardings_than_named_ones():
    device = jax.devices()[3]
    placed = eqxshard.filter_shard(np.zeros(3), jax.sharding.SingleDeviceSharding(device))
    assert placed.devices() == {device}


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


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["outside", "inside jit"])
def test_an_indivisible_dim_is_an_error_in_jit_and_out(transform):
    # JAX 0.10 would quietly replicate it inside jit.
    split = NamedSharding(make_mesh(), P("fsdp"))
    message = r"a\.0 \(6,\).* splits dim 0 of size 6 over fsdp=4.* a multiple of 4"
    with pytest.raises(ValueError, match=message):
        transform(lambda x: eqxshard.filter_shard({"a": [x]}, split))(jnp.zeros(6))


def test_what_is_not_a_sharding_is_named(unannotated):
    message = r"P\('fsdp',\) is a P.*, not a sharding; write jax\.NamedSharding"
    for bad in (P("fsdp"), {"a": P("fsdp")}):
        with pytest.raises(TypeError, match=message):
            eqxshard.filter_shard({"a": jnp.zeros(8)}, bad)


def test_shardings_of_another_tree_are_an_error():
    place = NamedSharding(make_mesh(), P())
    with pytest.raises(ValueError, match="not a prefix of the PyTree"):
        eqxshard.filter_shard({"a": jnp.zeros(8)}, {"b": place})


# constrain


BATCH = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)}


def loss_with(spec):
    """A loss that says, or not, where its hidden activations lie."""

    def loss_fn(model, batch, key):
        def one(x):
            hidden = jnp.tanh(x @ model["up"])
            if spec is not None:
                hidden = eqxshard.constrain({"hidden": [hidden]}, spec)["hidden"][0]
            return jnp.sum((hidden @ model["down"]) ** 2)

        return jax.vmap(one)(batch["x"])

    return loss_fn


def train_step_and_state(spec, width=32):
    """Of a loss with a given spec, and a model of a given width."""
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
    # Arrays on a mesh are no mesh.
    placed = jax.device_put(np.zeros(8), NamedSharding(make_mesh(), P("fsdp")))
    out = jax.jit(lambda x: eqxshard.constrain(x, P("data")))(placed)
    assert out.sharding.spec == P("fsdp")


@pytest.mark.parametrize("spec", [None, P("tensor")])
def test_constrain_splits_an_activation_inside_a_train_step(spec):
    train_step, state = train_step_and_state(spec)
    text = train_step.lower(state, BATCH).compile().as_text() or ""
    # Each device has 4 rows, of 32 features or of a quarter of them.
    assert ("f32[4,8]" in text) == (spec is not None)


def test_constrain_does_not_change_the_values():
    train_step, state = train_step_and_state(P("tensor"))
    expected = jnp.mean(loss_with(None)(jax.device_get(state.model), BATCH, None))
    _, metrics = train_step(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


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


def test_dims_are_whole_unless_named_or_unconstrained():
    mesh = make_mesh(fsdp=2, tensor=2)
    x = jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P(None, "tensor")))

    def constrained(spec):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(lambda x: eqxshard.constrain(x, spec))(x)

    assert part(constrained(P("fsdp"))) == (4, 8)
    assert part(constrained(P("fsdp", P.UNCONSTRAINED))) == (4, 4)


def test_in_per_device_code_constrain_does_nothing():
    x = np.arange(8.0)
    per_device = jax.shard_map(
        lambda x: eqxshard.constrain(2 * x, P("fsdp")),
        mesh=make_mesh(),
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
    )
    np.testing.assert_array_equal(jax.jit(per_device)(x), 2 * x)


def test_what_makes_a_rule_is_not_one():
    with pytest.raises(
        TypeError, match=r"fsdp makes a rule and is not one; call it, as fsdp\(\)"
    ):
        eqxshard.shardings({"w": np.ones(8)}, eqxshard.make_mesh(), eqxshard.fsdp)  # pyright: ignore
