"""A model, and a file of its weights."""

import equinox as eqx
import jax
import pytest
from helpers import make_mesh

import eqxshard

FSDP = eqxshard.fsdp(min_size=1)


def make_mlp(key):
    # Its activation is a leaf that is not an array.
    return eqx.nn.MLP(8, 4, 16, 2, key=key)


def placed(model, mesh="fsdp=8", rule=FSDP):
    return eqxshard.filter_shard(model, eqxshard.shardings(model, make_mesh(mesh), rule))


@pytest.fixture(scope="module")
def mlp():
    return make_mlp(jax.random.key(0))


@pytest.fixture(scope="module")
def file(mlp, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "mlp.safetensors"
    eqxshard.save_weights(path, mlp)
    return path
