"""What tests of plans plan."""

import jax
import jax.numpy as jnp
import optax
from helpers import lenient
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard.planning._request import Request

OPTIM = lenient(optax.adam(1e-3))
BATCH = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
SIZES = {"data": 2, "fsdp": 4}
RULE = eqxshard.fsdp(min_size=1)
REQUEST = Request(
    make_model=Transformer,
    loss_fn=next_token_losses,
    optim=OPTIM,
    batch=BATCH,
    mesh_shape={"fsdp": 8},
    devices=8,
    rule=RULE,
    target=eqxshard.Target.named("h200"),
    backend="cpu",
    trainable=True,
    precision=None,
    options={"accumulate": 1, "nonfinite": "skip", "grad_norms": False},
)
