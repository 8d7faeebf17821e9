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


def collectives(run):
    """How often a step sends what: `all-reduce tensor f32[4,16,32]` -> times.

    The shapes are those of the results on each device: their dims in order of size, for
    the compiler transposes, and without those of size 1.
    """
    bodies, entry, lines = {}, "", []
    for line in run.compiled.as_text().splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            lines = bodies.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    found = collections.Counter()

    def count(body, times):
        for line in bodies[body]:
            if op := re.search(
                r" = (\S.*?) (all-[a-z-]+|reduce-scatter|collective-[a-z-]+)\(", line
            ):
                axes = ",".join(_axes(line, run.mesh))
                for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", op[1]):
                    sizes = map(int, filter(None, shape.split(",")))
                    found[f"{op[2]} {axes} {_array(dtype, sizes)}"] += times
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for callee in re.findall(r"%([\w.-]+)", line.partition(" = ")[2]):
                if callee in bodies:
                    count(callee, times * int(trips[1]) if trips else times)

    count(entry, 1)
    return found


def _array(dtype, shape):
    return f"{dtype}[{','.join(str(n) for n in sorted(shape) if n != 1)}]"


def _axes(line, mesh):
    """The axes that a collective goes along, from the groups of devices in its line."""
    coordinates = np.stack(np.unravel_index(_groups(line), mesh.devices.shape))
    spread = (coordinates != coordinates[..., :1]).any(axis=(1, 2))
    return [axis for axis, along in zip(mesh.axis_names, spread) if along]


def _groups(line):
    """In any of three notations, with the groups as rows."""

    def numbers(text):
        return [int(number) for number in re.findall(r"\d+", text or "")]

    def iota(shape, permutation):
        ids = np.arange(math.prod(shape)).reshape(shape)
        return ids.transpose(permutation) if permutation else ids

    order = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if explicit := re.search(r"(?:groups|pairs)=\{\{([\d,{}]*)\}\}", line):
        return np.array([numbers(group) for group in explicit[1].split("},{")])
    if found := re.search(rf"groups=\[([\d,]+)\]<={order}", line):
        return iota(numbers(found[2]), numbers(found[3])).reshape(numbers(found[1]))
    found = re.search(
        rf"groups=mesh\[(.*?)\](?:, device_ids=\({order}\))? \{{(.*?)\}}", line
    )
    assert found, line
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
    ids = iota(numbers(found[2]) or [*sizes.values()], numbers(found[3]))
    along = [[*sizes].index(name) for name in re.findall(r"'(\w+)'", found[4])]
    last = range(-len(along), 0)
    ids = np.moveaxis(ids.reshape([*sizes.values()]), along, last)
    return ids.reshape(-1, math.prod(ids.shape[i] for i in last))


def theory(run, remat=True, tied=True):
    """What a step has to send, counted as `collectives` counts.

    Over `tensor`, after Megatron-LM (Shoeybi et al. 2019,
    https://arxiv.org/abs/1909.08053): activations, twice in each layer forward and twice
    back, once more where the first half of a layer is computed again, after the lookup,
    and back from the logits. For the cross-entropy three numbers per token, the maximum,
    the sum and the label's own, and never the logits.

    Over `fsdp` weights, and over all axes of the batch gradients (ZeRO, Rajbhandari et
    al. 2020, https://arxiv.org/abs/1910.02054).
    """
    sent = collections.Counter()
    sizes = run.mesh.shape

    def send(op, axes, shape, times=1, dtype="f32"):
        axes = ",".join(axis for axis in sizes if axis in axes and sizes[axis] > 1)
        if axes:
            sent[f"{op} {axes} {_array(dtype, shape)}"] += times

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
        times = passes = 1
        if ".blocks" in path:
            shape, spec, times, passes = shape[1:], spec[1:], LAYERS, 2 if remat else 1
        elif path == ".embedding" and tied:
            # Added up for the lookup and for the logits, and then added.
            times = 2
        used, stored = part(shape, spec, "tensor"), part(shape, spec, "tensor", "fsdp")
        if stored == used:
            send("all-reduce", {"data", "fsdp"}, used, times)
            continue
        send("all-gather", {"fsdp"}, used, times * passes if "blocks" in path else 1)
        if ("fsdp",) in spec:
            # A reduce-scatter where there is one: on CPUs an all-reduce and a slice.
            send("all-reduce", {"fsdp"}, used, times)
            send("all-reduce", {"data"}, stored, times)
        else:
            send("all-reduce", {"data", "fsdp"}, used, times)
    send("all-reduce", {"data", "fsdp"}, ())  # the loss
    split = {axis for spec in run.specs.values() for axis in jax.tree.leaves(tuple(spec))}
    send("all-reduce", split, (), dtype="s32")  # whether all gradients are finite
    return sent


@on_meshes
def test_the_compiler_sends_what_theory_asks_for(mesh_name, options):
    run = train(mesh_name, **options)
    assert collectives(run) == theory(run, **options)


@pytest.mark.slow
def test_a_wrong_split_costs_more_and_changes_nothing_else():
    swapped = {r"mlp\.up$": P(None, None, "tensor"), r"mlp\.down$": P(None, "tensor")}
    run = train("tensor=4", eqxshard.first_match(eqxshard.by_path(swapped), RULE))
    assert_trained_alike(run, train("one device"))
    more = collectives(run) - theory(run)
    assert any(sent.startswith("all-gather tensor") for sent in more)


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
