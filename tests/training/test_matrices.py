"""Optimizers that need whole matrices: their values, and their communication."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import lenient
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.testing import collectives
from eqxshard.training._optimizer import _find_owners

KEY = jax.random.key(0)
WIDTH = 16


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[0])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[1])

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Model(eqx.Module):
    """Layers that are stacked, layers that are not, and a matrix like no other."""

    stack: Block
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 11)
        self.stack = eqx.filter_vmap(Block)(keys[:8])
        self.blocks = [Block(key) for key in keys[8:-1]]
        self.head = eqx.nn.Linear(WIDTH, 4, key=keys[-1])

    def __call__(self, x):
        x = eqxshard.scan_layers(self.stack, x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=1)


def rule(path, leaf, mesh):
    """Layers over stages, tensor parallelism, and the other dim over fsdp."""
    stacked = ("stage",) * path.startswith("stack")
    if path.endswith("up.weight"):
        return P(*stacked, "tensor", "fsdp")
    if path.endswith("down.weight"):
        return P(*stacked, "fsdp", "tensor")
    return P("tensor" if path == "head.weight" else None)


class WhitenState(NamedTuple):
    count: Any
    factors: Any


def whiten(rate=1e-2, every=2):
    """Like Shampoo: matrices times roots of sums of products, found every other step."""

    def init(params):
        sides = jax.tree.map(lambda x: jnp.eye(x.shape[0]) if x.ndim == 2 else None, params)
        return WhitenState(jnp.zeros((), jnp.int32), (sides, sides))

    def update(updates, state, params=None):
        del params

        def one(grad, factor, root):
            if factor is None:
                return -rate * grad, None, None
            factor = factor + grad @ grad.T

            def find():
                values, vectors = jnp.linalg.eigh(factor)
                return (vectors * values**-0.25) @ vectors.T

            root = jax.lax.cond(state.count % every == 0, find, lambda: root)
            return -rate * (root @ grad), factor, root

        is_none = lambda x: x is None  # noqa: E731
        grads, structure = jax.tree.flatten(updates)
        sides = [jax.tree.leaves(side, is_leaf=is_none) for side in state.factors]
        found = [one(*parts) for parts in zip(grads, *sides, strict=True)]
        new, factors, roots = (jax.tree.unflatten(structure, each) for each in zip(*found))
        return new, WhitenState(state.count + 1, (factors, roots))

    return optax.GradientTransformation(init, update)


def masked():
    """Products with a constant of each leaf's own, inside of a jitted function."""

    def update(updates, state, params=None):
        del params
        rng = np.random.default_rng(0)

        def one(grad):
            if grad.ndim != 2:
                return -1e-2 * grad
            mask = np.asarray(rng.random((len(grad),) * 2) < 0.5, np.float32)
            return jax.jit(lambda grad: -1e-2 * (mask @ (grad @ (grad.T @ grad))))(grad)

        return jax.tree.map(one, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


muon = optax.contrib.muon
OPTIMS: dict[str, Any] = {
    "muon": muon(1e-2, weight_decay=0.1),
    "clipped": optax.chain(muon(1e-2), optax.clip_by_global_norm(1e-3), muon(1e-2)),
    "adaptive": muon(optax.linear_schedule(0.0, 1e-2, 3), adaptive=True, nesterov=False),
    "polar": muon(1e-2, ns_coeffs="dion", preconditioning="schatten"),
    "spectral": muon(1e-2, preconditioning="spectral", consistent_rms=0.2),
    "averaged": optax.chain(muon(1e-2), eqxshard.ema_weights(0.9)),
    "several": optax.MultiSteps(muon(1e-2), 2).gradient_transformation(),
    "galore": optax.contrib.galore(1e-2, 4),
    "whiten": whiten(),
    "masked": masked(),
}
#: The optimizers that are tried in quick tests.
OFTEN = ["whiten", "masked"]
MESHES = [
    {"fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"stage": 2, "data": 2, "fsdp": 2},
]
#: On eight devices, its batched SVD takes all threads of XLA's pool, and hangs.
FEW = {"fsdp": 2, "tensor": 2}

OTHERS: dict[str, Any] = {
    "accumulate": {"accumulate": 2},
    "ignore": {"nonfinite": "ignore"},
    "zero1": {"rule": eqxshard.zero1(min_size=1)},
    "offload": {"rule": eqxshard.offload(rule)},
}


def make_step(optim, sizes, **options):
    """A train step, a state for it and a batch, on a mesh of all devices or on one."""
    sizes = {"data": 1, **sizes}
    mesh = eqxshard.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    placed: Any = dict(mesh=mesh, rule=options.pop("rule", rule))
    optim = eqxshard.per_layer(lenient(optim), "stack")
    state = eqxshard.init_state(Model, optim, key=KEY, **placed)
    options = {**placed, **options}
    step = eqxshard.make_train_step(loss_fn, optim, **options)
    keys = jax.random.split(KEY)
    batch = {
        "x": jax.random.normal(keys[0], (16, WIDTH)),
        "y": jax.random.normal(keys[1], (16, 4)),
    }
    return step, state, batch


def train(optim, sizes, steps=3, **options):
    step, state, batch = make_step(optim, sizes, **options)
    for _ in range(steps):
        state, _ = step(state, batch)
    arrays = eqx.filter((state.model, state.opt_state), eqx.is_array)
    return jax.tree.map(np.asarray, arrays)


def assert_close(found, wanted, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * np.max(np.abs(b), initial=1)
        )


@pytest.mark.parametrize(
    "name, sizes",
    graded(
        [("muon", x) for x in MESHES]
        + [(x, FEW if x == "spectral" else MESHES[2]) for x in OPTIMS if x != "muon"],
        slow=[("muon", MESHES[1]), ("muon", MESHES[2]), *((x, MESHES[2]) for x in OFTEN)],
    ),
)
def test_steps_are_those_of_one_device(name, sizes):
    optim = OPTIMS[name]
    # Muon applied to Muon's result amplifies rounding.
    tolerance = 2e-4 if name == "clipped" else 2e-5
    assert_close(train(optim, sizes), train(optim, {}), tolerance)


@pytest.mark.parametrize("name", graded(OTHERS, slow=["accumulate"]))
def test_so_they_are_with_other_options(name):
    options = OTHERS[name]
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    assert_close(train(OPTIMS["muon"], sizes, **options), train(OPTIMS["muon"], {}))


@pytest.mark.slow
def test_a_step_that_is_not_finite_writes_nothing():
    step, state, batch = make_step(OPTIMS["muon"], MESHES[2])
    state, _ = step(state, batch)
    before = jax.tree.map(np.asarray, eqx.filter(state.model, eqx.is_array))
    state, metrics = step(state, {**batch, "x": batch["x"].at[0].set(np.nan)})
    assert metrics.nonfinite == 1
    after = jax.tree.map(np.asarray, eqx.filter(state.model, eqx.is_array))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


@pytest.mark.slow
def test_matrices_of_a_stack_go_to_their_owners_and_back():
    ops = collectives(*make_step(OPTIMS["muon"], {"fsdp": 8}))
    found = [op for op in ops if op.kind == "all-to-all"]
    # Two for `up` and two for `down`, which come back for the decay of weights.
    assert len(found) == 2 * 2
    assert {op.bytes for op in found} == {4 * 8 * 2 * WIDTH**2 // 8}


def test_axes_for_which_the_number_of_layers_does_not_divide_are_left_out():
    mesh = eqxshard.make_mesh(fsdp=4, tensor=2)
    shardings = [jax.NamedSharding(mesh, P(None, "fsdp", "tensor"))]
    for layers, axes in {8: ("fsdp", "tensor"), 6: ("tensor",), 4: ("fsdp",)}.items():
        found = _find_owners(shardings, layers)
        assert found is not None and found.spec == P(axes)
    assert _find_owners(shardings, 5) is None


@pytest.mark.slow
def test_the_switch_leaves_an_update_to_the_compiler(monkeypatch):
    monkeypatch.setenv("EQXSHARD_REWRITE", "off")
    step, state, batch = make_step(OPTIMS["muon"], {"data": 2, "fsdp": 4})
    assert "all-to-all" not in collectives(step, state, batch).counts
