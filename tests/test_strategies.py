"""Every strategy trains as one device does, for 20 steps on 1, 2 and 8 devices."""

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
from grades import graded
from helpers import arrays, compiled_by_jit, lenient
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from transformer import Transformer, make_tokens, next_token_losses

import eqxshard
from eqxshard.parallel import mixture_of_experts, pipeline, ring_attention
from eqxshard.sharding import Rule

STEPS, ROWS, SEQ, WIDTH = 20, 16, 16, 16
FSDP, ZERO1 = eqxshard.fsdp(min_size=64), eqxshard.zero1(min_size=64)
SPLIT = eqxshard.by_dim({"heads": "tensor", "mlp": "tensor", "vocab": "tensor"})
TENSOR = eqxshard.combine(SPLIT, eqxshard.replicate())


def dense(key, *shape):
    return jax.random.normal(key, shape) / shape[-1] ** 0.5


class Attention(eqx.Module):
    """Its sequence may be split; heads and width are whole."""

    qkv: jax.Array
    out: jax.Array
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.qkv, self.out = dense(k1, 3, WIDTH, WIDTH), dense(k2, WIDTH, WIDTH)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        x = eqxshard.constrain(x, P("context"))
        q, k, v = jnp.einsum("nde,se->nsd", self.qkv, x).reshape(3, -1, 2, WIDTH // 2)
        y = ring_attention(q, k, v, causal=True).reshape(x.shape) @ self.out.T
        return eqxshard.constrain(x + self.dropout(y, key=key), P("context"))


class Layer(eqx.Module):
    weight: jax.Array
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.weight, self.dropout = dense(key, WIDTH, WIDTH), eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        return x + self.dropout(jnp.tanh(self.weight @ x), key=key)


class Stages(eqx.Module):
    layers: Layer
    head: jax.Array

    def __init__(self, key):
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(key, 8))
        self.head = dense(key, WIDTH, WIDTH)


class Experts(eqx.Module):
    router: jax.Array
    experts: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.router = dense(k1, 16, WIDTH)
        self.experts = eqx.filter_vmap(lambda k: eqx.nn.MLP(WIDTH, WIDTH, 8, 1, key=k))(
            jax.random.split(k2, 16)
        )
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        mixed = mixture_of_experts(self.experts, x, x @ self.router.T, k=2, capacity=1.5)
        return x + self.dropout(mixed.output, key=key)


def sequence_losses(model, batch, key):
    out = jax.vmap(model)(batch["x"], jax.random.split(key, ROWS))
    return jnp.mean((out - batch["y"]) ** 2, axis=(1, 2))


def stage_losses(model, batch, key):
    h = pipeline(model.layers, batch["x"][:, 0], microbatches=4, key=key)
    return jnp.mean((h @ model.head.T - batch["y"][:, 0]) ** 2, axis=-1)


def make_batch(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, SEQ, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x[:, ::-1])}


def tokens(seed):
    return make_tokens(ROWS, seed=seed)


STAGED = eqxshard.first_match(
    eqxshard.by_path({"^layers": P("stage")}), eqxshard.replicate()
)
SPREAD = eqxshard.first_match(
    eqxshard.by_path({"^experts": P("expert")}), eqxshard.replicate()
)
TRANSFORMER = (Transformer, next_token_losses, tokens)
ATTENTION = (Attention, sequence_losses, make_batch)
STAGES = (Stages, stage_losses, make_batch)
EXPERTS = (Experts, sequence_losses, make_batch)


#: By name: what is trained, the rule, and the axes. The first takes the remaining devices.
STRATEGIES = {
    "data": (TRANSFORMER, eqxshard.replicate(), {"data": 0}),
    "ZeRO-1": (TRANSFORMER, ZERO1, {"data": 0}),
    "FSDP": (TRANSFORMER, FSDP, {"fsdp": 0}),
    "hybrid": (TRANSFORMER, FSDP, {"fsdp": 0, "data": 2}),
    "tensor": (TRANSFORMER, TENSOR, {"tensor": 0}),
    "data x tensor": (TRANSFORMER, TENSOR, {"data": 0, "tensor": 2}),
    "ZeRO-1 x tensor": (
        TRANSFORMER,
        eqxshard.combine(SPLIT, ZERO1),
        {"data": 0, "tensor": 2},
    ),
    "FSDP x tensor": (TRANSFORMER, eqxshard.combine(SPLIT, FSDP), {"fsdp": 0, "tensor": 2}),
    "data x FSDP x tensor": (
        TRANSFORMER,
        eqxshard.combine(
            eqxshard.by_dim(
                {"heads": "tensor", "mlp": "tensor", "vocab": ("tensor", "fsdp")}
            ),
            FSDP,
        ),
        {"fsdp": 0, "data": 2, "tensor": 2},
    ),
    "context": (ATTENTION, eqxshard.replicate(), {"context": 0}),
    "FSDP x context": (ATTENTION, FSDP, {"context": 0, "fsdp": 2}),
    "stage": (STAGES, STAGED, {"stage": 0}),
    "data x stage": (STAGES, STAGED, {"stage": 0, "data": 2}),
    "expert": (EXPERTS, SPREAD, {"expert": 0}),
    "data x expert": (EXPERTS, SPREAD, {"expert": 0, "data": 2}),
}
SLOW = ("ZeRO-1", "FSDP", "data x FSDP x tensor", "FSDP x context", "data x expert")
CASES = [
    (name, count)
    for name, (*_, axes) in STRATEGIES.items()
    for count in (1, 2, 8)
    if count == 1 or count >= 2 ** len(axes)
]


def train(kind, rule, sizes):
    make_model, loss_fn, batch = kind
    sizes = {"data": 1, **sizes}
    devices = jax.devices()[: math.prod(sizes.values())]
    placed: dict = dict(mesh=eqxshard.make_mesh(**sizes, devices=devices), rule=rule)
    # Adam would make whole steps of the rounding of gradients that are zero.
    optim = lenient(optax.adam(1e-2, eps=1e-2))
    state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **placed)
    initial = arrays(state.model)
    train_step = eqxshard.make_train_step(loss_fn, optim, **placed)
    losses = []
    for seed in range(STEPS):
        state, metrics = train_step(state, batch(seed))
        losses.append(float(metrics["loss"]))
    return initial, np.array(losses), arrays(state.model)


@functools.cache
def alone(kind):
    """Train on one device, with a mesh and a rule that split nothing."""
    return train(kind, eqxshard.replicate(), {})


@pytest.mark.parametrize(
    "name, count",
    graded(CASES, slow=[(name, 8) for name in SLOW]),
)
def test_a_strategy_is_the_same_as_one_device(name, count):
    kind, rule, axes = STRATEGIES[name]
    rest = max(1, count // math.prod(size or 1 for size in axes.values()))
    # On one device all axes have size 1, with the same rule.
    sizes = {axis: 1 if count == 1 else size or rest for axis, size in axes.items()}
    initial, losses, model = train(kind, rule, sizes)
    expected = alone(kind)
    for path, array in expected[0].items():
        np.testing.assert_array_equal(initial[path], array, err_msg=path)
    assert losses[-1] < 0.99 * losses[0]
    np.testing.assert_allclose(losses, expected[1], rtol=1e-5)
    for path, array in expected[2].items():
        off = np.max(np.abs(model[path] - array)) / np.max(np.abs(array))
        assert off < 1e-5, path


# Initialisation


class Leaves(eqx.Module):
    """Arrays of one size, most of whose dims divide by 8."""

    matrix: Float[Array, "mlp embed"]
    heads: Float[Array, "heads head_dim embed"]
    vector: Float[Array, " wide"]
    zeros: Float[Array, " wide"]
    layers: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.matrix = jax.random.normal(k1, (64, 64)) / 8
        self.heads = jax.random.truncated_normal(k2, -2.0, 2.0, (64, 8, 8))
        self.vector, self.zeros = jax.random.uniform(k3, (64 * 64,)), jnp.zeros(64 * 64)
        self.layers = eqx.filter_vmap(
            lambda key: eqx.nn.Linear(8, 64, use_bias=False, key=key)
        )(jax.random.split(k4, 8))


ROWWISE = eqxshard.by_dim(dict.fromkeys(("mlp", "heads", "out", "wide"), "tensor"))
GRID = eqxshard.by_dim(
    dict.fromkeys(("mlp", "heads", "out"), "tensor")
    | dict.fromkeys(("embed", "in"), "fsdp")
    | {"wide": ("tensor", "fsdp")}
)
#: By name: the rule, the axes, and the number of devices that it splits parameters over. It
#: splits the optimizer's state over all 8.
SPLITS: dict[str, tuple[Rule, dict[str, Any], int]] = {
    "FSDP over two axes": (
        eqxshard.fsdp(min_size=1, axis=("data", "fsdp")),
        {"data": 2, "fsdp": 4},
        8,
    ),
    "tensor by two axes": (GRID, {"fsdp": 4, "tensor": 2}, 8),
    "ZeRO-1": (eqxshard.zero1(min_size=1), {"data": 8}, 1),
    "ZeRO-1 x tensor": (
        eqxshard.combine(ROWWISE, eqxshard.zero1(min_size=1)),
        {"data": 4, "tensor": 2},
        2,
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_no_device_makes_more_of_an_array_than_it_keeps(name, monkeypatch):
    rule, sizes, parts = SPLITS[name]
    with compiled_by_jit(monkeypatch) as compiled:
        eqxshard.init_state(
            Leaves,
            # Its state has a dtype of its own, to be told from the parameters.
            lenient(optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16)),
            key=jax.random.key(0),
            mesh=eqxshard.make_mesh(**{"data": 1, **sizes}),
            rule=rule,
        )
    texts = [program.as_text() for program in compiled]
    # Not the trial of the optimizer, which takes small layers of its own.
    made = [text for text in texts if text.startswith("HloModule jit_make_arrays")]
    found = largest_arrays("".join(made))
    assert found.pop("bf16") == 64 * 64 // 8
    assert {"f32", "u32"} < set(found)
    assert max(found.values()) == 64 * 64 // parts


def largest_arrays(text):
    """By dtype, the size of the largest array anywhere in a compiled program."""
    found: dict[str, int] = {}
    for dtype, dims in re.findall(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]", text):
        size = math.prod(map(int, filter(None, dims.split(","))))
        found[dtype] = max(found.get(dtype, 0), size)
    return found
