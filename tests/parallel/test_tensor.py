"""Tensor parallelism: a plain model, a rule that names dims, and what the compiler sends.

The compiler partitions the step by itself; these tests hold it to what the papers ask for.
"""

import collections
import functools as ft
import itertools
import math
import re
from typing import Any, NamedTuple

import helpers
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from transformer import Transformer, make_tokens, next_token_losses

import eqxshard

STEPS, ROWS, SEQ, EMBED, LAYERS, MIN_SIZE = 20, 8, 16, 32, 2, 1024

MESHES = {
    "one device": {},
    "fsdp=8": {"fsdp": 8},
    "tensor=2": {"tensor": 2},
    "tensor=4": {"tensor": 4},
    "tensor=8": {"tensor": 8},
    "data=2,tensor=4": {"data": 2, "tensor": 4},
    "fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2},
    "data=2,fsdp=2,tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
}
QUICK = ("data=2,tensor=4", "data=2,fsdp=2,tensor=2")

# The vocabulary over both axes. Were the features of a table split over `fsdp`, then the
# gradient of a lookup would be added up over `tensor` for the whole vocabulary.
RULE = eqxshard.combine(
    eqxshard.by_dim({"heads": "tensor", "mlp": "tensor", "vocab": ("tensor", "fsdp")}),
    eqxshard.fsdp(min_size=MIN_SIZE),
)


class Run(NamedTuple):
    """A model after some steps on a mesh, and the step as it was compiled."""

    mesh: jax.sharding.Mesh
    specs: dict[str, P]
    losses: np.ndarray
    model: dict[str, np.ndarray]
    compiled: Any


@ft.cache
def train(mesh_name, rule=RULE, **options):
    sizes = {"data": 1, **MESHES[mesh_name]}
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = eqxshard.make_mesh(**sizes, devices=devices)
    # With this epsilon the size of a gradient counts, too.
    optim = helpers.lenient(optax.adam(1e-2, eps=1e-2))
    state = eqxshard.init_state(
        lambda key: Transformer(key, **options),
        optim,
        key=jax.random.key(0),
        mesh=mesh,
        rule=rule,
    )
    places = eqxshard.shardings(state.model, mesh, rule)
    specs = {
        jax.tree_util.keystr(path): place.spec
        for path, place in jax.tree_util.tree_leaves_with_path(places)
    }
    train_step = eqxshard.make_train_step(next_token_losses, optim, mesh=mesh, rule=rule)
    compiled = train_step.lower(state, make_tokens(ROWS)).compile()
    losses = []
    for seed in range(STEPS):
        state, metrics = train_step(state, make_tokens(ROWS, seed=seed))
        losses.append(metrics["loss"])
    return Run(mesh, specs, np.array(losses), helpers.arrays(state.model), compiled)


def assert_trained_alike(run, alone):
    assert alone.losses[-1] < alone.losses[0] - 0.1
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-5)
    for path, expected in alone.model.items():
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(run.model[path], expected, 0, atol, err_msg=path)


on_meshes = pytest.mark.parametrize(
    "mesh_name, options",
    [
        pytest.param(name, {}, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in MESHES
        if name != "one device"
    ]
    + [
        pytest.param(name, options, id=f"{name},{option}", marks=pytest.mark.slow)
        for name in QUICK
        for option, options in {
            "untied": {"tied": False},
            "kept": {"remat": False},
        }.items()
    ],
)


@on_meshes
def test_training_is_that_of_one_device(mesh_name, options):
    assert_trained_alike(train(mesh_name, **options), train("one device", **options))


# Communication


def array(dtype, shape):
    """An array in words. In order of size: the compiler transposes, and drops ones."""
    return f"{dtype}[{','.join(str(n) for n in sorted(shape) if n != 1)}]"


def sent(run):
    """What a step sends: `all-reduce f32[4,16,32]` -> how often."""
    found = collections.Counter()
    for op in eqxshard.testing.collectives(run.compiled).ops:
        assert op.times is not None
        for shape in op.shapes:
            dtype, *sizes = re.findall(r"\w+", shape)
            found[f"{op.kind} {array(dtype, map(int, sizes))}"] += op.times
    return found


def theory(run, remat=True, tied=True):
    """What a step has to send.

    Over `tensor`, after Megatron-LM (Shoeybi et al. 2019,
    https://arxiv.org/abs/1909.08053): activations, twice in each layer forward and twice
    back, once more where the first half of a layer is computed again, after the lookup,
    and back from the logits. For the cross-entropy three numbers per token, the maximum,
    the sum and the label's own, and never the logits.

    Over `fsdp` weights, and over all axes of the batch gradients (ZeRO, Rajbhandari et
    al. 2020, https://arxiv.org/abs/1910.02054).
    """
    found = collections.Counter()
    sizes = run.mesh.shape

    def send(op, axes, shape, times=1, dtype="f32"):
        if math.prod(sizes[axis] for axis in axes) > 1:
            found[f"{op} {array(dtype, shape)}"] += times

    def part(shape, spec, *axes):
        sized = [math.prod(sizes[a] for a in entry if a in axes) for entry in spec]
        return tuple(
            n // size for n, size in itertools.zip_longest(shape, sized, fillvalue=1)
        )

    rows = ROWS // (sizes["data"] * sizes["fsdp"])
    send("all-reduce", {"tensor"}, (rows, SEQ, EMBED), LAYERS * (5 if remat else 4) + 2)
    send("all-reduce", {"tensor"}, (rows, SEQ), 3)
    for path, leaf in run.model.items():
        shape = leaf.shape
        spec = [(e,) if isinstance(e, str) else e or () for e in run.specs[path]]
        gathers = sums = 1
        if ".blocks" in path:
            shape, spec = shape[1:], spec[1:]
            gathers, sums = LAYERS * (2 if remat else 1), LAYERS
        elif path == ".embedding" and tied:
            sums = 2  # over devices for the lookup and for the logits, and then of the two
        used, stored = part(shape, spec, "tensor"), part(shape, spec, "tensor", "fsdp")
        if stored == used:
            send("all-reduce", {"data", "fsdp"}, used, sums)
            continue
        send("all-gather", {"fsdp"}, used, gathers)
        if ("fsdp",) in spec:
            # A reduce-scatter where there is one: on CPUs an all-reduce and a slice.
            send("all-reduce", {"fsdp"}, used, sums)
            send("all-reduce", {"data"}, stored, sums)
        else:
            send("all-reduce", {"data", "fsdp"}, used, sums)
    send("all-reduce", {"data", "fsdp"}, ())  # the loss
    split = {axis for spec in run.specs.values() for axis in jax.tree.leaves(tuple(spec))}
    send("all-reduce", split, (), dtype="s32")  # whether all gradients are finite
    return found


@on_meshes
def test_the_compiler_sends_what_theory_asks_for(mesh_name, options):
    run = train(mesh_name, **options)
    assert sent(run) == theory(run, **options)


@pytest.mark.slow
def test_a_wrong_split_costs_more_and_changes_nothing_else():
    swapped = {r"mlp\.up$": P(None, None, "tensor"), r"mlp\.down$": P(None, "tensor")}
    run = train("tensor=4", eqxshard.first_match(eqxshard.by_path(swapped), RULE))
    assert_trained_alike(run, train("one device"))
    more = sent(run) - theory(run)
    assert any(what.startswith("all-gather") for what in more)


# Memory


@on_meshes
def test_each_device_holds_its_part_of_parameters_and_optimizer(mesh_name, options):
    run = train(mesh_name, **options)
    data, fsdp, tensor = (run.mesh.shape[axis] for axis in ("data", "fsdp", "tensor"))
    leaves = run.model.values()
    large = sum(x.nbytes for x in leaves if x.size >= MIN_SIZE)
    small = sum(x.nbytes for x in leaves if x.size < MIN_SIZE)
    # With Adam's moments, two counts of steps and the key.
    state = 3 * (large // (fsdp * tensor) + small) + 4 + 4 + 8
    tokens = make_tokens(ROWS)["tokens"].nbytes // (data * fsdp)
    memory = run.compiled.memory_analysis()
    assert memory.argument_size_in_bytes <= state + tokens
    assert memory.alias_size_in_bytes == memory.argument_size_in_bytes - tokens
