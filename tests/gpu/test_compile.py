"""Every strategy's step, compiled for eight GPUs that are not there."""

import math

import equinox as eqx
import jax
import optax
import pytest
from communication_cases import (
    BY_WORD,
    FSDP,
    MESHES,
    MODELS,
    TENSOR,
    assert_no_activations_of_others,
    sent_activations,
    sizes_of,
    step_collectives,
)
from helpers import lenient
from test_strategies import STRATEGIES
from transformer import Transformer, make_tokens, next_token_losses

import eqxshard

pytestmark = pytest.mark.gpu

OPTIM = lenient(optax.adamw(1e-3))
TABLES = [name for name in MODELS if "Embedding" in name]
DENSE = [name for name in MODELS if "Embedding" not in name]


def compile_step(devices, kind, rule, sizes, **options):
    """A train step compiled for these devices, and the state that it was compiled for."""
    make_model, loss_fn, make_batch = kind
    placed: dict = dict(mesh=eqxshard.make_mesh(**sizes, devices=devices), rule=rule)
    precision = {k: v for k, v in options.items() if k == "precision"}
    state = eqxshard.abstract_state(
        make_model, OPTIM, key=jax.random.key(0), **placed, **precision
    )
    train_step = eqxshard.make_train_step(loss_fn, OPTIM, **placed, **options)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(0))
    return train_step.lower(state, batch).compile(), state


def bytes_per_device(state):
    """The bytes of the model and the optimizer's state on each device."""
    leaves = jax.tree.leaves((state.model, state.opt_state))
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in leaves
        if isinstance(x, jax.ShapeDtypeStruct)
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_compiles_and_reuses_the_memory_of_its_state(gpus, name):
    kind, rule, axes = STRATEGIES[name]
    rest = len(gpus) // math.prod(size or 1 for size in axes.values())
    sizes = {"data": 1, **{axis: size or rest for axis, size in axes.items()}}
    compiled, state = compile_step(gpus, kind, rule, sizes)
    memory = compiled.memory_analysis()
    assert memory and memory.alias_size_in_bytes >= bytes_per_device(state)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": eqxshard.Precision("bfloat16")},
        {"precision": eqxshard.Precision("float16")},
        {"accumulate": 4},
        {"nonfinite": "ignore"},
        {"nonfinite": "raise"},
    ],
    ids=["bfloat16", "float16", "accumulate", "ignore", "raise"],
)
def test_every_option_compiles_and_reuses_the_memory_of_its_state(gpus, options):
    kind = (Transformer, next_token_losses, lambda seed: make_tokens(32, seed=seed))
    sizes = {"data": 2, "fsdp": 4}
    compiled, state = compile_step(gpus, kind, eqxshard.fsdp(min_size=64), sizes, **options)
    memory = compiled.memory_analysis()
    assert memory and memory.alias_size_in_bytes >= bytes_per_device(state)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_no_device_receives_activations_of_other_examples(gpus, model, mesh):
    ops = step_collectives(model, mesh, gpus)
    assert ops
    assert_no_activations_of_others(ops, model, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", TABLES)
def test_nor_if_a_table_is_split_by_word(gpus, model, mesh):
    ops = step_collectives(model, mesh, gpus, BY_WORD)
    assert_no_activations_of_others(ops, model, mesh)


@pytest.mark.parametrize(
    "model, mesh, rule",
    [
        *((model, "fsdp=8", FSDP) for model in DENSE),
        *((model, "data=2,fsdp=4", FSDP) for model in DENSE),
        # With plain FSDP there, XLA has the second axis share the work of the first.
        ("LayerNorm", "data=2,fsdp=2,tensor=2", TENSOR),
    ],
)
def test_gradients_are_scattered_over_fsdp_and_their_parts_summed_over_data(
    gpus, model, mesh, rule
):
    ops = step_collectives(model, mesh, gpus, rule)
    sizes = MESHES[mesh]
    split = sizes["fsdp"] * sizes.get("tensor", 1)
    model = eqx.filter_eval_shape(MODELS[model][0], jax.random.key(0))
    arrays = [x for x in jax.tree.leaves(model) if isinstance(x, jax.ShapeDtypeStruct)]
    vectors = sum(x.size for x in arrays if max(x.shape) == x.size)
    parts = sum(x.size // split for x in arrays if max(x.shape) < x.size)
    scattered = sum(sizes_of(ops, "reduce-scatter"))
    assert parts <= scattered <= parts + vectors
    # The parts of the matrices, and whatever is small. Tensor parallelism also sums
    # activations.
    sent = sent_activations(ops)
    summed = sum(sizes_of([op for op in ops if op not in sent], "all-reduce"))
    assert summed <= (parts if sizes["data"] > 1 else 0) + 2 * vectors + 2
