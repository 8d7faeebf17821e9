import dataclasses
import io
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from plan_helpers import BATCH, REQUEST
from transformer import Transformer

from eqxshard.planning._process import dump_request, load_request
from eqxshard.planning._targets import Target

OPTIM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def request_of(make_model, **changes):
    return dataclasses.replace(REQUEST, make_model=make_model, optim=OPTIM, **changes)


def test_closures_and_optimizers_arrive():
    layers = 3
    request: Any = load_request(
        dump_request(request_of(lambda key: Transformer(key, layers=layers)))
    )
    model = eqx.filter_eval_shape(request.make_model, jax.random.key(0))
    assert model.blocks.norm1.weight.shape == (3, 32)
    # Errors and findings name it.
    assert request.make_model.__code__.co_filename == __file__
    assert request.batch == BATCH and request.target == Target.named("h200")
    params = {"w": jnp.ones(3)}
    states = (optim.init(params) for optim in (request.optim, OPTIM))
    assert len({jax.tree.structure(state) for state in states}) == 1


def test_settings_of_jax_arrive_first():
    data = dump_request(request_of(Transformer))
    config = pickle.load(io.BytesIO(data))
    assert config["jax_num_cpu_devices"] == 8
    assert config["jax_numpy_dtype_promotion"] == "strict"


def test_what_cannot_be_sent_is_an_error():
    class Broken:
        def __reduce__(self):
            raise TypeError("a lock")

    with pytest.raises(TypeError, match=r"cannot be sent \(a lock\); define the model"):
        dump_request(request_of(Transformer, options={"grad_norms": Broken()}))
