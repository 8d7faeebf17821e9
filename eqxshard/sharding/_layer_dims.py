"""The names of the dims of `equinox.nn`'s layers, whose annotations say only `Array`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from equinox import nn


def layer_class(node: Any) -> type[eqx.Module] | None:
    """The layer of `equinox.nn` that a node is, or that its class inherits from."""
    return next((cls for cls in type(node).__mro__ if cls in _LAYERS), None)


def layer_dims(node: Any, layer: type[eqx.Module]) -> dict[str, str]:
    """The dims of each array of a layer, by path, as in jaxtyping annotations."""
    return _LAYERS[layer](node)


def _linear(layer: nn.Linear) -> dict[str, str]:
    return {"weight": "out in", "bias": "out"}


def _conv(layer: nn.Conv | nn.ConvTranspose) -> dict[str, str]:
    # Transposed or not; with groups, `in` counts the inputs of one group.
    kernel = " _" * layer.num_spatial_dims
    return {"weight": "out in" + kernel, "bias": "out" + kernel}


def _embedding(layer: nn.Embedding) -> dict[str, str]:
    return {"weight": "vocab embed"}


def _over_embedding(layer: nn.LayerNorm | nn.RMSNorm) -> dict[str, str]:
    dims = " ".join([*"_" * (len(layer.shape) - 1), *["embed"] * (len(layer.shape) > 0)])
    return {"weight": dims, "bias": dims}


def _over_channels(layer: nn.GroupNorm | nn.BatchNorm) -> dict[str, str]:
    return {"weight": "channels", "bias": "channels"}


def _attention(layer: nn.MultiheadAttention) -> dict[str, str]:
    inner = ("query_proj", "key_proj", "value_proj")
    weights = {f"{name}.weight": "heads embed" for name in inner}
    biases = {f"{name}.bias": "heads" for name in inner}
    output = {"output_proj.weight": "embed heads", "output_proj.bias": "embed"}
    return weights | biases | output


def _mlp(layer: nn.MLP) -> dict[str, str]:
    # Columns and rows are split by turns, so that every other activation is whole
    # (Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). Stacked hidden
    # layers cannot take turns: each is split by columns.
    if layer.scan and layer.depth > 0:
        names = [("mlp", "in"), ("mlp", "embed"), ("out", "mlp")]
    else:
        hidden = ["embed" if i % 2 else "mlp" for i in range(layer.depth)]
        names = [*zip([*hidden, "out"], ["in", *hidden])]
    weights = {f"layers.{i}.weight": f"{out} {in_}" for i, (out, in_) in enumerate(names)}
    return weights | {f"layers.{i}.bias": out for i, (out, _) in enumerate(names)}


def _recurrent(layer: nn.GRUCell | nn.LSTMCell) -> dict[str, str]:
    # The gates are stacked along the first dim. It is not called `hidden`, because
    # splitting it would separate the parts of one gate from those of the next.
    return {
        "weight_ih": "gates in",
        "weight_hh": "gates hidden",
        "bias": "gates",
        "bias_n": "hidden",
    }


_LAYERS: dict[type[eqx.Module], Callable[[Any], dict[str, str]]] = {
    nn.Linear: _linear,
    nn.Conv: _conv,
    nn.ConvTranspose: _conv,
    nn.Embedding: _embedding,
    nn.LayerNorm: _over_embedding,
    nn.RMSNorm: _over_embedding,
    nn.GroupNorm: _over_channels,
    nn.BatchNorm: _over_channels,
    nn.MultiheadAttention: _attention,
    nn.MLP: _mlp,
    nn.GRUCell: _recurrent,
    nn.LSTMCell: _recurrent,
}
