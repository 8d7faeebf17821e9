"""One turn of `checkpoint.py`: many small arrays, saved or restored in a new process.

Prints its figures as JSON.

    python benchmarks/_checkpoint.py save eqxshard FOLDER
    python benchmarks/_checkpoint.py restore eqxshard FOLDER
"""

import importlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import eqxshard

DEVICES, ARRAYS, SIDE = 8, 2000, 64

Save = Callable[[dict[str, Any]], Any]
Restore = Callable[[dict[str, Any]], dict[str, Any]]


def with_eqxshard(folder: str) -> tuple[Save, Restore]:
    checkpointer = eqxshard.Checkpointer(folder)

    def state_of(arrays: dict[str, Any]) -> eqxshard.TrainState:
        step, key = jnp.int32(0), jax.random.key(0)
        return eqxshard.TrainState(step=step, model=arrays, opt_state=(), key=key)

    def save(arrays: dict[str, Any]) -> None:
        checkpointer.save(state_of(arrays))
        checkpointer.wait()

    return save, lambda like: checkpointer.restore(state_of(like)).model


def with_orbax(folder: str) -> tuple[Save, Restore]:
    logging.getLogger("absl").setLevel(logging.ERROR)
    ocp = importlib.import_module("orbax.checkpoint").v1
    path = f"{folder}/state"
    return lambda arrays: ocp.save(path, arrays), lambda like: ocp.load(path, like)


def megabytes(name: str) -> float:
    """A figure of this process's memory in MiB, from Linux."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    what, contestant, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows = jax.sharding.NamedSharding(
        jax.make_mesh((DEVICES,), ("x",)), jax.sharding.PartitionSpec("x")
    )
    save, restore = {"eqxshard": with_eqxshard, "orbax": with_orbax}[contestant](folder)
    like: dict[str, Any] = {
        f"layers.{i}.weight": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32, sharding=rows)
        for i in range(ARRAYS)
    }
    make = jax.jit(lambda i: jnp.full((SIDE, SIDE), i, jnp.float32), out_shardings=rows)
    arrays = {path: make(i) for i, path in enumerate(like)}
    jax.block_until_ready(arrays)
    if what == "save":
        start = time.perf_counter()
        save(arrays)
        found = {"seconds": time.perf_counter() - start}
    else:
        # Importing makes the process grow, too.
        importlib.import_module("tensorstore")
        before = megabytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        found_arrays = restore(like)
        jax.block_until_ready(found_arrays)
        found = {"seconds": time.perf_counter() - start}
        found["memory"] = megabytes("VmHWM") - before
        assert all((found_arrays[path] == arrays[path]).all() for path in like)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
