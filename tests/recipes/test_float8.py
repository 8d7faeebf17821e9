"""A small language model, trained with matrix products of eight bits."""

import dataclasses
from functools import partial

import gpt
import jax
import numpy as np
import pytest
from gpt_model import GPT, SIZES

import eqxshard
from eqxshard.data import text

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_scripts_run")]

#: The vocabulary rounded up, for the last layer's product to be of eight bits, too.
SHAPE = dataclasses.replace(SIZES["tiny"], vocab_size=128)
STEPS = 500


def train(corpus, matmul, seed):
    """The loss on the validation text after some steps."""
    mesh = eqxshard.make_mesh(data=1, devices=jax.devices()[:1])
    precision = eqxshard.Precision("bfloat16", matmul=matmul)
    optim = gpt.make_optimizer(gpt.Args(), STEPS)
    state = eqxshard.init_state(
        partial(GPT, shape=SHAPE),
        optim,
        key=jax.random.key(seed),
        mesh=mesh,
        rule=eqxshard.replicate(),
        precision=precision,
    )
    step = eqxshard.make_train_step(gpt.loss_fn, optim)
    windows = partial(text.Windows, seq_len=SHAPE.seq_len)
    loader = eqxshard.Loader(windows(corpus.train), batch_size=16, mesh=mesh, seed=seed)
    for _, batch in zip(range(STEPS), loader):
        state, _ = step(state, batch)
    held_out = windows(corpus.valid, stride=SHAPE.seq_len, limit=512)
    evaluation = eqxshard.make_eval_step(gpt.metric_fn, precision=precision)
    loader = eqxshard.Loader(held_out, batch_size=64, mesh=mesh, epochs=1, shuffle=False)
    return eqxshard.evaluate(state.model, evaluation, loader)["loss"]


def test_eight_bits_train_as_well_as_sixteen():
    """In the mean over seeds: of one, other digits alone change the loss by as much."""
    corpus = text.shakespeare()
    sixteen, eight = (
        np.array([train(corpus, matmul, seed) for seed in range(3)])
        for matmul in (None, "float8")
    )
    print(f"bfloat16 {sixteen}, float8 {eight}")
    assert np.mean(sixteen) < 2.3
    np.testing.assert_allclose(np.mean(eight), np.mean(sixteen), rtol=0.005)
