"""Random models under random rules on random meshes train as one writes it by hand.

By hand is NumPy in float64: no mesh, no rule, no derivative by JAX.
"""

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import lenient
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

import eqxshard

ROWS, STEPS, RATE, MOMENTUM = 16, 2, 0.1, 0.9
OPTIM = lenient(optax.sgd(RATE, momentum=MOMENTUM))
AXES = ("stage", "data", "fsdp", "context", "expert", "tensor")
#: By dtype, the difference that its rounding may make in a few steps.
TRAINED = {"float32": 2e-5, "complex64": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
DTYPES = (*TRAINED, "float32", "int32", "uint8", "bool")
SIZES = (1, 2, 3, 4, 6, 8, 8, 16, 0)


class Block(eqx.Module):
    """Two arrays whose dims have names."""

    up: Shaped[Array, "mlp embed"]
    bias: Shaped[Array, " mlp"]


@dataclass(frozen=True)
class Case:
    """What to train, and how."""

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
    return batch if weight is None else {**batch, "weight": weight.astype(np.float32)}


# Training, by eqxshard and by hand


def mean_of(array, x):
    """A number of one array for one example."""
    wide = [jnp.real(array), jnp.imag(array)] if jnp.iscomplexobj(array) else [array]
    total = sum(jnp.sum(jnp.sin(part.astype(jnp.float32) * x)) for part in wide)
    return total / max(array.size, 1)


def loss_fn(model, batch, key):
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))

    def one(x, y):
        means = (n * mean_of(array, x) for n, array in enumerate(arrays, 1))
        return (sum(means, jnp.zeros(())) - y) ** 2

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


def train_by_hand(case):
    """The losses and the arrays at the end, in NumPy."""
    leaves, treedef = jax.tree.flatten(case.model)
    chosen = treedef.flatten_up_to(case.trainable)
    pairs = [pair for pair in zip(leaves, chosen) if isinstance(pair[0], np.ndarray)]
    arrays = [array for array, _ in pairs]
    trained = [chosen and str(array.dtype) in TRAINED for array, chosen in pairs]
    momenta: list[Any] = [0.0] * len(arrays)
    weight = np.ones(ROWS) if case.weight is None else case.weight.astype(float)
    losses = []
    for seed in range(STEPS):
        batch = make_batch(seed, case.weight)
        x = batch["x"].astype(float)
        each = [[*map(wide, parts_of(array))] for array in arrays]
        errors = -batch["y"].astype(float)
        for n, parts in enumerate(each, 1):
            sines = sum(np.sin(np.multiply.outer(x, part)) for part in parts)
            errors += n * np.reshape(sines, (ROWS, -1)).sum(1) / max(parts[0].size, 1)
        losses.append(np.sum(weight * errors**2) / weight.sum())
        slope = 2 * weight * errors * x / weight.sum()
        for i, parts in enumerate(each):
            if trained[i]:
                slopes = [np.cos(np.multiply.outer(x, part)) for part in parts]
                grads = [np.tensordot(slope, cos, 1) for cos in slopes]
                scale = (i + 1) / max(arrays[i].size, 1)
                grad = scale * (grads[0] + 1j * grads[1] if len(grads) > 1 else grads[0])
                momenta[i] = MOMENTUM * momenta[i] + grad
                new = parts[0] + 1j * parts[1] if len(parts) > 1 else parts[0]
                arrays[i] = (new - RATE * momenta[i]).astype(arrays[i].dtype)
    return losses, arrays


def parts_of(array):
    """The real and the imaginary part, or the array."""
    return (array.real, array.imag) if array.dtype == "complex64" else (array,)


def wide(array):
    return np.asarray(array).astype(float)


def check(case):
    initial, losses, arrays = train(case)
    given = [x for x in jax.tree.leaves(case.model) if isinstance(x, np.ndarray)]
    for array, expected in zip(initial, given, strict=True):
        np.testing.assert_array_equal(array, expected)
    expected_losses, expected_arrays = train_by_hand(case)
    # One array's rounding is in the others' gradients.
    rounding = max([TRAINED.get(str(x.dtype), 0) for x in given] + [TRAINED["float32"]])
    np.testing.assert_allclose(losses, expected_losses, rtol=rounding, atol=rounding)
    for array, expected in zip(arrays, expected_arrays, strict=True):
        assert array.dtype == expected.dtype
        for part, right in zip(parts_of(np.asarray(array)), parts_of(expected)):
            np.testing.assert_allclose(
                wide(part), wide(right), rtol=rounding, atol=rounding
            )


@settings(max_examples=10)
@given(cases())
def test_random_models_train_as_by_hand(case):
    check(case)
