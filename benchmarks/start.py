"""Seconds from the start of a process to the end of imports, and to the first step.

The step trains LeNet on 256 random images. The time includes imports, parameters,
optimizer, loader, compilation and waiting for the result. The baseline is hand-written JAX
without a compilation cache. eqxshard is measured without JAX's persistent compilation
cache, with an empty one (a first start, which fills it) and with a filled one (a second
start). Each turn starts a new process; the files that it imports are in the page cache.

    python benchmarks/start.py --output build/benchmarks
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _processes
import jax
import numpy as np
from _peers._task import Task
from _side_by_side import Contest, Report, Turn, parser, take_turns

NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def has(package: str) -> bool:
    installed = importlib.util.find_spec(package) is not None
    if not installed:
        print(f"{package} is not installed; it is left out.")
    return installed


def seconds_to_import(statement: str) -> Turn:
    def turn() -> float:
        start = time.perf_counter()
        command = [sys.executable, "-c", f"{statement}; print(flush=True)"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            return time.perf_counter() - start

    return turn


def seconds_to_step(module: str, task: Task, env: Mapping[str, str]) -> Turn:
    def turn() -> float:
        start = time.perf_counter()
        with _processes.Contestant(module, task, env=env) as process:
            process.ready()
            process.ask("train")
            return time.perf_counter() - start

    return _processes.or_nan(turn)


def seconds_with_empty_cache(task: Task) -> Turn:
    def turn() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return seconds_to_step("with_eqxshard", task, cache(folder))()

    return turn


def cache(folder: str) -> dict[str, str]:
    """Environment variables that make JAX cache every compilation in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def main() -> None:
    args = parser(__doc__, rounds=5).parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpu = jax.devices()[0].platform == "gpu"
    # Names are imported when first used, so a fair comparison uses some.
    names = "Loader, fit, fsdp, init_state, make_mesh, make_train_step"
    statements = ["import jax, equinox, optax", "import eqxshard"]
    statements += [f"from eqxshard import {names}", "import jax"]
    flax, torch = has("flax"), has("torch")
    statements += ["from flax import nnx"] * flax + ["import torch"] * torch
    imports = {statement: seconds_to_import(statement) for statement in statements}

    with tempfile.TemporaryDirectory() as folder:
        data, jax_cache, our_cache = (
            str(Path(folder, name)) for name in ("data.npz", "jax", "eqxshard")
        )
        rng = np.random.default_rng(0)
        arrays: dict[str, Any] = {
            f"{split}_{name}": array
            for split in ("train", "test")
            for name, array in (
                ("image", rng.integers(0, 256, (256, 28, 28), np.uint8)),
                ("label", rng.integers(0, 10, 256, np.int32)),
            )
        }
        np.savez(data, **arrays)
        task = Task(model="lenet", data=data, gpu=gpu)
        steps = {
            "JAX by hand, no cache": seconds_to_step("with_jax", task, NO_CACHE),
            "JAX by hand, second start": seconds_to_step(
                "with_jax", task, cache(jax_cache)
            ),
            "eqxshard, no cache": seconds_to_step("with_eqxshard", task, NO_CACHE),
            "eqxshard, first start": seconds_with_empty_cache(task),
            "eqxshard, second start": seconds_to_step(
                "with_eqxshard", task, cache(our_cache)
            ),
            "Equinox's own page, no cache": seconds_to_step("with_equinox", task, NO_CACHE),
        }
        if flax:
            steps["Flax NNX + Grain, no cache"] = seconds_to_step(
                "with_flax", task, NO_CACHE
            )
        if torch:
            steps["PyTorch"] = seconds_to_step("with_torch", task, {})
        seconds = _processes.without_failed(take_turns(steps, args.rounds))
        contests = [
            Contest("import", "s", take_turns(imports, args.rounds)),
            Contest("start to first step of LeNet", "s", seconds),
        ]
    Report("start", contests, {"rounds": args.rounds}).show_and_write(args.output)


if __name__ == "__main__":
    main()
