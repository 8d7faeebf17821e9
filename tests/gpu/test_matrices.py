"""Muon on an 8B model of few layers, for H200s: its communication beside AdamW's."""

import dataclasses
from collections import Counter
from functools import partial

import gpt
import jax
import jax.numpy as jnp
import pytest
from gpt_model import GPT, SIZES
from grades import graded

import eqxshard
from eqxshard.testing import collectives

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]

LAYERS = 8
SHAPE = dataclasses.replace(SIZES["8b"], layers=LAYERS, vocab_size=4096, seq_len=1024)
MESHES = {
    "fsdp=8": {"fsdp": 8},
    "data=2,fsdp=4": {"data": 2, "fsdp": 4},
}


def compile_step(optimizer, devices, sizes):
    optim = gpt.make_optimizer(gpt.Args(optimizer=optimizer), 1000)
    state = eqxshard.abstract_state(
        partial(GPT, shape=SHAPE, remat="full"),
        optim,
        key=jax.random.key(0),
        precision=eqxshard.Precision("bfloat16"),
        mesh=eqxshard.make_mesh(**sizes, devices=devices),
        rule=gpt.make_rule(SHAPE),
    )
    tokens = jax.ShapeDtypeStruct((16, SHAPE.seq_len), jnp.int32)
    step = eqxshard.make_train_step(gpt.loss_fn, optim)
    return step.lower(state, {"tokens": tokens, "targets": tokens}).compile()


@pytest.mark.parametrize("name", graded(MESHES, ["data=2,fsdp=4"]))
def test_muon_sends_each_matrix_to_its_owner_and_back(gpus, name):
    sizes = MESHES[name]
    compiled = {x: compile_step(x, gpus, sizes) for x in ("muon", "adamw")}
    ops = {x: collectives(each) for x, each in compiled.items()}
    # In the loops, which are those over layers.
    muon, adamw = (Counter(op.axes for op in ops[x] if op.in_loop) for x in ops)
    assert muon == adamw
    sent: dict = {x: Counter() for x in ops}
    for x, found in ops.items():
        for op in found:
            sent[x][op.kind] += op.sent_in_all
    more = {k: sent["muon"][k] - sent["adamw"][k] for k in sent["muon"]}
    print({x: dict(each) for x, each in sent.items()}, more)
    # Per layer: queries, keys, values; outputs; the two matrices up, and the one down.
    embed, mlp = SHAPE.embed, SHAPE.mlp
    matrices = embed * (SHAPE.heads + 2 * SHAPE.kv_heads) * (embed // SHAPE.heads)
    matrices += embed * embed + 3 * embed * mlp
    # In float32, to the owners and back.
    part = 4 * LAYERS * matrices / 8 * sizes.get("data", 1)
    count = 8 // sizes.get("data", 1)
    back_and_forth = 2 * part * (count - 1) / count
    found = more["all-to-all"] + more.get("collective-permute", 0)
    assert found == pytest.approx(back_and_forth, rel=0.02)
    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        assert more.get(kind, 0) <= 1e6
    # The momentum alone is kept, and makes up for what owners compute with.
    memory = [x.memory_analysis() for x in compiled.values()]
    muon_peak, adamw_peak = (each.peak_memory_in_bytes for each in memory if each)
    assert muon_peak < 1.02 * adamw_peak
