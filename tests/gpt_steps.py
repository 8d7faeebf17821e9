"""Steps of the language model recipe in this process, on any mesh."""

import dataclasses
from functools import partial
from typing import Any

import gpt
import jax
import numpy as np
from gpt_model import GPT, Shape

import eqxshard

#: Eight of everything, so that every axis may take all eight devices.
TINY = Shape(
    layers=8, heads=16, kv_heads=8, embed=64, mlp=64, seq_len=16, vocab_size=64, dropout=0.1
)
STEPS, BATCH, ACCUMULATE = 20, 32, 2


def make_source(shape: Shape, rows: int = 8 * BATCH):
    """Windows of documents of random lengths that count up in steps of their own."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 2 * shape.seq_len, 4 * rows)
    ends = np.cumsum(lengths)
    starts, steps = rng.integers(1, shape.vocab_size, (2, len(lengths)))
    texts = [start + step * np.arange(n) for start, step, n in zip(starts, steps, lengths)]
    tokens = np.concatenate(texts) % shape.vocab_size
    documents = eqxshard.data.text.TokenArray(
        tokens, vocab_size=shape.vocab_size, ends=ends
    )
    seq_len = shape.seq_len
    return eqxshard.data.text.Windows(documents, seq_len, stride=seq_len, documents=True)


def start(mesh: str, shape: Shape = TINY, *, accumulate=ACCUMULATE, **options: Any):
    """A state, a step and a loader on a mesh."""
    sizes = {"data": 1, **eqxshard.run.parse_mesh(mesh)}
    count = int(np.prod(list(sizes.values())))
    made = eqxshard.make_mesh(**sizes, devices=jax.devices()[:count])
    model_options = {k: options.pop(k) for k in ("remat", "microbatches") if k in options}
    make_model = partial(GPT, shape=shape, **model_options)
    optimizer = options.pop("optimizer", "adamw")
    args = gpt.Args(learning_rate=2e-3, optimizer=optimizer)
    optim = gpt.make_optimizer(args, STEPS)
    state = eqxshard.init_state(
        make_model, optim, key=jax.random.key(0), mesh=made, rule=gpt.make_rule(shape)
    )
    step = eqxshard.make_train_step(gpt.loss_fn, optim, accumulate=accumulate)
    loader = eqxshard.Loader(make_source(shape), batch_size=BATCH, mesh=made)
    return state, step, loader


def losses(mesh: str, shape: Shape = TINY, *, steps: int = STEPS, **options: Any):
    """The loss of each of some steps."""
    state, step, loader = start(mesh, shape, **options)
    found = []
    for _, batch in zip(range(steps), loader):
        state, metrics = step(state, batch)
        found.append(metrics.compute()["loss"])
    return np.asarray(found)


def change(**sizes: Any) -> Shape:
    """The tiny shape, changed."""
    return dataclasses.replace(TINY, **sizes)
