"""Tensor parallelism: a plain model, a rule that names dims, and the collectives.

The compiler partitions the step by itself; these tests compare it with the papers. That it
trains as one device does is in test_strategies.py.
"""

import collections
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import optax
import pytest
from grades import graded
from helpers import lenient
from jax.sharding import PartitionSpec as P
from transformer import Transformer, make_tokens, next_token_losses

import eqxshard

ROWS, SEQ, EMBED, LAYERS, MIN_SIZE = 8, 16, 32, 2, 1024

MESHES: dict[str, dict[str, Any]] = {
    "fsdp=8": {"fsdp": 8},
    "tensor=4": {"tensor": 4},
    "tensor=8": {"tensor": 8},
    "data=2,tensor=4": {"data": 2, "tensor": 4},
    "fsdp=2,tensor=2": {"fsdp": 2, "tensor": 2},
    "data=2,fsdp=2,tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
}
ALL_AXES = "data=2,fsdp=2,tensor=2"

# The vocabulary is split over both axes. If the features of a table were split over `fsdp`,
# the gradient of a lookup would be summed over `tensor` for the whole vocabulary.
RULE = eqxshard.combine(
    eqxshard.by_dim({"heads": "tensor", "mlp": "tensor", "vocab": ("tensor", "fsdp")}),
    eqxshard.fsdp(min_size=MIN_SIZE),
)


class Step(NamedTuple):
    """A compiled step on a mesh, and how the model is split there."""

    mesh: jax.sharding.Mesh
    specs: dict[str, P]
    shapes: dict[str, tuple[int, ...]]
    compiled: Any


def compile_step(mesh_name, **options):
    sizes = {"data": 1, **MESHES[mesh_name]}
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = eqxshard.make_mesh(**sizes, devices=devices)
    optim = lenient(optax.adam(1e-2))
    state = eqxshard.abstract_state(
        lambda key: Transformer(key, **options),
        optim,
        key=jax.random.key(0),
        mesh=mesh,
        rule=RULE,
    )
    leaves = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.model)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    }
    specs = {path: leaf.sharding.spec for path, leaf in leaves.items()}
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    train_step = eqxshard.make_train_step(next_token_losses, optim, mesh=mesh, rule=RULE)
    compiled = train_step.lower(state, make_tokens(ROWS)).compile()
    return Step(mesh, specs, shapes, compiled)


CASES = [(name, {}) for name in MESHES]
CASES += [(ALL_AXES, {"tied": False}), (ALL_AXES, {"remat": "none"})]
on_meshes = pytest.mark.parametrize(
    "mesh_name, options", graded(CASES, [(ALL_AXES, {})], [("data=2,tensor=4", {})])
)


# Communication


def format_shape(dtype, shape):
    """A dtype and sorted sizes, because the compiler transposes, and drops ones."""
    return f"{dtype}[{','.join(str(n) for n in sorted(shape) if n != 1)}]"


def measured(step):
    """The collectives of a step: `all-reduce f32[4,16,32]` -> how often."""
    found = collections.Counter()
    for op in eqxshard.testing.collectives(step.compiled):
        assert op.times is not None
        for shape in op.shapes:
            dtype, *sizes = re.findall(r"\w+", shape)
            found[f"{op.kind} {format_shape(dtype, map(int, sizes))}"] += op.times
    return found


def theory(step, remat="full", tied=True):
    """The collectives that a step needs.

    Over `tensor`, after Megatron-LM (Shoeybi et al. 2019,
    https://arxiv.org/abs/1909.08053): activations, twice in each layer forward and twice
    backward, once more if the first half of a layer is recomputed, after the lookup, and
    backward from the logits. For the cross-entropy, three numbers per token: the maximum,
    the sum and the label's own; never the logits.

    Weights over `fsdp`, and gradients over all axes of the batch (ZeRO, Rajbhandari et al.
    2020, https://arxiv.org/abs/1910.02054).
    """
    found = collections.Counter()
    sizes = step.mesh.shape

    def send(op, axes, shape, times=1, dtype="f32"):
        if math.prod(sizes[axis] for axis in axes) > 1:
            found[f"{op} {format_shape(dtype, shape)}"] += times

    def part(shape, spec, *axes):
        sized = [math.prod(sizes[a] for a in entry if a in axes) for entry in spec]
        return tuple(
            n // size for n, size in itertools.zip_longest(shape, sized, fillvalue=1)
        )

    rows = ROWS // (sizes["data"] * sizes["fsdp"])
    send(
        "all-reduce",
        {"tensor"},
        (rows, SEQ, EMBED),
        LAYERS * (5 if remat == "full" else 4) + 2,
    )
    send("all-reduce", {"tensor"}, (rows, SEQ), 3)
    for path, shape in step.shapes.items():
        spec = [(e,) if isinstance(e, str) else e or () for e in step.specs[path]]
        gathers = sums = 1
        if ".blocks" in path:
            shape, spec = shape[1:], spec[1:]
            # Also gathered again without remat, which keeps no gathered weight.
            gathers, sums = LAYERS * 2, LAYERS
        elif path == ".embedding" and tied:
            sums = 2  # over devices, whole for the lookup, and for the logits
        used, stored = part(shape, spec, "tensor"), part(shape, spec, "tensor", "fsdp")
        if stored == used:
            send("all-reduce", {"data", "fsdp"}, used, sums)
            continue
        send("all-gather", {"fsdp"}, used, gathers)
        if ("fsdp",) in spec:
            # A reduce-scatter, which on CPUs is an all-reduce and a slice.
            send("all-reduce", {"fsdp"}, used, sums)
            send("all-reduce", {"data"}, stored, sums)
        else:
            send("all-reduce", {"data", "fsdp"}, used, sums)
    send("all-reduce", {"data", "fsdp"}, ())  # the loss
    split = {axis for spec in step.specs.values() for axis in jax.tree.leaves(tuple(spec))}
    send("all-reduce", split, (), dtype="s32")  # whether all gradients are finite
    return found


@on_meshes
def test_collectives_are_those_of_theory(mesh_name, options):
    step = compile_step(mesh_name, **options)
    assert measured(step) == theory(step, **options)
