"""The language model recipe, compiled for H200s that are not there."""

import math
import re
from functools import partial

import gpt
import jax
import jax.numpy as jnp
import pytest
from communication_cases import dtype_and_dims
from gpt_model import GPT, SIZES
from grades import graded

import eqxshard
from eqxshard.testing import collectives

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run", "cudnn")]

MEMORY = 141e9
BATCH = 16


def lower(size, devices, remat, mesh):
    shape = SIZES[size]
    made = eqxshard.make_mesh(**{"data": 1, **mesh}, devices=devices)
    precision = eqxshard.Precision("bfloat16")
    optim = gpt.make_optimizer(gpt.Args(), 1000)
    state = eqxshard.abstract_state(
        partial(GPT, shape=shape, remat=remat),
        optim,
        key=jax.random.key(0),
        mesh=made,
        rule=gpt.make_rule(shape),
        precision=precision,
    )
    tokens = jax.ShapeDtypeStruct((BATCH, shape.seq_len), jnp.int32)
    step = eqxshard.make_train_step(gpt.loss_fn, optim)
    return step.lower(state, {"tokens": tokens, "targets": tokens})


def check_products(lowered):
    """Products of matrices are of bfloat16, and attention is cuDNN's, both ways."""
    products = re.findall(r"dot_general .*: \((.*?)\) ->", lowered.as_text())
    assert products and not any("xf32>" in types for types in products)
    text = lowered.compile().as_text()
    calls = re.findall(r'custom_call_target="__cudnn\$fmha(\w*)', text)
    assert {call.endswith("Backward") for call in calls} == {False, True}
    return calls


def memory_of(lowered):
    sizes = lowered.compile().memory_analysis()
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )


@pytest.mark.parametrize("remat", graded(["none", "dots", "full"], ["dots"]))
def test_gpt2_on_one_gpu(gpus, remat):
    lowered = lower("124m", gpus[:1], remat, {"fsdp": 1})
    calls = check_products(lowered)
    # Only with full recomputation does attention go forward twice.
    assert len(calls) == (3 if remat == "full" else 2)
    used = memory_of(lowered)
    print(f"124m, {remat}: {used / 1e9:.1f} GB")
    assert used < 0.25 * MEMORY


def test_llama_8b_on_eight_gpus(gpus):
    mesh = {"fsdp": 4, "tensor": 2}
    shape = SIZES["8b"]
    lowered = lower("8b", gpus, "full", mesh)
    check_products(lowered)
    used = memory_of(lowered)
    print(f"8b, {mesh}: {used / 1e9:.1f} GB")
    assert used < MEMORY
    ops = collectives(lowered.compile())
    for op in ops:
        for dtype, dims in map(dtype_and_dims, op.shapes):
            # No array has all examples, except for their tokens.
            assert dtype == "s32" or not {BATCH, shape.seq_len} <= set(dims), op
            # No array has all layers.
            assert dims[:1] != [shape.layers] or math.prod(dims[1:]) < 1e6, op
    gathered = [op for op in ops if op.kind == "all-gather" and "bf16" in op.shapes[0]]
    # The table of the input, that of the output, and in each layer its matrices.
    inside = [op for op in gathered if op.times == shape.layers]
    largest = 2 * 2 * shape.mlp * shape.embed // mesh.get("tensor", 1)
    assert inside and max(op.bytes for op in inside) <= largest
    assert len(gathered) - len(inside) <= 4
    scattered = [op for op in ops if op.kind == "reduce-scatter"]
    in_layers = [op for op in scattered if op.times == shape.layers]
    assert sum(op.bytes for op in in_layers) > 0
