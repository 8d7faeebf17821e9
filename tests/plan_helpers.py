"""What tests of plans plan."""

import jax
import jax.numpy as jnp
import optax
from helpers import lenient

import eqxshard

OPTIM = lenient(optax.adam(1e-3))
BATCH = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
SIZES = {"data": 2, "fsdp": 4}
RULE = eqxshard.fsdp(min_size=1)
