"""The gradient of a lookup in a table that is split over an axis of the batch."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import assert_close, make_mesh
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.testing import collectives

ROWS, SEQ, EMBED = 16, 6, 8
OPTIM = optax.sgd(0.5)


class Tables(eqx.Module):
    """A table of tokens, which also makes the logits if it is tied, and one of places."""

    tokens: jax.Array
    places: jax.Array
    head: jax.Array | None

    def __init__(self, key, vocab, tied):
        k1, k2, k3 = jax.random.split(key, 3)
        self.tokens = jax.random.normal(k1, (vocab, EMBED))
        self.places = jax.random.normal(k2, (EMBED, SEQ))
        self.head = None if tied else jax.random.normal(k3, (vocab, EMBED))

    def __call__(self, tokens):
        # The rows of the second table are its last dim.
        x = self.tokens[tokens] + jnp.take(self.places, jnp.arange(SEQ), axis=1).T
        return jnp.tanh(x) @ (self.tokens if self.head is None else self.head).T


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return jnp.mean(losses, axis=-1)


def remat_loss_fn(model, batch, key):
    return jax.checkpoint(lambda model, batch: loss_fn(model, batch, key))(model, batch)


def batch(vocab):
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, vocab, (ROWS, SEQ), np.int32)}


def make(mesh, spec, vocab, tied, loss_fn=loss_fn, **options):
    split = eqxshard.by_path({"tokens": spec})
    placed: dict = dict(
        mesh=make_mesh(mesh), rule=eqxshard.first_match(split, eqxshard.replicate())
    )
    state = eqxshard.init_state(
        lambda key: Tables(key, vocab, tied), OPTIM, key=jax.random.key(0), **placed
    )
    return state, eqxshard.make_train_step(loss_fn, OPTIM, **placed, **options)


@functools.cache
def one_device(vocab, tied):
    state, train_step = make("data=1", P(), vocab, tied)
    for _ in range(3):
        state, _ = train_step(state, batch(vocab))
    return state.model


#: By the dim that is split: the mesh, and the spec of the table.
SPLITS = {
    "features": ("fsdp=8", P(None, "fsdp")),
    "rows": ("fsdp=8", P("fsdp")),
    "features of a group": ("data=2,fsdp=4", P(None, "fsdp")),
    "rows of a group": ("data=2,fsdp=4", P("fsdp")),
    "both": ("data=2,fsdp=4", P("fsdp", "data")),
    "features over both": ("data=2,fsdp=4", P(None, ("data", "fsdp"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [8, 128], ids=["fewer rows", "more rows"])
@pytest.mark.parametrize("split", graded(SPLITS, ["features", "rows of a group", "both"]))
def test_steps_are_those_of_one_device(split, vocab, tied):
    state, train_step = make(*SPLITS[split], vocab, tied)
    for _ in range(3):
        state, _ = train_step(state, batch(vocab))
    assert_close(state.model, one_device(vocab, tied))


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"loss_fn": remat_loss_fn}], ids=["loop", "remat"]
)
def test_lookups_are_found_in_loops_and_checkpoints(options):
    state, train_step = make(*SPLITS["features"], 128, True, **options)
    for _ in range(3):
        state, _ = train_step(state, batch(128))
    assert_close(state.model, one_device(128, True))


def gathered_activations(split):
    """The shapes that a step gathers, other than tables and tokens."""
    vocab = 1024
    found = collectives(*make(*SPLITS[split], vocab, False)[::-1], batch(vocab))
    shapes = [shape for op in found if op.kind == "all-gather" for shape in op.shapes]
    activation = re.compile(rf"f32\[(\d+,)*{SEQ},(\d+,)*\d+\]")
    return [shape for shape in shapes if activation.fullmatch(shape)]


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_no_device_receives_the_activations_of_others(split, monkeypatch):
    assert gathered_activations(split) == []
    if split in ("rows", "features of a group"):
        # XLA by itself gathers those of the whole batch.
        monkeypatch.setenv("EQXSHARD_REWRITE", "off")
        assert gathered_activations(split) == [f"f32[{ROWS},{SEQ},{EMBED}]"]


def test_other_gradients_are_left_as_they_are():
    """A scatter of windows, of one index, and none at all."""

    def losses(model, batch, key):
        window = jax.vmap(lambda i: jax.lax.dynamic_slice(model.tokens, (i, 0), (2, 4)))
        start = batch["tokens"][:, 0] % 4
        return (
            jnp.sum(window(start), axis=(1, 2))
            + jnp.sum(model.tokens[3])
            + jnp.sum(jnp.sort(model.tokens, axis=0)[0])
            + jnp.sum(model.places) * batch["tokens"][:, 1].astype(jnp.float32)
        )

    trained = []
    for mesh, spec in [("data=1", P()), SPLITS["features"], SPLITS["rows"]]:
        state, train_step = make(mesh, spec, 8, True, loss_fn=losses)
        trained.append(train_step(state, batch(8))[0].model)
    assert_close(trained[1], trained[0])
    assert_close(trained[2], trained[0])
