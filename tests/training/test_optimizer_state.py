"""Optimizer state that is not shaped like its parameters is split, too, and explained."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import assert_close, assert_equal
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from optax import contrib

import eqxshard

KEY = jax.random.key(0)
TENSOR = eqxshard.by_dim({"mlp": "tensor"})
FSDP = eqxshard.fsdp(min_size=64)
RULES = {
    "fsdp": FSDP,
    "tensor": eqxshard.first_match(TENSOR, eqxshard.replicate()),
    "both": eqxshard.combine(TENSOR, FSDP),
    "by path": eqxshard.by_path(
        {"up$": P("tensor", None), "square$": P(None, "tensor"), "bias$": P("tensor")}
    ),
}
SIZES = {"fsdp": {"fsdp": 4}, "tensor": {"data": 2, "tensor": 4}}
BOTH = {"data": 2, "fsdp": 2, "tensor": 2}


def make_mesh(name):
    sizes: dict[str, Any] = {"data": 1, **SIZES.get(name, BOTH)}
    return eqxshard.make_mesh(**sizes, devices=jax.devices()[: 4 if name == "fsdp" else 8])


class Layer(eqx.Module):
    up: Float[Array, "mlp embed"]
    square: Float[Array, "embed out"]
    bias: Float[Array, " mlp"]

    def __init__(self, key):
        up, square = jax.random.split(key)
        self.up = jax.random.normal(up, (32, 16)) / 4
        self.square = jax.random.normal(square, (16, 16)) / 4
        self.bias = jnp.zeros(32)

    def __call__(self, x):
        return x + self.square @ (self.up.T @ jnp.tanh(self.up @ x + self.bias))


class Net(eqx.Module):
    """The same layers, as a list and stacked."""

    layers: Any
    stacked: bool = eqx.field(static=True)

    def __init__(self, key, stacked=False):
        keys = jax.random.split(key, 2)
        self.stacked = stacked
        make = eqx.filter_vmap(Layer)
        self.layers = make(keys) if stacked else [*map(Layer, keys)]

    def __call__(self, x):
        if self.stacked:
            return eqxshard.scan_layers(self.layers, x)
        for layer in self.layers:
            x = layer(x)
        return x


# Optimizers with matrices, as one writes them with optax.


class Matrices(NamedTuple):
    mu: Any
    pairs: Any


def matrix_optimizer(start, step):
    """An optimizer with two matrices for each dim of a parameter of two."""

    def init(params):
        def pairs(x):
            return [(start * jnp.eye(n), jnp.eye(n)) for n in x.shape if x.ndim > 1]

        zeros = jax.tree.map(jnp.zeros_like, params)
        return Matrices(zeros, jax.tree.map(pairs, params))

    def update(updates, state, params=None):
        flat, treedef = jax.tree.flatten(updates)
        kept = (treedef.flatten_up_to(x) for x in (state.mu, state.pairs))
        outs = [step(*each) for each in zip(flat, *kept)]
        updates, mu, pairs = (treedef.unflatten(x[i] for x in outs) for i in range(3))
        scaled = jax.tree.map(lambda x: -0.01 * x, updates)
        return scaled, Matrices(mu, pairs)

    return optax.GradientTransformation(init, update)


def shampoo(grad, mu, pairs):
    """Shampoo (Gupta et al., https://arxiv.org/abs/1802.09568)."""
    new, out = [], grad
    for (stat, _), other in zip(pairs, (grad, grad.T)):
        stat = 0.9 * stat + other @ other.T
        values, vectors = jnp.linalg.eigh(stat)
        new.append((stat, (vectors * values[None] ** -0.25) @ vectors.T))
    if new:
        out = new[0][1] @ grad @ new[1][1]
    mu = 0.9 * mu + out
    return mu, mu, new


def soap(grad, mu, pairs):
    """Adam in the eigenbasis of Shampoo (Vyas et al., https://arxiv.org/abs/2409.11321)."""
    if not pairs:
        return grad, mu, pairs
    (left, basis), (right, other) = pairs
    turned = basis.T @ grad @ other
    mu = 0.9 * mu + 0.1 * turned**2
    out = basis @ (turned / (jnp.sqrt(mu) + 1e-2)) @ other.T
    left, right = 0.9 * left + grad @ grad.T, 0.9 * right + grad.T @ grad
    basis, other = (jnp.linalg.qr(m @ q)[0] for m, q in ((left, basis), (right, other)))
    return out, mu, [(left, basis), (right, other)]


OPTIMS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "sm3": optax.sm3(1e-2),
    "shampoo": matrix_optimizer(1.0, shampoo),
    "soap": matrix_optimizer(1.0, soap),
    "galore": contrib.galore(1e-2, rank=8),
    "lbfgs": optax.lbfgs(1e-2, memory_size=3, linesearch=None),
    "muon": contrib.muon(1e-2),
    "flat": optax.flatten(optax.adam(1e-2)),
}


@functools.cache
def explained(name, rule):
    shapes = eqx.filter_eval_shape(Net, KEY)
    return eqxshard.explain(shapes, make_mesh(rule), RULES[rule], optim=OPTIMS[name])


WHOLE, ROWS, COLUMNS = P(), P("fsdp"), P(None, "fsdp")


@pytest.mark.parametrize(
    "name, path, both, fsdp, tensor, by_path",
    [
        # Smaller than `min_size`; and specs of two entries are not for vectors.
        ("adafactor", "0.v_row.layers.0.up", WHOLE, WHOLE, WHOLE, WHOLE),
        ("adafactor", "0.v_col.layers.0.up", WHOLE, WHOLE, WHOLE, WHOLE),
        ("sm3", "0.mu.layers.1.up.0", WHOLE, WHOLE, WHOLE, WHOLE),
        # Square matrices of 32 and of 16 rows.
        ("shampoo", "pairs.layers.0.up.0.0", ROWS, ROWS, WHOLE, P("tensor", None)),
        ("soap", "pairs.layers.1.up.1.1", ROWS, ROWS, WHOLE, P("tensor", None)),
        ("galore", "0.projector.layers.0.up", ROWS, ROWS, WHOLE, P("tensor", None)),
        # In a history of three, the second dim is the first of the parameter.
        ("lbfgs", "0.diff_params_memory.layers.0.up", COLUMNS, COLUMNS, WHOLE, WHOLE),
        # This state belongs to all parameters together.
        ("flat", "0.mu", ROWS, ROWS, WHOLE, WHOLE),
        ("muon", "inner_states.muon.inner_state.0.ns_coeffs", *[WHOLE] * 4),
    ],
)
def test_the_rule_decides_about_other_shapes(name, path, both, fsdp, tensor, by_path):
    rules = ("both", "fsdp", "tensor", "by path")
    found = {
        rule: next(x.spec for x in explained(name, rule).other_shapes if x.path == path)
        for rule in rules
    }
    assert found == dict(zip(rules, (both, fsdp, tensor, by_path)))


def test_an_error_of_the_users_rule_is_an_error():
    def of_matrices(path, leaf, mesh):
        return P("fsdp" if leaf.shape[1] % 4 == 0 else None)

    def whatever_the_shape(path, leaf, mesh):
        return P(None, "fsdp") if path.endswith("up") else P()

    shapes = eqx.filter_eval_shape(lambda key: {"up": Layer(key).up}, KEY)
    explain = functools.partial(eqxshard.explain, optim=OPTIMS["adafactor"])
    with pytest.raises(IndexError):
        explain(shapes, make_mesh("fsdp"), of_matrices)
    says = r"not fit opt_state\.0\.v_row\.up, which is not shaped like .*: up \(16,\)"
    with pytest.raises(ValueError, match=says):
        explain(shapes, make_mesh("fsdp"), whatever_the_shape)


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def make_batch(seed):
    x = np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x)}


def train(optim, mesh, rule, stacked):
    placed: dict[str, Any] = {"mesh": mesh, "rule": rule}
    optim = eqxshard.per_layer(optim, "layers") if stacked else optim
    make_model = lambda key: Net(key, stacked)  # noqa: E731
    state = eqxshard.init_state(make_model, optim, key=KEY, **placed)
    train_step = eqxshard.make_train_step(loss_fn, optim, lint="off", **placed)
    start = jax.tree.map(np.asarray, eqx.filter(state.opt_state, eqx.is_array))
    places = [x.sharding for x in jax.tree.leaves(state.opt_state)]
    for seed in range(2):
        state, _ = train_step(state, make_batch(seed))
    assert [x.sharding for x in jax.tree.leaves(state.opt_state)] == places
    return start, state


CASES = [
    (name, rule, stacked)
    for name in OPTIMS
    for rule in ("fsdp", "tensor", "both", "by path")
    for stacked in (False, True)
    # GaLoRe cannot update the parameters outside of the stack, since there are none.
    if not (stacked and name in ("flat", "lbfgs", "galore"))
]
SLOW = [
    ("adafactor", "both", True),
    ("shampoo", "fsdp", True),
    ("shampoo", "both", False),
    ("soap", "both", False),
    ("galore", "fsdp", False),
    ("flat", "both", False),
]


@pytest.mark.parametrize("name, rule, stacked", graded(CASES, slow=SLOW))
def test_two_steps_are_those_of_one_device(name, rule, stacked):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        one = eqxshard.make_mesh(data=1, devices=jax.devices()[:1])
        wanted, alone = train(OPTIMS[name], one, eqxshard.replicate(), stacked)
        start, state = train(OPTIMS[name], make_mesh(rule), RULES[rule], stacked)
    assert_equal(start, wanted)
    assert_close(state.model, alone.model, rtol=1e-5, atol=1e-5)


def test_what_is_replicated_is_explained_and_why():
    by_path = explained("sm3", "by path")
    notes = {leaf.path: leaf.note for leaf in by_path.other_shapes if leaf.note}
    assert len(notes) == 8 and "no spec for this shape" in notes["0.mu.layers.0.up.1"]
    assert "replicated: 640 B" in str(by_path)
    rows = {leaf.path: leaf for leaf in explained("shampoo", "fsdp").other_shapes}
    assert not any(leaf.note for leaf in rows.values())
    odd = {"a": jax.ShapeDtypeStruct((33, 64), jnp.float32)}
    placed = {"mesh": make_mesh("fsdp"), "rule": FSDP}
    explanation = eqxshard.explain(odd, **placed, optim=OPTIMS["shampoo"])
    left = explanation.other_shapes[0]
    assert (left.path, left.spec, left.bytes_per_device) == (
        "pairs.a.0.0",
        P(),
        33 * 33 * 4,
    )
    assert "no dim of (33, 33) is divisible by fsdp=4" in left.note
    assert explanation.leaves[0].optimizer == 4 * (33 * 16 + 2 * 33 * 33 + 2 * 64 * 16)


@pytest.mark.slow
def test_lint_finds_what_is_larger_than_its_parameter():
    def make_model(key):
        return {"a": jax.random.normal(key, (33, 64))}

    def product(model, batch, key):
        return jnp.sum(batch["x"] @ model["a"], axis=-1)

    placed: dict[str, Any] = {"mesh": make_mesh("fsdp"), "rule": FSDP}
    state = eqxshard.abstract_state(make_model, OPTIMS["shampoo"], key=KEY, **placed)
    train_step = eqxshard.make_train_step(product, OPTIMS["shampoo"], **placed)
    batch = {"x": jax.ShapeDtypeStruct((8, 33), jnp.float32)}
    found = [x for x in eqxshard.lint(train_step, state, batch) if x.kind == "whole"]
    assert [x.leaf for x in found] == ["opt_state.pairs.a.0.0", "opt_state.pairs.a.0.1"]
    assert "is whole on every device, and its parameter is not" in str(found[0])


def test_without_a_rule_the_state_of_other_shapes_is_nowhere_yet():
    rows = jax.NamedSharding(make_mesh("fsdp"), ROWS)
    params = jax.device_put({"up": jnp.zeros((32, 16))}, rows)
    found = eqxshard.explain(params, optim=OPTIMS["adafactor"])
    assert found.leaves[0].spec == ROWS
    factors = [x.spec for x in found.other_shapes]
    assert len(factors) == 2 and set(factors) == {WHOLE}
