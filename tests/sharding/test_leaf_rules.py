from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from sharding_helpers import (
    fsdp,
    make_mesh,
    opt_specs,
    shapes,
    spec_of,
    specs,
    struct,
)

import eqxshard

SIZES = (1, 2, 4, 8)


# fsdp


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
        ((0, 4), P()),  # empty
        ((), P()),
    ],
)
def test_fsdp_splits_the_largest_dim_that_divides(shape, spec):
    assert spec_of(fsdp(min_size=0), *shape) == spec


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
    found = eqxshard.shardings(tree, mesh, rule)
    placed = eqxshard.filter_shard(tree, found)
    explained = {leaf.path: leaf for leaf in eqxshard.explain(tree, mesh, rule).leaves}
    for name, whole in tree.items():
        parts = [shard.data.nbytes for shard in placed[name].addressable_shards]
        divides = any(n and n % size == 0 for n in whole.shape)
        split = divides and whole.size >= max(min_size, 1)
        assert parts == [whole.nbytes // (size if split else 1)] * 8
        assert explained[name].bytes_per_device == parts[0]
        assert explained[name].bytes_whole == whole.nbytes
        assert sum(entry is not None for entry in found[name].spec) == split


def test_fsdp_splits_a_vocabulary_last():
    def make(vocab, embed):
        return eqx.filter_eval_shape(nn.Embedding, vocab, embed, key=jax.random.key(0))

    def spec(vocab, embed, rule):
        return specs(rule, make_mesh(4, 2), make(vocab, embed))["weight"]

    assert spec(64, 8, fsdp()) == P(None, "fsdp")
    # Its features do not divide, or are split already.
    assert spec(64, 6, fsdp()) == P("fsdp")
    split = eqxshard.combine(eqxshard.by_dim({"embed": "tensor"}), fsdp())
    assert spec(64, 8, split) == P("fsdp", "tensor")


# by_path


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
    found = eqxshard.shardings(
        tree, make_mesh(), eqxshard.first_match(rule, eqxshard.replicate())
    )
    assert found["layers"][0]["attention"]["q"]["weight"].spec == P("tensor")
    assert found["layers"][0]["attention"]["q"]["bias"].spec == P()
    assert found["layers"][1]["weight"].spec == P("fsdp")
    assert found["layers"][1]["bias"].spec == P("fsdp")
    assert found["deep"]["layers"][1].spec == P()  # `^` anchors
    assert rule("layers.0.attention.q.bias", struct(8), make_mesh()) is None


# by_dim


def by_dim(axes):
    """The leaves that `by_dim` does not claim are whole."""
    return eqxshard.first_match(eqxshard.by_dim(axes), eqxshard.replicate())


class Attention(eqx.Module):
    query: Float[Array, "heads head_dim embed"]
    output: Float[Array, "embed heads head_dim"]


class Decoder(eqx.Module):
    norm: nn.LayerNorm
    attention: Attention
    up: Annotated[nn.Linear, "mlp embed"]
    down: Annotated[nn.Linear, "embed mlp"]
    extra: Float[Array, " embed"] | None = None


class Transformer(eqx.Module):
    embedding: nn.Embedding
    blocks: Decoder | list[Decoder]
    head: "Float[Array, 'embed vocab'] | None"


def make_block(key):
    return Decoder(
        nn.LayerNorm(8),
        Attention(jnp.ones((4, 2, 8)), jnp.ones((8, 4, 2))),
        nn.Linear(8, 16, key=key),
        nn.Linear(16, 8, key=key),
        jnp.ones(8),
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_by_dim_splits_a_transformer(stacked):
    keys = jax.random.split(jax.random.key(0), 4)
    make_blocks = (
        eqx.filter_vmap(make_block) if stacked else lambda keys: [make_block(keys[0])]
    )
    model = shapes(
        lambda: Transformer(
            nn.Embedding(32, 8, key=jax.random.key(0)), make_blocks(keys), jnp.ones((8, 32))
        )
    )
    axes = {"mlp": "tensor", "heads": "tensor", "vocab": ("tensor",), "embed": "fsdp"}
    mesh = eqxshard.make_mesh(fsdp=2, tensor=2, stage=2)
    if stacked:
        axes |= {"layers": "stage"}
    where = "blocks" if stacked else "blocks.0"
    lead = ("stage",) if stacked else ()
    assert specs(eqxshard.by_dim(axes), mesh, model) == {
        "embedding.weight": P("tensor", "fsdp"),
        "head": P("fsdp", "tensor"),
        f"{where}.norm.weight": P(*lead, "fsdp"),
        f"{where}.norm.bias": P(*lead, "fsdp"),
        f"{where}.attention.query": P(*lead, "tensor", None, "fsdp"),
        f"{where}.attention.output": P(*lead, "fsdp", "tensor"),
        f"{where}.up.weight": P(*lead, "tensor", "fsdp"),
        f"{where}.up.bias": P(*lead, "tensor"),
        f"{where}.down.weight": P(*lead, "fsdp", "tensor"),
        f"{where}.down.bias": P(*lead, "fsdp"),
        f"{where}.extra": P(*lead, "fsdp"),
    }


class Careless(eqx.Module):
    """Annotations with too many dims, with a name that nothing defines, and with both."""

    head: nn.Linear
    delta: Float[Array, " state"]
    lost: "Nothing"  # pyright: ignore # noqa: F821
    renamed: Annotated["Nothing", "mlp embed"]  # pyright: ignore # noqa: F821
    linear: Annotated[nn.Linear, "a b c"]

    def __init__(self, key):
        self.head = self.renamed = self.linear = nn.Linear(4, 8, key=key)
        self.lost = [nn.Linear(4, 8, key=key)]
        self.delta = jnp.ones(())


def careless(rule):
    model = eqx.filter_eval_shape(Careless, jax.random.key(0))
    rule = eqxshard.first_match(rule, eqxshard.replicate())
    explained = eqxshard.explain(model, make_mesh(), rule)
    return {leaf.path: leaf.spec for leaf in explained.leaves}


LINEAR = eqxshard.by_path({"^linear": P()})


@pytest.mark.filterwarnings("ignore:by_dim leaves out")
def test_a_wrong_annotation_is_an_error_only_where_the_rule_needs_it():
    rule = eqxshard.first_match(LINEAR, eqxshard.by_dim({"in": "tensor"}))
    with pytest.warns(UserWarning, match=r"Careless\.delta: 'state' has more dims"):
        found = careless(rule)
    # Arrays below a name that nothing defines have names of their own.
    split = {"head.weight", "lost.0.weight", "renamed.weight"}
    assert {path for path, spec in found.items() if spec == P(None, "tensor")} == split
    assert all(found[path] == P() for path in found.keys() - split)
    for name, message in {
        "state": r"Careless\.delta: .* has more dims than the array",
        "mlp": r"Careless\.renamed: .* cannot be resolved",
        "in": r"Careless\.linear: 'a b c' names 3 dims, and Linear has 2",
        "b": r"Careless\.linear: 'a b c' names 3 dims, and Linear has 2",
    }.items():
        with pytest.raises(ValueError, match=message):
            careless(eqxshard.by_dim({name: "tensor"}))
    # An earlier rule decides about the leaf.
    rest = eqxshard.by_path({"^(delta|renamed)": P()})
    careless(eqxshard.first_match(rest, eqxshard.by_dim({"state": None, "mlp": "tensor"})))


# zero1


def test_zero1_splits_the_optimizer_state_alone():
    params, moments = opt_specs(eqxshard.zero1(min_size=64))
    assert params == {"up": P(), "down": P(), "bias": P()}
    assert moments == {"up": P("data"), "down": P(None, "data"), "bias": P()}
    _, moments = opt_specs(eqxshard.zero1(min_size=64, axis=("data", "fsdp")))
    assert moments["up"] == P(("data", "fsdp"))
