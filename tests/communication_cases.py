"""Models of Equinox's layers, and the collectives of a step that send activations.

Rows, sequences and images have sizes that 7 divides, and no array of a model has: so an
array that has such a dim is made of activations.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import nn

import eqxshard
from eqxshard.sharding import Rule
from eqxshard.testing import Collective, collectives

ROWS, SEQ, WIDTH, VOCAB = 16, 7, 64, 512


class Language(eqx.Module):
    """A language model; a tied table also makes the logits."""

    embed: nn.Embedding
    layer: nn.Linear
    head: nn.Linear | None

    def __init__(self, key, tied):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = nn.Embedding(VOCAB, WIDTH, key=k1)
        self.layer = nn.Linear(WIDTH, WIDTH, key=k2)
        self.head = None if tied else nn.Linear(WIDTH, VOCAB, key=k3)

    def __call__(self, tokens):
        x = jnp.tanh(jax.vmap(self.layer)(jax.vmap(self.embed)(tokens)))
        return x @ self.embed.weight.T if self.head is None else jax.vmap(self.head)(x)


class Images(eqx.Module):
    layers: list[nn.Conv2d]

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.layers = [
            nn.Conv2d(8, 64, 3, padding=1, key=k1),
            nn.Conv2d(64, 128, 3, padding=1, key=k2),
        ]

    def __call__(self, image):
        return self.layers[1](jax.nn.relu(self.layers[0](image)))


class Normalized(eqx.Module):
    layers: list[nn.Linear]
    norm: nn.LayerNorm

    def __init__(self, key):
        self.layers = [nn.Linear(WIDTH, WIDTH, key=k) for k in jax.random.split(key)]
        self.norm = nn.LayerNorm(WIDTH)

    def __call__(self, x):
        return jax.vmap(lambda v: self.layers[1](self.norm(self.layers[0](v))))(x)


class Attention(eqx.Module):
    attention: nn.MultiheadAttention

    def __init__(self, key):
        self.attention = nn.MultiheadAttention(8, WIDTH, key=key)

    def __call__(self, x):
        return self.attention(x, x, x)


class Recurrent(eqx.Module):
    cell: nn.GRUCell

    def __init__(self, key):
        self.cell = nn.GRUCell(WIDTH, WIDTH, key=key)

    def __call__(self, x):
        return jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(WIDTH), x)[0]


def token_losses(model, batch, key):
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"])
    return jnp.mean(losses, axis=-1)


def square_losses(model, batch, key):
    out = jax.vmap(model)(batch["x"])
    return jnp.mean(out.reshape(ROWS, -1) ** 2, axis=-1)


TOKENS = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
VECTORS = jax.ShapeDtypeStruct((ROWS, SEQ, WIDTH), jnp.float32)
IMAGES = jax.ShapeDtypeStruct((ROWS, 8, SEQ, SEQ), jnp.float32)

#: By name: what makes the model, its loss function, and its batches.
MODELS = {
    "Embedding": (lambda key: Language(key, tied=False), token_losses, TOKENS),
    "tied Embedding": (lambda key: Language(key, tied=True), token_losses, TOKENS),
    "Conv2d": (Images, square_losses, IMAGES),
    "LayerNorm": (Normalized, square_losses, VECTORS),
    "MultiheadAttention": (Attention, square_losses, VECTORS),
    "GRUCell": (Recurrent, square_losses, VECTORS),
}
MESHES: dict[str, dict] = {
    "fsdp=8": {"data": 1, "fsdp": 8},
    "data=2,fsdp=4": {"data": 2, "fsdp": 4},
    "data=2,fsdp=2,tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
}


#: Plain FSDP splits the features of a table.
FSDP = eqxshard.fsdp(min_size=1)
BY_WORD = eqxshard.combine(eqxshard.by_path({r"embed\.weight": jax.P("fsdp")}), FSDP)


def step_collectives(model, mesh, devices, rule: Rule = FSDP):
    """The collectives of a step, compiled for these devices."""
    make_model, loss_fn, x = MODELS[model]
    optim = optax.sgd(1e-2)
    placed: dict = dict(mesh=eqxshard.make_mesh(**MESHES[mesh], devices=devices), rule=rule)
    state = eqxshard.abstract_state(make_model, optim, key=jax.random.key(0), **placed)
    train_step = eqxshard.make_train_step(loss_fn, optim, **placed)
    return collectives(train_step, state, {"x": x})


def sent_activations(ops) -> list[Collective]:
    """The collectives of activations, apart from the tokens themselves.

    Compilers join the gradients of many arrays into one of one dim, of any size.
    """

    def is_activation(shape):
        dtype, dims = dtype_and_dims(shape)
        return dtype != "s32" and len(dims) > 1 and any(size % 7 == 0 for size in dims)

    return [op for op in ops if any(map(is_activation, op.shapes))]


def dtype_and_dims(shape):
    """`f32[4,8]` as `("f32", [4, 8])`."""
    dtype, dims = shape.removesuffix("]").split("[")
    return dtype, [int(size) for size in dims.split(",") if size]


def assert_no_activations_of_others(ops):
    sent = sent_activations(ops)
    assert not sent, sent
