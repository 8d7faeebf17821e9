"""Plans for tests, made by hand."""

import jax
import jax.numpy as jnp
import optax
from helpers import lenient

import eqxshard
from eqxshard.inspect._lint import Findings
from eqxshard.planning import Plan, PlannedMemory, PlannedTime, Target

OPTIM = lenient(optax.adam(1e-3))
BATCH = {"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)}
SIZES = {"data": 2, "fsdp": 4}
RULE = eqxshard.fsdp(min_size=1)


def made_by_hand(memory, collectives=(), **fields):
    """A plan for eight H200s, of which only these fields are given."""
    names = ["parameters", "optimizer state", "other state", "batch"]
    arguments = dict(zip(names, memory, strict=False))
    given = dict(
        target=Target.named("h200"),
        backend="gpu",
        mesh={"fsdp": 8},
        devices=8,
        memory=PlannedMemory(arguments, *memory[4:]),
        flops={},
        model_flops={},
        collectives=tuple(collectives),
        time=None,
        examples=16,
        compile_seconds=1.0,
        notes=(),
        leaves=(),
        timeline=None,
        settings={},
        findings=Findings(),
    )
    return Plan(**{**given, **fields})


def by_hand(mesh, peak=20 * 10**9, step=0.1):
    """A plan of a mesh, of this memory and time."""
    return made_by_hand(
        (20, 40, 0, 0, 20, peak - 60, peak, int(100e9)),
        mesh=mesh,
        time=PlannedTime(step, step, 0.0, {}, {}),
    )
