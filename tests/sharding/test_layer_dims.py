"""The dims of the layers of `equinox.nn`."""

import inspect
import re
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from equinox import nn
from jaxtyping import Array, Float
from sharding_helpers import dims, dims_of, module, names, shapes
from sharding_helpers import struct as zeros

KEY = jax.random.key(0)


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


def shared_embedding():
    embedding, linear = nn.Embedding(7, 6, key=KEY), nn.Linear(6, 7, key=KEY)
    return nn.Shared(
        (embedding, linear), lambda two: two[1].weight, lambda two: two[0].weight
    )


LINEAR = {"weight": "out in", "bias": "out"}
CHANNELS = {"weight": "channels", "bias": "channels"}
EMBED = {"weight": "embed", "bias": "embed"}
QKV = {f"{name}_proj.weight": "heads embed" for name in ("query", "key", "value")}


def convolution(kernel):
    return {"weight": f"out in {kernel}", "bias": f"out {kernel}"}


#: For each public class of equinox.nn: one made of it, and the dims of its arrays.
LAYERS = {
    "Linear": (linear, LINEAR),
    "Embedding": (lambda: nn.Embedding(7, 6, key=KEY), {"weight": "vocab embed"}),
    "Conv": (lambda: conv(nn.Conv, 2), convolution("_ _")),
    "ConvTranspose": (lambda: conv(nn.ConvTranspose, 2), convolution("_ _")),
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
}

#: Without arrays, or with ones that have no names.
NAMELESS = {"Dropout", "Identity", "RotaryPositionalEmbedding", "StatefulLayer"}
NAMELESS |= {"PReLU", "SpectralNorm", "StateIndex", "WeightNorm"}


def public_layers():
    return [
        name
        for name, cls in vars(nn).items()
        if inspect.isclass(cls)
        and issubclass(cls, eqx.Module)
        and name not in NAMELESS
        and not re.search(r"Pool|Conv.*\dd", name)
    ]


@pytest.mark.parametrize("name", sorted({*LAYERS, *public_layers()}))
def test_every_layer_of_equinox_has_named_dims(name):
    assert name in LAYERS, (
        f"equinox.nn has a new layer, {name}: name its dims in _layer_dims.py, and add "
        "them to LAYERS."
    )
    make, expected = LAYERS[name]
    layer = shapes(make)
    expected = {path: names(text) for path, text in expected.items()}
    assert dims(layer) == expected


@pytest.mark.parametrize(
    "make, expected",
    [
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


# Layers in fields of one's own


@pytest.mark.parametrize(
    "annotation, make, expected",
    [
        (Annotated[nn.Linear, "a b"], linear, {"weight": "a b", "bias": "a"}),
        (Annotated[Annotated[nn.Linear, 3] | None, "a b"], linear,
         {"weight": "a b", "bias": "a"}),
        (tuple[nn.Linear, Annotated[nn.Linear, "a b"]], lambda: (linear(), linear()),
         {"0.weight": "out in", "0.bias": "out", "1.weight": "a b", "1.bias": "a"}),
        (dict[str, Annotated[nn.Linear, "a b"] | None], lambda: {"x": linear(), "y": None},
         {"x.weight": "a b", "x.bias": "a"}),
        (Annotated[nn.MultiheadAttention, "h d"], attention,
         dict.fromkeys(QKV, "h d") | {"output_proj.weight": "d h"}),
        (Annotated[nn.MLP, "f a d b"], lambda: unbiased_mlp(2),
         {"layers.0.weight": "f a", "layers.1.weight": "d f", "layers.2.weight": "b d"}),
        # A base of the layer, or one of several.
        (Annotated[nn.Conv | nn.Linear, "o i"], lambda: conv(nn.Conv1d),
         {"weight": "o i _", "bias": "o _"}),
        (Annotated[nn.Conv, "o i"] | Annotated[nn.Linear, "a b"], linear,
         {"weight": "a b", "bias": "a"}),
        # Text on other types is anybody's.
        (Annotated[eqx.Module, "any text at all"], linear, LINEAR),
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


def test_subclasses_of_layers_inherit_and_override_their_names():
    scale = {"scale": ("scale",)}
    plain = {path: names(text) for path, text in LINEAR.items()} | scale
    assert dims(shapes(MyLinear)) == plain
    assert dims(shapes(MySilentLinear)) == plain
    assert dims(shapes(MyNamedLinear)) == plain | {"weight": ("a", "b")}
    renamed = {"weight": ("a", "b"), "bias": ("a",)}
    assert dims_of(Annotated[MyLinear, "a b"], shapes(MyLinear)) == renamed | scale
    assert dims_of(Annotated[nn.Linear, "a b"], shapes(MyLinear)) == renamed | scale


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
