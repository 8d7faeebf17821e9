"""Every strategy's step, compiled for eight GPUs that are not there."""

import functools
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from communication_cases import (
    BY_WORD,
    MESHES,
    MODELS,
    assert_no_activations_of_others,
    step_collectives,
)
from grades import graded
from helpers import lenient
from test_strategies import STRATEGIES
from transformer import Transformer, make_tokens, next_token_losses

import eqxshard
from eqxshard.training._inputs import STACKED_BATCHES

pytestmark = pytest.mark.gpu

KEY = jax.random.key(0)
OPTIM = lenient(optax.adamw(1e-3))
TABLES = [name for name in MODELS if "Embedding" in name]
TOKENS = Transformer, next_token_losses, lambda seed: make_tokens(32, seed=seed)
RULE = eqxshard.fsdp(min_size=64)
SIZES = {1: {"data": 1}, 8: {"data": 2, "fsdp": 4}}
abstract: Any = jax.ShapeDtypeStruct
#: Strategies with code for each device.
PER_DEVICE = ["context", "stage", "expert"]
EIGHT = [(name, 8) for name in STRATEGIES]
OFTEN = [(name, 8) for name in (*PER_DEVICE, "FSDP", "tensor")]


def make_step(devices, kind, rule, sizes, **options):
    """A train step for these devices, a state for it, and their mesh."""
    make_model, loss_fn, _ = kind
    placed: dict = dict(mesh=eqxshard.make_mesh(**sizes, devices=devices), rule=rule)
    precision = {k: v for k, v in options.items() if k == "precision"}
    state = eqxshard.abstract_state(make_model, OPTIM, key=KEY, **placed, **precision)
    train_step = eqxshard.make_train_step(loss_fn, OPTIM, **placed, **options)
    return train_step, state, placed["mesh"]


def compile_step(devices, kind, *args, **options):
    """A train step compiled for these devices, and the state that it was compiled for."""
    train_step, state, _ = make_step(devices, kind, *args, **options)
    batch = jax.tree.map(lambda x: abstract(x.shape, x.dtype), kind[2](0))
    return train_step.lower(state, batch).compile(), state


def check_step(compiled, state):
    """Check that a step reuses its state's memory, and sends nothing through the host."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_per_device(state)
    assert memory.host_temp_size_in_bytes == 0
    # Memory of the host, and operations that would wait for it.
    found = re.search(r"S\(5\)|infeed|outfeed|callback|MoveTo", compiled.as_text())
    assert not found, found


def bytes_per_device(state):
    """The bytes of the model and the optimizer's state on each device."""
    leaves = jax.tree.leaves((state.model, state.opt_state))
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in leaves
        if isinstance(x, jax.ShapeDtypeStruct)
    )


@pytest.mark.parametrize(
    "name, devices",
    # On one GPU the others are all the same step.
    graded([*EIGHT, *((name, 1) for name in PER_DEVICE)], OFTEN),
)
def test_every_strategy_compiles_and_reuses_the_memory_of_its_state(gpus, name, devices):
    kind, rule, axes = STRATEGIES[name]
    rest = devices // math.prod(size or 1 for size in axes.values())
    sizes = {"data": 1, **{axis: size or rest for axis, size in axes.items()}}
    compiled, state = compile_step(gpus[:devices], kind, rule, sizes)
    check_step(compiled, state)


@pytest.mark.versions
@pytest.mark.parametrize(
    "options",
    [
        {"precision": eqxshard.Precision("bfloat16")},
        {"precision": eqxshard.Precision("float16")},
        {"accumulate": 4},
        {"nonfinite": "raise"},
    ],
    ids=["bfloat16", "float16", "accumulate", "raise"],
)
def test_every_option_compiles_and_reuses_the_memory_of_its_state(gpus, options):
    compiled, state = compile_step(gpus, TOKENS, RULE, SIZES[8], **options)
    check_step(compiled, state)


def test_several_steps_in_one_program_reuse_the_memory_of_the_state(gpus):
    train_step, state, _ = make_step(gpus, TOKENS, RULE, SIZES[8])
    tokens = make_tokens(32, seed=0)
    several = jax.tree.map(lambda x: abstract((5, *x.shape), x.dtype), tokens)
    call = train_step.machine.look_up(state, None, STACKED_BATCHES)
    check_step(call.lower(several).compile(), state)


@pytest.mark.parametrize("mesh", graded(MESHES, ["data=2,fsdp=2,tensor=2"]))
@pytest.mark.parametrize("model", MODELS)
def test_no_device_receives_activations_of_other_examples(gpus, model, mesh):
    ops = step_collectives(model, mesh, gpus)
    assert ops
    assert_no_activations_of_others(ops)


@pytest.mark.parametrize("mesh", graded(MESHES, ["data=2,fsdp=4"]))
@pytest.mark.parametrize("model", TABLES)
def test_nor_if_a_table_is_split_by_word(gpus, model, mesh):
    ops = step_collectives(model, mesh, gpus, BY_WORD)
    assert_no_activations_of_others(ops)


def test_activations_may_wait_in_the_memory_of_the_host(gpus):
    make_model = functools.partial(Transformer, remat="offload")
    sizes, precision = {"data": 1, "fsdp": 8}, eqxshard.Precision(jnp.bfloat16)
    kind = (make_model, *TOKENS[1:])
    compiled, _ = compile_step(gpus, kind, RULE, sizes, precision=precision)
    memory = compiled.memory_analysis()
    # For each token in a layer: queries, keys and values, and two more products. (Nothing
    # needs the last one again.)
    kept = 2 * (32 // 8) * 16 * (3 * 32 + 32 + 64)
    assert memory and memory.host_temp_size_in_bytes == 2 * kept


@pytest.mark.parametrize("devices, most", [(1, 4), (8, 6)])
def test_the_guard_adds_few_kernels_whatever_the_depth(gpus, devices, most):
    def kernels(nonfinite):
        compiled, _ = compile_step(gpus[:devices], kind, RULE, sizes, nonfinite=nonfinite)
        entry = str(compiled.as_text()).partition("\nENTRY")[2]
        return len(re.findall(r" (?:fusion|custom-call|copy|reduce)\(", entry))

    def losses(model, batch, key):
        return jnp.sum((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)

    def make_batch(seed):
        return dict.fromkeys("xy", np.zeros((32, 256), np.float32))

    # 30 matrices and 30 biases, each an array of its own.
    def make_model(key):
        return eqx.nn.MLP(256, 256, 256, 29, key=key)

    kind, sizes = (make_model, losses, make_batch), {"data": 1, "fsdp": devices}
    assert kernels("skip") <= kernels("ignore") + most
