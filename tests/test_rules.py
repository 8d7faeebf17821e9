import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, part
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

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


def test_what_makes_a_rule_is_not_one():
    with pytest.raises(
        TypeError, match=r"fsdp makes a rule and is not one; call it, as fsdp\(\)"
    ):
        eqxshard.shardings({"w": np.ones(8)}, eqxshard.make_mesh(), eqxshard.fsdp)  # pyright: ignore


# Rules by the names of dims


class Block(eqx.Module):
    up: Float[jax.Array, "mlp embed"]
    down: Float[jax.Array, "embed mlp"]
    bias: Float[jax.Array, " mlp"]
    norm: eqx.nn.LayerNorm
    table: jax.Array

    def __init__(self, key=None):
        self.up, self.down = jnp.zeros((32, 8)), jnp.zeros((8, 32))
        self.bias, self.norm, self.table = jnp.zeros(32), eqx.nn.LayerNorm(8), jnp.zeros(8)


BLOCK = Block()


def specs(rule, mesh=None, tree: Any = BLOCK):
    places = eqxshard.shardings(tree, mesh or make_mesh(2, 2), rule)
    leaves = jax.tree_util.tree_leaves_with_path(places)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x.spec for p, x in leaves}


def rule_error(rule, mesh=None, tree: Any = BLOCK):
    with pytest.raises(ValueError) as info:
        eqxshard.shardings(tree, mesh or make_mesh(2, 2), rule)
    return str(info.value)


def test_by_dim_reads_annotations():
    assert specs(eqxshard.by_dim({"mlp": "tensor", "embed": "fsdp"})) == {
        "up": P("tensor", "fsdp"),
        "down": P("fsdp", "tensor"),
        "bias": P("tensor"),
        "norm.weight": P("fsdp"),
        "norm.bias": P("fsdp"),
        "table": P(),
    }


def test_by_dim_takes_several_axes_for_a_dim_and_none():
    found = specs(eqxshard.by_dim({"mlp": ("fsdp", "tensor"), "embed": None}))
    assert found["up"] == P(("fsdp", "tensor"))
    assert found["down"] == P(None, ("fsdp", "tensor"))
    assert found["norm.weight"] == P()


def test_by_dim_claims_only_leaves_that_have_one_of_its_dims():
    rest = eqxshard.by_path({".*": P("fsdp")})
    found = specs(eqxshard.first_match(eqxshard.by_dim({"mlp": None}), rest))
    assert found["up"] == found["down"] == found["bias"] == P()
    assert found["norm.weight"] == found["table"] == P("fsdp")


def test_stacked_modules_have_a_dim_of_layers():
    blocks = eqx.filter_vmap(Block)(jnp.arange(4))
    found = specs(eqxshard.by_dim({"layers": "fsdp", "mlp": "tensor"}), tree=blocks)
    assert found["up"] == P("fsdp", "tensor")
    assert found["down"] == P("fsdp", None, "tensor")


def test_a_rule_of_ones_own_reads_the_dims_too():
    def rule(path, leaf, mesh):
        return P("tensor") if leaf.dims and leaf.dims[0] == "mlp" else None

    assert [path for path, spec in specs(rule).items() if spec] == ["up", "bias"]


def test_a_dim_that_no_leaf_has_is_an_error_if_it_looks_misspelt():
    general = {"mlp": "tensor", "heads": "tensor", "vocab": "tensor"}
    assert specs(eqxshard.by_dim(general))["up"] == P("tensor")
    message = rule_error(eqxshard.by_dim({"mlp": "tensor", "embd": "fsdp"}))
    assert "no leaf has a dim 'embd'; did you mean 'embed'?" in message
    message = rule_error(eqxshard.by_dim({"heads": "tensor"}))
    assert "no leaf has a dim 'heads'; their dims are embed, mlp." in message
    message = rule_error(eqxshard.by_dim({"mlp": "tensor"}), tree={"w": jnp.zeros(8)})
    assert "their dims are not annotated" in message


def test_an_axis_that_the_mesh_does_not_have_is_an_error_of_by_dim():
    message = rule_error(eqxshard.by_dim({"mlp": "tensr"}))
    assert "by_dim names the axis 'tensr'" in message and "did you mean 'tensor'" in message
    # Even if no leaf has the dim.
    assert "'tensr'" in rule_error(eqxshard.by_dim({"mlp": "tensor", "heads": "tensr"}))


def test_a_dim_that_does_not_divide_is_an_error_of_by_dim():
    tree = Block()
    tree = eqx.tree_at(lambda block: block.bias, tree, jnp.zeros(6))
    message = rule_error(eqxshard.by_dim({"mlp": "tensor"}), make_mesh(1, 4), tree)
    assert "bias (6,): P('tensor',) splits dim 0 of size 6 over tensor=4" in message


def test_a_path_that_no_leaf_has_is_an_error_with_its_neighbour():
    rule = eqxshard.by_path({"^up$": P("tensor"), r"nrm\.weight": P()})
    message = rule_error(rule)
    assert r"by_path: 'nrm\\.weight' matches no leaf; did you mean 'norm', as in" in message
    message = rule_error(eqxshard.first_match(eqxshard.by_path({"zzz": P()}), fsdp()))
    assert "'zzz' matches no leaf; the paths are 'up', 'down', 'bias', ..." in message
    # There is nothing to be misspelt in a PyTree without arrays.
    assert eqxshard.shardings({"a": None}, make_mesh(), rule) == {"a": None}


def test_a_parameter_cannot_be_unconstrained():
    message = rule_error(eqxshard.by_path({"up": P(P.UNCONSTRAINED)}))
    assert "by_path('up') leaves a dim of up UNCONSTRAINED" in message


def test_zero1_names_an_axis_that_the_mesh_does_not_have():
    message = rule_error(eqxshard.zero1(axis="dta"))
    assert "names the axis 'dta'" in message and "did you mean 'data'" in message


# Rules combined


def test_combine_gives_fsdp_what_is_left():
    rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), fsdp(min_size=16))
    assert specs(rule) == {
        "up": P("tensor", "fsdp"),
        "down": P("fsdp", "tensor"),
        "bias": P(("tensor", "fsdp")),
        "norm.weight": P(),
        "norm.bias": P(),
        "table": P(),
    }


def test_combine_leaves_what_is_split_over_the_axis_already():
    rule = eqxshard.combine(eqxshard.by_dim({"embed": "fsdp"}), fsdp())
    found = specs(rule)
    assert found["up"] == P(None, "fsdp") and found["bias"] == P("fsdp")


def test_combine_says_who_decided_and_why_not():
    rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), fsdp(min_size=200))
    rows = {
        leaf.path: leaf for leaf in eqxshard.explain(BLOCK, make_mesh(2, 2), rule).leaves
    }
    assert rows["up"].rule == "by_dim(mlp: tensor) + fsdp()" and not rows["up"].note
    assert rows["bias"].rule == "by_dim(mlp: tensor)"
    assert rows["bias"].note == "fsdp() size 32, below min_size=200"
    assert rows["table"].rule == "fsdp()"


def test_two_rules_that_split_over_the_same_axis_are_an_error():
    rule = eqxshard.combine(
        eqxshard.by_dim({"mlp": "tensor"}), eqxshard.by_path({"up": P(None, "tensor")})
    )
    message = rule_error(rule)
    assert "up (32, 8): both by_dim(mlp: tensor) and by_path('up') split it" in message
    assert "'tensor', which can split one dim only; leave it to one of the two" in message


def test_rules_of_ones_own_see_what_is_taken():
    seen = {}

    def rule(path, leaf, mesh):
        seen[path] = leaf.sharding.spec if leaf.sharding else None
        return None

    eqxshard.shardings(
        BLOCK, make_mesh(2, 2), eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), rule)
    )
    assert seen["up"] == P("tensor") and seen["down"] == P(None, "tensor")
    assert seen["table"] is None


@settings(deadline=None, max_examples=100)
@given(
    shape=st.lists(st.integers(1, 5).map(lambda n: 2**n), max_size=3).map(tuple),
    split=st.integers(0, 2),
    min_size=st.integers(0, 100),
    fsdp_size=st.sampled_from((1, 2, 4)),
)
def test_combined_rules_split_as_much_as_each_alone(shape, split, min_size, fsdp_size):
    mesh = make_mesh(fsdp_size, 2)
    spec = P(*[None] * split, "tensor") if split < len(shape) else P()
    tensor = eqxshard.by_path({"w": spec})
    rule = eqxshard.combine(tensor, fsdp(min_size))
    whole = np.zeros(shape, np.int8)
    tree = {"w": whole}
    place = eqxshard.shardings(tree, mesh, rule)["w"]
    expected = whole.size // (2 if spec else 1)
    left = NamedSharding(mesh, spec).shard_shape(shape)
    if whole.size >= min_size and any(n % fsdp_size == 0 for n in left):
        expected //= fsdp_size
    assert math.prod(place.shard_shape(shape)) == expected
    # What was split over tensor stays split as it was.
    used = [axes for axes in place.spec if axes]
    assert all(axes[0] == "tensor" for axes in used if isinstance(axes, tuple))


# Rules for the optimizer's state


def opt_specs(rule, mesh=None):
    state = eqxshard.init_state(
        Block,
        lenient(optax.adam(0.1)),
        key=jax.random.key(0),
        mesh=mesh or make_mesh(2, 2),
        rule=rule,
    )
    mu = state.opt_state[0].mu
    return (
        {name: getattr(state.model, name).sharding.spec for name in ("up", "down", "bias")},
        {name: getattr(mu, name).sharding.spec for name in ("up", "down", "bias")},
    )


def test_zero1_splits_the_optimizer_state_alone():
    params, moments = opt_specs(eqxshard.zero1(min_size=64))
    assert params == {"up": P(), "down": P(), "bias": P()}
    assert moments == {"up": P("data"), "down": P(None, "data"), "bias": P()}
    _, moments = opt_specs(eqxshard.zero1(min_size=64, axis=("data", "fsdp")))
    assert moments["up"] == P(("data", "fsdp"))


def test_zero1_combines_with_tensor_parallelism():
    rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.zero1(min_size=64))
    params, moments = opt_specs(rule)
    assert params == {"up": P("tensor"), "down": P(None, "tensor"), "bias": P("tensor")}
    assert moments == {
        "up": P("tensor", "data"),
        "down": P("data", "tensor"),
        "bias": P("tensor"),
    }


def test_first_match_asks_the_same_rule_about_the_optimizer_state():
    rule = eqxshard.first_match(eqxshard.by_dim({"embed": "fsdp"}), eqxshard.zero1(1))
    params, moments = opt_specs(rule)
    assert params["up"] == moments["up"] == P(None, "fsdp")
    assert (params["bias"], moments["bias"]) == (P(), P("data"))
