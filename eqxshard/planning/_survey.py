"""What is known of a step before it is compiled: its least memory, and its fingerprint.

It runs in one process for all candidates of a search, because making a model needs JAX.
"""

import dataclasses
import hashlib
import importlib.metadata
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..sharding._leaves import array_leaves
from ..sharding._mesh import batch_sharding, check_batch_size
from ..training._state import TrainState
from ..training._train_step import make_train_step
from ._compile import answer, count_examples, make_state
from ._leaves import mesh_of, on_host, shard_bytes, stored_gradients
from ._request import Request


class Surveyed(NamedTuple):
    """What is known of a step before it is compiled.

    - `least`: the bytes that its arrays alone need of each device.
    - `fingerprint`: the same for what compiles to the same plan, in any process.
    - `problem`: why it cannot be compiled; empty if it can.
    """

    least: int = 0
    fingerprint: str = ""
    problem: str = ""


def main() -> None:
    """Survey the requests in the folder that the command names."""
    answer(lambda requests, _: [survey(request) for request in requests])


def survey(request: Request) -> Surveyed:
    """Make the state of a step and trace it, as shapes."""
    try:
        state = make_state(request)
        rows, _ = count_examples(request.batch)
        check_batch_size(rows, mesh_of(state), accumulate=request.options["accumulate"])
        return Surveyed(least_bytes(request, state), fingerprint(request, state))
    except Exception as error:
        said = str(error).strip().split("\n")[0]
        ours = isinstance(error, ValueError | TypeError)
        return Surveyed(problem=said if ours else f"{type(error).__name__}: {said}")


def least_bytes(request: Request, state: TrainState) -> int:
    """The bytes of a device that the state, the batch and the gradients need."""
    rows = batch_sharding(mesh_of(state))
    elsewhere = on_host(state)
    arrays = [leaf for _, leaf in array_leaves(state) if id(leaf) not in elsewhere]
    total = sum(map(shard_bytes, arrays))
    total += sum(shard_bytes(x, rows) for x in jax.tree.leaves(request.batch))
    if request.options["nonfinite"] == "ignore":
        return total  # Each gradient may be gone before the next is made.
    # All gradients at once, in the dtype of computation if that is the smaller one.
    compute = None if request.precision is None else request.precision.compute
    widest = math.inf if compute is None else jnp.dtype(compute).itemsize
    gradients = stored_gradients(state)
    return total + int(sum(min(x.bytes, widest * math.prod(x.shape)) for x in gradients))


def fingerprint(request: Request, state: TrainState) -> str:
    """A digest of the program and of all else that a plan depends on."""
    step = make_train_step(request.loss_fn, request.optim, **request.options)
    # With the lines of the user's code, which a plan names.
    program = step.lower(state, request.batch).as_text(debug_info=True)
    # An address in this process, by which cuDNN's attention finds its partitioning.
    program = re.sub(r'backend_config = "\d+"', "", program)
    library = sorted(Path(__file__).parents[1].rglob("*.py"))
    # Of several, Python imports the first. The compiler for GPUs has JAX's version.
    libtpu = [x.version for x in importlib.metadata.distributions(name="libtpu")][:1]
    flags = os.environ.get("XLA_FLAGS", "").split()
    parts = [
        program,
        repr(array_leaves(state)),
        repr((request.rule, request.precision, request.mesh_shape, request.backend)),
        repr(dataclasses.asdict(request.target)),
        repr((jax.__version__, importlib.metadata.version("jaxlib"), libtpu)),
        repr([flag for flag in flags if not flag.startswith("--xla_dump")]),
        repr(os.environ.get("LIBTPU_INIT_ARGS")),
        *[file.read_text() for file in library],
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
