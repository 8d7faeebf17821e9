"""The names of the dims of `equinox.nn`'s layers, whose annotations say only `Array`."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import equinox as eqx
from equinox import nn


def known_layer(node: Any) -> tuple[type[eqx.Module] | None, Mapping[str, str]]:
    """The class of `equinox.nn` that a node is an instance of, and the dims of its arrays.

    The dims are by path, written as in jaxtyping annotations; `(None, {})` for other nodes.
    """
    for cls in type(node).__mro__:
        if cls in _LAYERS:
            dims = _LAYERS[cls]
            return cls, dims(node) if callable(dims) else dims
    return None, {}


def _conv(layer: nn.Conv | nn.ConvTranspose) -> dict[str, str]:
    # Transposed or not; with groups, `in` counts the inputs of one group.
    kernel = " _" * layer.num_spatial_dims
    return {"weight": "out in" + kernel, "bias": "out" + kernel}


def _over_embedding(layer: nn.LayerNorm | nn.RMSNorm) -> dict[str, str]:
    dims = " ".join([*"_" * (len(layer.shape) - 1), *["embed"] * (len(layer.shape) > 0)])
    return {"weight": dims, "bias": dims}


def _mlp(layer: nn.MLP) -> Mapping[str, str]:
    return _mlp_of(layer.depth, layer.scan)


@cache  # Called for each array of every layer.
def _mlp_of(depth: int, scan: bool) -> Mapping[str, str]:
    # Columns and rows are split in turn, so that every other activation is whole
    # (Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). Stacked hidden
    # layers cannot take turns: each is split by columns.
    if scan and depth > 0:
        names = [("mlp", "in"), ("mlp", "embed"), ("out", "mlp")]
    else:
        hidden = ["embed" if i % 2 else "mlp" for i in range(depth)]
        names = [*zip([*hidden, "out"], ["in", *hidden])]
    weights = {f"layers.{i}.weight": f"{out} {in_}" for i, (out, in_) in enumerate(names)}
    return weights | {f"layers.{i}.bias": out for i, (out, _) in enumerate(names)}


_CHANNELS = {"weight": "channels", "bias": "channels"}
#: The gates are stacked along the first dim. It is not called `hidden`, because splitting
#: it would separate the parts of one gate from those of the next.
_GATES = {"weight_ih": "gates in", "weight_hh": "gates hidden", "bias": "gates"}
_ATTENTION = {
    "query_proj.weight": "heads embed",
    "key_proj.weight": "heads embed",
    "value_proj.weight": "heads embed",
    "output_proj.weight": "embed heads",
    "query_proj.bias": "heads",
    "key_proj.bias": "heads",
    "value_proj.bias": "heads",
    "output_proj.bias": "embed",
}

_LAYERS: dict[type[Any], Mapping[str, str] | Callable[[Any], Mapping[str, str]]] = {
    nn.Linear: {"weight": "out in", "bias": "out"},
    nn.Conv: _conv,
    nn.ConvTranspose: _conv,
    nn.Embedding: {"weight": "vocab embed"},
    nn.LayerNorm: _over_embedding,
    nn.RMSNorm: _over_embedding,
    nn.GroupNorm: _CHANNELS,
    nn.BatchNorm: _CHANNELS,
    nn.MultiheadAttention: _ATTENTION,
    nn.MLP: _mlp,
    nn.GRUCell: {**_GATES, "bias_n": "hidden"},
    nn.LSTMCell: _GATES,
}
