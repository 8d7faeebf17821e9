"""Measures the memory that steps on simulated CPU devices take, and compares plans.

Each case is trained in a process of its own. All devices are in that process, so its memory
is theirs together.
"""

import ctypes
import gc
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from restore_memory import in_child, memory

import eqxshard
from eqxshard.planning import Plan
from eqxshard.sharding import batch_sharding

sys.path.append(str(Path(__file__).parents[1] / "recipes"))

import fashion_mnist
import gpt
from gpt_model import GPT, Shape

SHAPE = Shape(
    layers=4, heads=8, kv_heads=4, embed=384, mlp=1024, seq_len=128, vocab_size=8192
)
OPTIM = optax.adamw(1e-3)
#: Freed memory goes back to the system at once, so that it does not count.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Wide(eqx.Module):
    layers: eqx.nn.MLP

    def __init__(self, key):
        self.layers = eqx.nn.MLP(784, 10, 2048, 3, key=key)

    def __call__(self, x):
        return self.layers(jnp.ravel(x))


def images(rows):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (rows, 28, 28), np.uint8)
    return {"image": image, "label": rng.integers(0, 10, rows).astype(np.int32)}


def texts(rows):
    tokens = np.random.default_rng(0).integers(
        0, SHAPE.vocab_size, (rows, SHAPE.seq_len + 1), np.int32
    )
    return {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


class Case(NamedTuple):
    """A model, and how it is trained.

    - `below`, `above`: how far the plan may be off on either side, as parts.
    """

    make_model: Any
    loss_fn: Any
    batch: Mapping[str, np.ndarray]
    mesh: Mapping[str, int]
    rule: Any
    accumulate: int = 1
    below: float = 0.1
    above: float = 0.1


FSDP = eqxshard.fsdp(min_size=2**10)
ZERO1 = eqxshard.zero1(min_size=2**10)
TENSOR = eqxshard.first_match(
    eqxshard.by_path(
        {
            r"layers\.(0|2)\.weight": jax.P("tensor"),
            r"layers\.1\.weight": jax.P(None, "tensor"),
        }
    ),
    eqxshard.replicate(),
)
RULE = gpt.make_rule(SHAPE)

MLP = (Wide, fashion_mnist.loss_fn, images(512))
LENET = (partial(fashion_mnist.ConvNet, hidden=1024), fashion_mnist.loss_fn)
DOTS = (partial(GPT, shape=SHAPE, remat="dots"), gpt.loss_fn, texts(16))

CASES = {
    # The library that XLA uses for products copies its operands into a layout of its own.
    # XLA does not count these copies, which here are many.
    "MLP, tensor": Case(*MLP, {"tensor": 4}, TENSOR, below=0.13),
    "MLP, zero1, accumulate": Case(*MLP, {"data": 8}, ZERO1, accumulate=2),
    # XLA does not count the copies of convolutions, so a plan is too low by this much.
    "LeNet, fsdp": Case(*LENET, images(256), {"fsdp": 4}, FSDP, below=0.65),
    "GPT, context, ring attention": Case(*DOTS, {"data": 2, "context": 2}, RULE),
}


class Measured(NamedTuple):
    """Bytes on all devices: those of a plan, and the growth of the process.

    - `state`: the bytes of the state and the batch.
    - `planned`, `grown`: the bytes at the peak.
    """

    state: int
    planned: int
    grown: int

    @property
    def error(self) -> float:
        return self.planned / self.grown - 1

    def is_near(self, case: Case) -> bool:
        """True if the plan is close enough."""
        return -case.below <= self.error <= case.above


def measure(name: str) -> Measured:
    """Train a case for a few steps in a process of its own, and plan it."""
    return in_child(_measure, name)


def _measure(name: str) -> Measured:
    case = CASES[name]
    count = math.prod(case.mesh.values())
    jax.config.update("jax_num_cpu_devices", count)
    plan = _plan(case)
    planned = count * plan.memory.peak
    state = planned - count * plan.memory.temporaries
    train = _prepare(case)
    train()  # It compiles.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train()
    return Measured(state, planned, memory("VmHWM") - before)


def _plan(case: Case) -> Plan:
    given = (case.make_model, case.loss_fn, OPTIM, case.batch)
    options: Any = {"rule": case.rule, "accumulate": case.accumulate}
    return eqxshard.plan(*given, mesh_shape=case.mesh, target="cpu", **options)


def _prepare(case: Case) -> Callable[[], None]:
    """Returns a function that places a batch and a state, and takes some steps."""
    sizes: dict[str, Any] = {"data": 1, **case.mesh}
    mesh = eqxshard.make_mesh(**sizes)
    first = eqxshard.init_state(
        case.make_model, OPTIM, key=jax.random.key(0), mesh=mesh, rule=case.rule
    )
    step = eqxshard.make_train_step(
        case.loss_fn, OPTIM, accumulate=case.accumulate, lint="off"
    )
    arrays, rest = eqx.partition(first, eqx.is_array)
    # To make a state again would be to compile again.
    copy = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))

    def train() -> None:
        batch = eqxshard.filter_shard(dict(case.batch), batch_sharding(mesh))
        state = eqx.combine(copy(arrays), rest)
        for _ in range(6):
            state, _ = step(state, batch)
        jax.block_until_ready(state)

    return train
