"""Random models under random rules on random meshes train as one writes it by hand.

By hand is NumPy in float64: no mesh, no rule, no derivative by JAX. More of them are tried
by `EQXSHARD_RANDOM_MODELS=500 pytest -m slow tests/test_random_models.py`.
"""

import itertools
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

import eqxshard

ROWS, STEPS, RATE, MOMENTUM = 16, 2, 0.05, 0.9
OPTIM = lenient(optax.sgd(RATE, momentum=MOMENTUM))
AXES = ("stage", "data", "fsdp", "context", "expert", "tensor")
#: By dtype, the relative error of rounding to it: its significand has 24, 11 or 8 bits.
TRAINED = {"float32": 2**-24, "complex64": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
#: The rounding of a handful of operations in float32, in which the loss computes.
SINGLE = 16 * 2**-24
DTYPES = (*TRAINED, "float32", "int32", "uint8", "bool")
SIZES = (1, 2, 3, 4, 6, 8, 8, 16, 0)


class Block(eqx.Module):
    """Two arrays whose dims have names."""

    up: Shaped[Array, "mlp embed"]
    bias: Shaped[Array, " mlp"]


@dataclass(frozen=True)
class Case:
    """A model, its mesh and rule, and how to train it."""

    model: Any
    sizes: dict[str, int]
    rule: Any
    trainable: Any
    weight: Any
    accumulate: int
    in_one_dispatch: bool


# Random cases


def make_array(number, shape, dtype):
    """Small numbers, all different."""
    values = np.sin(1 + number + np.arange(math.prod(shape)))
    if dtype == "complex64":
        values = values + 1j * np.cos(values)
    if not jnp.issubdtype(dtype, jnp.inexact):
        values = 8 * np.abs(values)
    return values.astype(dtype).reshape(shape)


@st.composite
def models(draw):
    """PyTrees of containers and a module; not all of the arrays can be trained."""
    numbers = iter(range(99))

    def make(*shape):
        dtype = jnp.dtype(draw(st.sampled_from(DTYPES)))
        return make_array(next(numbers), shape, dtype)

    shapes = st.lists(st.sampled_from(SIZES), max_size=3).map(tuple)
    items = [make(*shape) for shape in draw(st.lists(shapes, max_size=2))]
    nested = tuple(make(*shape) for shape in draw(st.lists(shapes, max_size=2)))
    mlp, embed = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    return {
        "items": items,
        "nested": {"pair": nested, "function": jnp.sin},
        "block": Block(up=make(mlp, embed), bias=make(mlp)),
    }


@st.composite
def meshes(draw):
    """The sizes of a mesh of 1, 2, 4 or 8 devices, along any axes."""
    sizes = dict.fromkeys(AXES, 1)
    for axis in draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=3)):
        sizes[axis] *= 2
    return sizes


def fitting(draw, size, sizes, free):
    """The axes of one dim, taken from those that are free."""
    taken: list[str] = []
    for _ in range(draw(st.integers(0, 2))):
        parts = math.prod(sizes[axis] for axis in taken)
        found = [axis for axis in free if size % (parts * sizes[axis]) == 0]
        if found:
            taken.append(draw(st.sampled_from(found)))
            free.remove(taken[-1])
    return tuple(taken)


@st.composite
def rules(draw, model, sizes):
    """A rule that is legal for this model on this mesh, as arguments of `make_rule`."""
    least, free = draw(st.sampled_from((1, 16))), list(AXES)
    name = draw(st.sampled_from(["replicate", "fsdp", "zero1"]))
    options = {"min_size": least, "axis": ("data", "fsdp")}
    if draw(st.booleans()):
        del options["axis"]
    for_all = name, {} if name == "replicate" else options
    kind = draw(st.sampled_from(["all", "path", "path", "dim"]))
    if kind == "all":
        return (for_all,)
    join = draw(st.sampled_from(["combine", "first_match"]))
    if kind == "dim":
        shape = dict(zip(("mlp", "embed"), model["block"].up.shape, strict=True))
        axes = {name: fitting(draw, size, sizes, free) for name, size in shape.items()}
        return for_all, join, "by_dim", axes
    specs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(leaf, np.ndarray) and draw(st.booleans()):
            name, free = jax.tree_util.keystr(path, simple=True, separator="."), list(AXES)
            spec = [fitting(draw, size, sizes, free) or None for size in leaf.shape]
            specs[f"^{name}$"] = P(*spec)
    return for_all, join, "by_path", specs


def make_rule(for_all, join="", split="", how=None):
    """A rule for some leaves, if there is one, and one for all."""
    name, options = for_all
    rule = getattr(eqxshard, name)(**options)
    if not join:
        return rule
    return getattr(eqxshard, join)(getattr(eqxshard, split)(how), rule)


@st.composite
def cases(draw):
    model, sizes = draw(models()), draw(meshes())
    return Case(
        model,
        sizes,
        draw(rules(model, sizes)),
        jax.tree.map(lambda leaf: draw(st.sampled_from([True, True, False])), model),
        draw(st.sampled_from([None, np.arange(ROWS) % 3])),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.booleans()),
    )


def make_batch(seed, weight):
    rng = np.random.default_rng(seed)
    batch = {name: rng.uniform(-1, 1, ROWS).astype(np.float32) for name in "xy"}
    return batch if weight is None else {**batch, "__weight__": weight.astype(np.float32)}


# Training, by eqxshard and by hand


def number_of(array, x):
    """One number of an array for one example, which no element hardly changes."""
    wide = [jnp.real(array), jnp.imag(array)] if jnp.iscomplexobj(array) else [array]
    total = sum(jnp.sum(jnp.sin(part.astype(jnp.float32) * x)) for part in wide)
    return total / math.sqrt(max(array.size, 1))


def loss_fn(model, batch, key):
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))

    def one(x, y):
        numbers = (n * number_of(array, x) for n, array in enumerate(arrays, 1))
        return (sum(numbers, jnp.zeros(())) - y) ** 2

    return jax.vmap(one)(batch["x"], batch["y"])


def train(case):
    """The arrays at the start, the loss of each step, and the arrays at the end."""
    devices = jax.devices()[: math.prod(case.sizes.values())]
    state = eqxshard.init_state(
        lambda key: jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf,
            case.model,
        ),
        OPTIM,
        key=jax.random.key(0),
        mesh=eqxshard.make_mesh(**case.sizes, devices=devices),
        rule=make_rule(*case.rule),
        trainable=case.trainable,
    )
    initial = [np.array(leaf) for leaf in arrays_of(state)]
    step = eqxshard.make_train_step(loss_fn, OPTIM, accumulate=case.accumulate, lint="off")
    batches = [make_batch(seed, case.weight) for seed in range(STEPS)]
    if case.in_one_dispatch:
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        state, metrics = step.many(state, stacked)
        losses = np.asarray(metrics["loss"])
    else:
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics.compute()["loss"])
    return initial, losses, arrays_of(state)


def arrays_of(state):
    return jax.tree.leaves(eqx.filter(state.model, eqx.is_array))


class ByHand:
    """The real or the imaginary part of an array, in float64.

    The `off`s bound how far rounding may have taken eqxshard's numbers from these. They are
    no estimates: sines and cosines change by no more than their arguments do.
    """

    def __init__(self, array, n, trained):
        self.now = np.asarray(array).astype(float)
        self.scale = n / math.sqrt(max(self.now.size, 1))
        self.unit = TRAINED[str(array.dtype)] if trained else None
        self.off = self.momentum = self.momentum_off = np.zeros(self.now.shape)

    def forward(self, x):
        """The part's contribution to the prediction for each example."""
        angles = np.multiply.outer(x, self.now)
        off = np.abs(np.multiply.outer(x, self.off)) + SINGLE * (1 + np.abs(angles))
        each = np.reshape([np.sin(angles), off], (2, ROWS, -1))
        return self.scale * each.sum(2)

    def update(self, x, slope, slope_off):
        """Go down the slope of the loss as the prediction for each example has it."""
        if self.unit is None:
            return
        cosines = np.cos(np.multiply.outer(x, self.now))
        grad = self.scale * np.tensordot(slope, cosines, 1)
        most = self.scale * np.sum(np.abs(slope))
        grad_off = self.scale * (np.sum(slope_off) + np.abs(slope * x).sum() * self.off)
        # The gradient of each microbatch is rounded, and so is their sum.
        grad_off += most * (2 * self.unit + SINGLE) + SINGLE
        # The result of each operation is rounded, and the constant of each product.
        momentum = MOMENTUM * self.momentum
        off = MOMENTUM * self.momentum_off
        off += 2 * self.unit * (np.abs(momentum) + off) + grad_off
        self.momentum = momentum + grad
        self.momentum_off = off + self.unit * (np.abs(self.momentum) + off)
        change = RATE * self.momentum
        off = RATE * self.momentum_off
        off += 2 * self.unit * (np.abs(change) + off) + self.off
        self.now = self.now - change
        self.off = off + self.unit * (np.abs(self.now) + off)


def train_by_hand(case):
    """The losses, each with its bound, and the parts of the arrays at the end."""
    leaves, treedef = jax.tree.flatten(case.model)
    chosen = treedef.flatten_up_to(case.trainable)
    pairs = [pair for pair in zip(leaves, chosen) if isinstance(pair[0], np.ndarray)]
    arrays = [
        [
            ByHand(part, n, chosen and str(array.dtype) in TRAINED)
            for part in parts_of(array)
        ]
        for n, (array, chosen) in enumerate(pairs, 1)
    ]
    weight = np.ones(ROWS) if case.weight is None else case.weight.astype(float)
    weight /= weight.sum()
    losses = []
    for seed in range(STEPS):
        batch = make_batch(seed, case.weight)
        x = batch["x"].astype(float)
        error, off = -batch["y"].astype(float), np.zeros(ROWS)
        for part in itertools.chain(*arrays):
            added, added_off = part.forward(x)
            error, off = error + added, off + added_off + SINGLE * np.abs(error)
        off += SINGLE * np.abs(error)
        loss = np.sum(weight * error**2)
        losses.append(
            (loss, np.sum(weight * off * (2 * np.abs(error) + off)) + SINGLE * loss)
        )
        slope = 2 * weight * error * x
        slope_off = 2 * weight * np.abs(x) * off + SINGLE * np.abs(slope)
        for part in itertools.chain(*arrays):
            part.update(x, slope, slope_off)
    return losses, arrays


def parts_of(array):
    """The real and the imaginary part, or the array."""
    return (array.real, array.imag) if array.dtype == "complex64" else (array,)


def compare(trained, by_hand):
    _, losses, arrays = trained
    expected_losses, expected_arrays = by_hand
    for loss, (expected, off) in zip(losses, expected_losses, strict=True):
        assert abs(loss - expected) <= off
    for array, parts in zip(arrays, expected_arrays, strict=True):
        for part, expected in zip(parts_of(np.asarray(array)), parts, strict=True):
            assert part.shape == expected.now.shape
            assert (np.abs(part.astype(float) - expected.now) <= expected.off).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_errors_are_larger_than_the_bound_on_rounding(dtype):
    model = {name: make_array(n, (8, 2), dtype) for n, name in enumerate("ab")}
    weight = np.ones(ROWS)
    case = Case(
        model=model,
        sizes=dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2},
        rule=(("fsdp", {"min_size": 1}),),
        trainable={"a": True, "b": True},
        weight=weight,
        accumulate=1,
        in_one_dispatch=False,
    )
    trained = train(case)
    compare(trained, train_by_hand(case))
    wrong = {
        "a lost gradient": {"trainable": {"a": True, "b": False}},
        "a doubled example": {"weight": weight + (np.arange(ROWS) == 3)},
        "a lost shard": {"weight": weight * (np.arange(ROWS) < ROWS - 4)},
        "swapped arrays": {"model": {"a": model["b"], "b": model["a"]}},
    }
    for change in wrong.values():
        with pytest.raises(AssertionError):
            compare(trained, train_by_hand(replace(case, **change)))


@pytest.mark.versions
@pytest.mark.slow
@settings(max_examples=int(os.environ.get("EQXSHARD_RANDOM_MODELS", "10")))
@given(cases())
def test_random_models_train_as_by_hand(case):
    trained = initial, _, arrays = train(case)
    given = [x for x in jax.tree.leaves(case.model) if isinstance(x, np.ndarray)]
    for array, expected, after in zip(initial, given, arrays, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert after.dtype == expected.dtype
    compare(trained, train_by_hand(case))
