"""Measures the host memory that saving and restoring a checkpoint take at their peaks.

A state that is split over 8 simulated CPU devices is restored in other processes, split in
the same and in another way. It may take the state and the largest of its shards, and 5 %.
On CPUs, the memory of the devices is the host's, so that the state counts, too.
"""

import math
import multiprocessing
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard

#: How a state is restored: the axis that all devices are on, and what it splits.
SPLITS = {
    "as it was saved": ("fsdp", jax.P("fsdp")),
    "along the other dim": ("data", jax.P(None, "data")),
}
#: Sizes of the arrays, as a part of the state, and how many there are.
PARTS = {4: 1, 8: 2, 16: 4, 64: 16}
OPTIM = optax.sgd(1.0)


class Restored(NamedTuple):
    """Bytes: the peak in memory, and the most that is allowed."""

    peak: int
    allowed: int


def make_model(key: jax.Array, size: int) -> list[jax.Array]:
    rows = [
        size // part // 4 // 1024 for part, count in PARTS.items() for _ in range(count)
    ]
    keys = jax.random.split(key, len(rows))
    return [jax.random.normal(key, (n, 1024)) for key, n in zip(keys, rows)]


def place(axis: str, spec: jax.P) -> dict[str, Any]:
    sizes: dict[str, Any] = {"data": 1, axis: 8}
    rule = eqxshard.by_path({r".*\d": spec})
    return {
        "mesh": eqxshard.make_mesh(**sizes),
        "rule": eqxshard.first_match(rule, eqxshard.replicate()),
    }


def save(folder: str, size: int) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    state = eqxshard.init_state(
        lambda key: make_model(key, size),
        OPTIM,
        key=jax.random.key(0),
        **place("fsdp", jax.P("fsdp")),
    )
    checkpointer = eqxshard.Checkpointer(folder)
    checkpointer.save(state)
    checkpointer.wait()


def restore(folder: str, size: int, split: str) -> Restored:
    jax.config.update("jax_num_cpu_devices", 8)
    like = eqxshard.abstract_state(
        lambda key: make_model(key, size),
        OPTIM,
        key=jax.random.key(0),
        **place(*SPLITS[split]),
    )
    # Importing makes the process grow, too.
    import tensorstore  # noqa: F401

    checkpointer = eqxshard.Checkpointer(folder)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    state = jax.block_until_ready(checkpointer.restore(like))
    peak = memory("VmHWM") - before
    arrays = jax.tree.leaves(eqx.filter(state.model, eqx.is_array))
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    # The restored state equals the saved one.
    expected = jax.jit(lambda key: make_model(key, size)[-1])(jax.random.key(0))
    np.testing.assert_array_equal(arrays[-1], expected)
    sizes = [shard.nbytes for shard in shards]
    return Restored(peak, int(1.05 * (sum(sizes) + max(sizes))))


def train_and_save(folder: str, size: int) -> dict[str, float]:
    """The most memory beside a state, in states: of a save while training, of a restore."""
    jax.config.update("jax_num_cpu_devices", 2)
    # Its chunks are not contiguous in memory, so TensorStore copies each.
    shape = (3 * 2**10, 1024)
    spec = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place_over_two())
    make = jax.jit(lambda: jnp.ones(shape), out_shardings=spec.sharding)
    model = [make() for _ in range(size // (4 * math.prod(shape)))]
    like = eqxshard.TrainState(
        step=jnp.int32(0), model=[spec] * len(model), opt_state=(), key=jax.random.key(0)
    )
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    model = jax.block_until_ready([*map(add, model)])
    size = sum(x.nbytes for x in model)
    state = eqx.tree_at(lambda state: state.model, like, model)
    # Importing makes the process grow, too.
    import tensorstore  # noqa: F401

    checkpointer = eqxshard.Checkpointer(folder)
    peaks = {}
    before, _ = memory("VmRSS"), Path("/proc/self/clear_refs").write_text("5")
    checkpointer.save(state)
    # The next step, which is given the memory of the state that is being saved.
    model = jax.block_until_ready([*map(add, model)])
    del state
    checkpointer.wait()
    peaks["save"] = (memory("VmHWM") - before) / size
    Path("/proc/self/clear_refs").write_text("5")
    restored = jax.block_until_ready(checkpointer.restore(like).model)
    peaks["restore"] = (memory("VmHWM") - before) / size
    np.testing.assert_array_equal(restored[-1], model[-1] - 1)
    return peaks


def place_over_two() -> jax.NamedSharding:
    return jax.NamedSharding(eqxshard.make_mesh(fsdp=2, data=1), jax.P("fsdp"))


def memory(name: str) -> int:
    """The memory of this process in bytes: at present, or at its peak."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def measure(size: int) -> dict[str, Restored]:
    """The memory of restoring a state of this size, by how the state is split."""
    with tempfile.TemporaryDirectory(prefix="restore-memory-") as folder:
        in_child(save, folder, size)
        return {split: in_child(restore, folder, size, split) for split in SPLITS}


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Run in a new process, in which no freed memory can be used again."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()
