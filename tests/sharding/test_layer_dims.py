"""The dims of the layers of `equinox.nn`."""

import inspect
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from equinox import nn
from jaxtyping import Array, Float
from sharding_helpers import dims, dims_error, dims_of, module, names, shapes
from sharding_helpers import struct as zeros

KEY = jax.random.key(0)
SIZES = {"in": 3, "out": 4, "mlp": 6, "embed": 6, "heads": 10, "vocab": 7, "channels": 8}
SIZES |= {"hidden": 5}


def attention(**options):
    return nn.MultiheadAttention(2, 6, qk_size=5, vo_size=5, **options, key=KEY)


def linear(**options):
    return nn.Linear(3, 4, **options, key=KEY)


def mlp(depth, **options):
    return nn.MLP(3, 4, 6, depth, **options, key=KEY)


def unbiased_mlp(depth, **options):
    return mlp(depth, use_bias=False, use_final_bias=False, **options)


def conv(cls, *args):
    return cls(*args, 3, 4, 2, key=KEY)


def gru():
    return nn.GRUCell(3, 5, key=KEY)


def weight_norm(*args):
    return nn.WeightNorm(linear(), *args)


def spectral_norm():
    return nn.SpectralNorm(linear(), "weight", key=KEY)


def shared_embedding():
    embedding, linear = nn.Embedding(7, 6, key=KEY), nn.Linear(6, 7, key=KEY)
    return nn.Shared(
        (embedding, linear), lambda two: two[1].weight, lambda two: two[0].weight
    )


LINEAR = {"weight": "out in", "bias": "out"}
CHANNELS = {"weight": "channels", "bias": "channels"}
EMBED = {"weight": "embed", "bias": "embed"}
QKV = {f"{name}_proj.weight": "heads embed" for name in ("query", "key", "value")}
INSIDE = {f"layer.{name}": text for name, text in LINEAR.items()}


def convolution(kernel):
    return {"weight": f"out in {kernel}", "bias": f"out {kernel}"}


#: For each public class of equinox.nn: one made of it, and the dims of its arrays.
LAYERS = {
    "Linear": (linear, LINEAR),
    "Embedding": (lambda: nn.Embedding(7, 6, key=KEY), {"weight": "vocab embed"}),
    "Conv": (lambda: conv(nn.Conv, 2), convolution("_ _")),
    "Conv1d": (lambda: conv(nn.Conv1d), convolution("_")),
    "Conv2d": (lambda: conv(nn.Conv2d), convolution("_ _")),
    "Conv3d": (lambda: conv(nn.Conv3d), convolution("_ _ _")),
    "ConvTranspose": (lambda: conv(nn.ConvTranspose, 2), convolution("_ _")),
    "ConvTranspose1d": (lambda: conv(nn.ConvTranspose1d), convolution("_")),
    "ConvTranspose2d": (lambda: conv(nn.ConvTranspose2d), convolution("_ _")),
    "ConvTranspose3d": (lambda: conv(nn.ConvTranspose3d), convolution("_ _ _")),
    "LayerNorm": (lambda: nn.LayerNorm(6), EMBED),
    "RMSNorm": (lambda: nn.RMSNorm(6), EMBED),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), CHANNELS),
    "BatchNorm": (
        lambda: nn.BatchNorm(8, "batch", mode="batch"),
        # Its statistics are kept in equinox.nn.State, which has no names.
        {**CHANNELS, "batch_counter.init": None}
        | {f"batch_state_index.init.{i}": None for i in (0, 1)},
    ),
    "MultiheadAttention": (attention, QKV | {"output_proj.weight": "embed heads"}),
    "MLP": (
        lambda: mlp(1),
        {"layers.0.weight": "mlp in", "layers.0.bias": "mlp"}
        | {"layers.1.weight": "out mlp", "layers.1.bias": "out"},
    ),
    "GRUCell": (
        gru,
        {"weight_ih": "gates in", "weight_hh": "gates hidden"}
        | {"bias": "gates", "bias_n": "hidden"},
    ),
    "LSTMCell": (
        lambda: nn.LSTMCell(3, 5, key=KEY),
        {"weight_ih": "gates in", "weight_hh": "gates hidden", "bias": "gates"},
    ),
    "PReLU": (nn.PReLU, {"negative_slope": None}),
    "WeightNorm": (weight_norm, INSIDE | {"g": None}),
    "SpectralNorm": (
        spectral_norm,
        INSIDE | {"uv_index.init.0": None, "uv_index.init.1": None},
    ),
    "Shared": (
        shared_embedding,
        {"pytree.0.weight": "vocab embed", "pytree.1.bias": "out"},
    ),
    "Sequential": (
        lambda: nn.Sequential([linear(), nn.Lambda(nn.LayerNorm(6))]),
        {f"layers.0.{name}": text for name, text in LINEAR.items()}
        | {f"layers.1.fn.{name}": text for name, text in EMBED.items()},
    ),
    "Lambda": (lambda: nn.Lambda(linear()), {f"fn.{k}": v for k, v in LINEAR.items()}),
    "StateIndex": (lambda: nn.StateIndex(jnp.zeros(3)), {"init": None}),
    # No arrays.
    "Dropout": (nn.Dropout, {}),
    "Identity": (nn.Identity, {}),
    "RotaryPositionalEmbedding": (lambda: nn.RotaryPositionalEmbedding(4), {}),
    "StatefulLayer": (None, {}),
    "Pool": (lambda: nn.Pool(0, jax.lax.add, 2, 2, 1), {}),
    "AdaptivePool": (lambda: nn.AdaptivePool(2, 1, jnp.max), {}),
    **{
        f"{kind}Pool{n}d": (lambda kind=kind, n=n: getattr(nn, f"{kind}Pool{n}d")(2), {})
        for kind in ("Avg", "Max", "AdaptiveAvg", "AdaptiveMax")
        for n in (1, 2, 3)
    },
}


def public_layers():
    return [
        name
        for name, cls in vars(nn).items()
        if inspect.isclass(cls) and issubclass(cls, eqx.Module)
    ]


@pytest.mark.parametrize("name", sorted({*LAYERS, *public_layers()}))
def test_every_layer_of_equinox_has_named_dims(name):
    assert name in LAYERS, (
        f"equinox.nn has a new layer, {name}: name its dims in _layer_dims.py, and add "
        "them to LAYERS."
    )
    make, expected = LAYERS[name]
    if make is None:
        return
    layer = shapes(make)
    expected = {path: names(text) for path, text in expected.items()}
    assert dims(layer) == expected
    check_sizes(layer, expected)


def check_sizes(layer, expected):
    """That dims have the names of what they are, where sizes differ."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        path = jax.tree_util.keystr(path, simple=True, separator=".")
        gates = 4 * 5 if isinstance(layer, nn.LSTMCell) else 3 * 5
        out = 7 if isinstance(layer, nn.Shared) else 4
        for dim, n in zip(expected.get(path) or (), getattr(leaf, "shape", ())):
            assert dim is None or n == (SIZES | {"gates": gates, "out": out})[dim], path


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: linear(use_bias=False), {"weight": "out in"}),
        (lambda: nn.Conv2d(6, 4, 3, groups=2, key=KEY), convolution("_ _")),
        (lambda: nn.LayerNorm((5, 6)), {"weight": "_ embed", "bias": "_ embed"}),
        (lambda: nn.LayerNorm(()), {"weight": "", "bias": ""}),
        (
            lambda: attention(use_query_bias=True, use_output_bias=True),
            QKV | {"output_proj.weight": "embed heads"}
            | {"query_proj.bias": "heads", "output_proj.bias": "embed"},
        ),
        (lambda: mlp(0), {"layers.0.weight": "out in", "layers.0.bias": "out"}),
        (
            lambda: mlp(3, use_final_bias=False),
            {"layers.0.weight": "mlp in", "layers.1.weight": "embed mlp"}
            | {"layers.2.weight": "mlp embed", "layers.3.weight": "out mlp"}
            | {"layers.0.bias": "mlp", "layers.1.bias": "embed", "layers.2.bias": "mlp"},
        ),
        (
            lambda: unbiased_mlp(3, scan=True),
            {"layers.0.weight": "mlp in", "layers.1.weight": "layers mlp embed"}
            | {"layers.2.weight": "out mlp"},
        ),
    ],
)  # fmt: skip
def test_layers_with_options_have_named_dims(make, expected):
    layer = shapes(make)
    assert dims(layer) == {path: names(text) for path, text in expected.items()}


def test_splits_of_an_mlp_alternate():
    # What a layer gives out split the next takes in split: no gather in between.
    for depth in range(1, 6):
        found = dims(shapes(lambda: mlp(depth)))  # noqa: B023
        weights = [found[f"layers.{i}.weight"] for i in range(depth + 1)]
        assert [out for out, _ in weights[:-1]] == [in_ for _, in_ in weights[1:]]
        split = ["mlp" in weight for weight in weights]
        assert all(split[: depth // 2 * 2])
        assert all(len({*weight}) == 2 for weight in weights)


# Layers in fields of one's own


@pytest.mark.parametrize(
    "annotation, make, expected",
    [
        (Annotated[nn.Linear, "a b"], linear, {"weight": "a b", "bias": "a"}),
        (Annotated[nn.Linear, "a _"], linear, {"weight": "a _", "bias": "a"}),
        ('Annotated[nn.Linear, 3, "a b"]', linear, {"weight": "a b", "bias": "a"}),
        (Annotated[Annotated[nn.Linear, 3] | None, "a b"], linear,
         {"weight": "a b", "bias": "a"}),
        (tuple[nn.Linear, Annotated[nn.Linear, "a b"]], lambda: (linear(), linear()),
         {"0.weight": "out in", "0.bias": "out", "1.weight": "a b", "1.bias": "a"}),
        (dict[str, Annotated[nn.Linear, "a b"] | None], lambda: {"x": linear(), "y": None},
         {"x.weight": "a b", "x.bias": "a"}),
        (Annotated[nn.LayerNorm, "d"], lambda: nn.LayerNorm((5, 6)),
         {"weight": "_ d", "bias": "_ d"}),
        (Annotated[nn.MultiheadAttention, "h d"], attention,
         dict.fromkeys(QKV, "h d") | {"output_proj.weight": "d h"}),
        (Annotated[nn.MLP, "f a d b"], lambda: unbiased_mlp(2),
         {"layers.0.weight": "f a", "layers.1.weight": "d f", "layers.2.weight": "b d"}),
        (Annotated[nn.GRUCell, "g x h"], gru,
         {"weight_ih": "g x", "weight_hh": "g h", "bias": "g", "bias_n": "h"}),
        # A base of the layer, or one of several.
        (Annotated[nn.Conv | nn.Linear, "o i"], lambda: conv(nn.Conv1d),
         {"weight": "o i _", "bias": "o _"}),
        (Annotated[nn.Conv, "o i"] | Annotated[nn.Linear, "a b"], linear,
         {"weight": "a b", "bias": "a"}),
        # Text on other types is anybody's.
        (Annotated[Any, "a b"], linear, LINEAR),
        (Annotated[eqx.Module, "any text at all"], linear, LINEAR),
        (Annotated[list[nn.Linear], "any text at all"], lambda: [linear()],
         {"0.weight": "out in", "0.bias": "out"}),
    ],
)  # fmt: skip
def test_a_field_names_the_dims_of_its_layer(annotation, make, expected):
    value, expected = shapes(make), {path: names(text) for path, text in expected.items()}
    assert dims_of(annotation, value) == expected
    stacked = jax.tree.map(
        lambda x: zeros(3, *x.shape) if hasattr(x, "shape") else x, value
    )
    expected = {p: dims and ("layers", *dims) for p, dims in expected.items()}
    assert dims_of(annotation, stacked) == expected


class MyLinear(nn.Linear):
    scale: Float[Array, " scale"]

    def __init__(self):
        super().__init__(3, 4, key=KEY)
        self.scale = jnp.ones(5)


class MyNamedLinear(MyLinear):
    weight: Float[Array, "a b"]  # pyright: ignore


class MySilentLinear(MyLinear):
    weight: Array


class MyAttention(nn.MultiheadAttention):
    query_proj: Annotated[nn.Linear, "q d"]  # pyright: ignore


def test_subclasses_of_layers_inherit_and_override_their_names():
    scale = {"scale": ("scale",)}
    plain = {path: names(text) for path, text in LINEAR.items()} | scale
    assert dims(shapes(MyLinear)) == plain
    assert dims(shapes(MySilentLinear)) == plain
    assert dims(shapes(MyNamedLinear)) == plain | {"weight": ("a", "b")}
    renamed = {"weight": ("a", "b"), "bias": ("a",)}
    assert dims_of(Annotated[MyLinear, "a b"], shapes(MyLinear)) == renamed | scale
    assert dims_of(Annotated[nn.Linear, "a b"], shapes(MyLinear)) == renamed | scale
    found = dims(shapes(lambda: MyAttention(2, 6, use_query_bias=True, key=KEY)))  # pyright: ignore
    assert found["query_proj.weight"] == ("q", "d")
    assert found["query_proj.bias"] == ("q",)
    assert found["key_proj.weight"] == ("heads", "embed")


def test_a_module_in_the_place_of_a_weight_has_its_own_dims():
    low_rank = module(a=Float[Array, "out rank"], b=Float[Array, "rank in"])
    layer = eqx.tree_at(
        lambda m: m.weight, shapes(linear), low_rank(zeros(4, 2), zeros(2, 3))
    )
    assert dims(layer) == {
        "weight.a": ("out", "rank"),
        "weight.b": ("rank", "in"),
        "bias": ("out",),
    }


@pytest.mark.parametrize(
    "annotation, value, message",
    [
        (
            Annotated[nn.Linear, "embed"],
            shapes(linear),
            "Block.x: 'embed' names 1 dims, and Linear has 2 with names (out, in); write "
            "one word for each, in this order.",
        ),
        (
            Annotated[nn.Conv1d, "o i k"],
            shapes(lambda: conv(nn.Conv1d)),
            "Conv has 2 with names (out, in)",
        ),
        (
            Annotated[nn.MLP, "mlp embed"],
            shapes(lambda: mlp(1)),
            "MLP has 3 with names (mlp, in, out)",
        ),
    ],
)
def test_mistakes_are_named(annotation, value, message):
    assert message in dims_error(annotation, value)
