"""The ticks of each schedule, its memory, and what must divide.

Its communication is checked in `test_pipeline.py`, for the same compiled gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import (
    KEY,
    ROWS,
    SCHEDULES,
    UNOPTIMISED,
    Apply,
    make_batch,
    make_mesh,
    make_model,
    on,
    trace,
)

from eqxshard import testing
from eqxshard.parallel import pipeline, pipeline_loss

# Ticks


@pytest.mark.parametrize(
    "stages, microbatches, chunks, ticks",
    # The table of docs/pages/guide/strategies.md.
    [(4, 8, 1, 11), (4, 8, 2, 19), (4, 8, 4, 35), (8, 8, 1, 15), (8, 8, 4, 39)],
)
def test_ticks(stages, microbatches, chunks, ticks):
    """Every tick sends once; a stage is idle in all but `microbatches * chunks`."""
    mesh = make_mesh(stage=stages)
    scales = jax.ShapeDtypeStruct(
        (stages, chunks), jnp.float32, sharding=NamedSharding(mesh, P("stage"))
    )

    def run(scales, x):
        layers = Apply(scales, lambda scale, h: scale * h)
        return pipeline(layers, x, microbatches=microbatches, chunks=chunks)

    x = jax.ShapeDtypeStruct((microbatches, 4), jnp.float32)
    found = testing.collectives(jax.jit(on(mesh, run)), scales, x)
    assert found.times["collective-permute"] == ticks
    assert ticks - microbatches * chunks == stages - 1


# Memory


def temporary_bytes(schedule, rows, microbatches, chunks=1, width=64, layers=16):
    """The temporary memory of gradients on 4 stages."""

    def struct(spec, *shape):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    mesh = make_mesh(stage=4)
    param = struct(P("stage"), layers // chunks, chunks, width, width)
    stack: Any = Apply(param, lambda weight, h: jax.nn.gelu(weight @ h))  # pyright: ignore
    x = struct(P(("data", "fsdp")), rows, width)

    def gpipe(stack, x):
        h = pipeline(stack, x, microbatches=microbatches, chunks=chunks)
        return jnp.mean(h)

    def one_f_one_b(stack, x):
        return pipeline_loss(
            lambda head, h, target: jnp.mean(h),
            stack,
            None,
            x,
            None,
            microbatches=microbatches,
            chunks=chunks,
        )

    loss = {"gpipe": gpipe, "1f1b": one_f_one_b}[schedule]
    grad = jax.jit(jax.grad(on(mesh, loss), (0, 1)))
    memory = grad.lower(stack, x).compile(UNOPTIMISED).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize(
    "schedule, chunks, least, most",
    # GPipe keeps the input of each of a stage's 4 layers, the input and output of each
    # tick, and their gradient; 1F1B at most the gradient of the input.
    [
        ("gpipe", 1, 5, 8),
        ("1f1b", 1, 0, 1),
        pytest.param("gpipe", 2, 5, 12, marks=pytest.mark.slow),
        pytest.param("1f1b", 2, 0, 1, marks=pytest.mark.slow),
    ],
)
def test_memory_per_microbatch(schedule, chunks, least, most):
    """Its growth with each additional microbatch, in units of their activations."""
    few, many = (temporary_bytes(schedule, 16 * n, n, chunks) for n in (4, 16))
    growth = (many - few) / 12 / (16 * 64 * 4)
    assert least <= growth <= most


# Mistakes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_that_do_not_divide(schedule):
    def run(rows=ROWS, microbatches=4, chunks=None, **sizes):
        batch = jax.tree.map(jnp.asarray, make_batch(rows))
        args = make_model(chunks), batch, KEY, microbatches, chunks
        trace(lambda: SCHEDULES[schedule](*args), **sizes)

    with pytest.raises(ValueError, match=r"8 layers do not divide over stage=3; use a mu"):
        run(stage=3)
    message = (
        r"8 layers do not divide over stage=8 x chunks=2; use a multiple of 16 layers, or "
        r"a number of stages that divides 4\."
    )
    with pytest.raises(ValueError, match=message):
        run(chunks=2, stage=8)
    message = (
        r"microbatches=6 do not divide over stage=4, as they must with chunks=2; use a "
        r"multiple of 4 microbatches"
    )
    with pytest.raises(ValueError, match=message):
        run(rows=24, microbatches=6, chunks=2, stage=4)
    message = (
        r"a batch of 24 does not divide over data=2 x fsdp=2 = 4 devices, each with "
        r"microbatches=4; use a multiple of 16 examples, or fewer microbatches"
    )
    with pytest.raises(ValueError, match=message):
        run(rows=24, stage=2, data=2, fsdp=2)
    with pytest.raises(ValueError, match="microbatches=0 must be at least 1"):
        run(microbatches=0, stage=1)
    # With one stage, there are no microbatches.
    run(rows=7, microbatches=4, stage=1)
