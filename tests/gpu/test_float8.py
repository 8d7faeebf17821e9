"""Matrix products of eight bits, compiled for H200s that are not there."""

import dataclasses
import re
from functools import partial

import gpt
import jax
import jax.numpy as jnp
import pytest
from gpt_model import GPT, SIZES

import eqxshard
from eqxshard.testing import collectives

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]

SHAPE = dataclasses.replace(SIZES["8b"], layers=3)


def compiled(gpus, matmul, mesh):
    made = eqxshard.make_mesh(**{"data": 1, **mesh}, devices=gpus)
    optim = gpt.make_optimizer(gpt.Args(), 1000)
    state = eqxshard.abstract_state(
        partial(GPT, shape=SHAPE, remat="full"),
        optim,
        key=jax.random.key(0),
        mesh=made,
        rule=gpt.make_rule(SHAPE),
        precision=eqxshard.Precision("bfloat16", matmul=matmul),
    )
    tokens = jax.ShapeDtypeStruct((16, SHAPE.seq_len), jnp.int32)
    step = eqxshard.make_train_step(gpt.loss_fn, optim)
    return step.lower(state, {"tokens": tokens, "targets": tokens}).compile()


def gathered_by_layer(program):
    """The bytes that all-gathers in the loops over layers make."""
    ops = [op for op in collectives(program).ops if op.times == SHAPE.layers]
    return sum(op.bytes for op in ops if op.kind == "all-gather")


def products(program):
    """The types of the factors of each matrix product, and whether it is in batches."""
    text = program.as_text()
    types = dict(re.findall(r"%?([\w.\-]+) = (\w+)\[", text))
    types |= dict(re.findall(r"[(,] ?([\w.\-]+): (\w+)\[", text))
    found = re.findall(r" dot\(%?([\w.\-]+), %?([\w.\-]+)\),(.*)", text)
    return [(types[a], types[b], "lhs_batch_dims" in more) for a, b, more in found]


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, pytest.param({"data": 2, "fsdp": 2, "tensor": 2})], ids=str
)
def test_llama_multiplies_and_gathers_eight_bits(gpus, mesh):
    program = compiled(gpus, "float8", mesh)
    found = products(program)
    eight = [types for *types, _ in found if all(t.startswith("f8") for t in types)]
    # All others are those of attention, which has no parameters.
    others = [types for *types, in_batches in found if not in_batches]
    assert all(types in eight for types in others), others
    # In each layer four go forward, twice, for two that come back; and the last layer's.
    forward, backward = ["f8e4m3fn", "f8e4m3fn"], ["f8e5m2", "f8e4m3fn"]
    assert eight.count(forward) >= 8 and eight.count(backward) == 10, eight
    assert len(eight) == eight.count(forward) + eight.count(backward)
    half = gathered_by_layer(program) / gathered_by_layer(compiled(gpus, None, mesh))
    print(f"8b, {mesh}: {half:.3f} of the bytes of layers gathered")
    # All but the vectors of norms.
    assert 0.5 <= half < 0.502
