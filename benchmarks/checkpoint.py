"""Seconds that a training loop waits for checkpoints, and how fast they are on disk.

A state of so many gigabytes, split over 2 simulated devices: how long `Checkpointer.save`
holds up who calls it, beside a save that is waited for and a plain one of Orbax; how fast
it is on disk, with all its checksums, and back, beside `numpy.save` and `numpy.load` of
the same bytes on the same disk. What Orbax writes is on the disk itself when it says so
(`fsync`), so NumPy is measured with and without; what is read was just written. Contestants
take turns, round by round, so that whatever else the machine does meets them alike.

    python benchmarks/checkpoint.py --gigabytes 1 --json checkpoint.json
"""

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import eqxshard

DEVICES, ARRAYS = 2, 16
OPTIM = optax.sgd(1.0)

#: Seconds by what was measured.
Times = dict[str, float]


def make_model(key: jax.Array, size: int) -> list[jax.Array]:
    rows = size // ARRAYS // 4 // 1024
    return [jax.random.normal(key, (rows, 1024)) for key in jax.random.split(key, ARRAYS)]


def arrays_of(state: eqxshard.TrainState) -> list[jax.Array]:
    return jax.tree.leaves(eqx.filter(state.model, eqx.is_array))


def by_eqxshard(state: Any, like: Any, folder: Path, wait: bool = False) -> Times:
    checkpointer = eqxshard.Checkpointer(folder)
    start = time.perf_counter()
    checkpointer.save(state)
    if wait:
        checkpointer.wait()
    held_up = time.perf_counter()
    checkpointer.wait()
    saved = time.perf_counter()
    jax.block_until_ready(arrays_of(checkpointer.restore(like)))
    restored = time.perf_counter()
    return {
        "held up": held_up - start,
        "save": saved - start,
        "restore": restored - saved,
    }


def by_orbax(state: Any, like: Any, folder: Path) -> Times:
    from orbax.checkpoint import v1 as ocp

    def named(state: Any) -> dict[str, Any]:
        leaves = jax.tree.leaves(state.model)
        return {str(number): leaf for number, leaf in enumerate(leaves)}

    start = time.perf_counter()
    ocp.save(os.fspath(folder / "state"), named(state))
    saved = time.perf_counter()
    jax.block_until_ready(ocp.load(os.fspath(folder / "state"), named(like)))
    restored = time.perf_counter()
    return {
        "held up": saved - start,
        "save": saved - start,
        "restore": restored - saved,
    }


def by_numpy(state: Any, like: Any, folder: Path, sync: bool = True) -> Times:
    arrays = [np.asarray(x) for x in arrays_of(state)]  # gathered, which is not measured
    start = time.perf_counter()
    for number, array in enumerate(arrays):
        with (folder / f"{number}.npy").open("wb") as file:
            np.save(file, array)
            if sync:
                os.fsync(file.fileno())
    saved = time.perf_counter()
    for number in range(len(arrays)):
        np.load(folder / f"{number}.npy")
    restored = time.perf_counter()
    return {
        "held up": saved - start,
        "save": saved - start,
        "restore": restored - saved,
    }


#: NumPy, the measure, first.
CONTESTANTS: dict[str, Callable[[Any, Any, Path], Times]] = {
    "NumPy": by_numpy,
    "NumPy, without fsync": lambda *given: by_numpy(*given, sync=False),
    "eqxshard.Checkpointer": by_eqxshard,
    "eqxshard.Checkpointer, waited for": lambda *given: by_eqxshard(*given, wait=True),
    "Orbax, blocking": by_orbax,
}


def in_turns(state: Any, like: Any, rounds: int, root: Path) -> dict[str, list[Times]]:
    times: dict[str, list[Times]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds + 1):
        for name, run in CONTESTANTS.items():
            folder = Path(tempfile.mkdtemp(dir=root))
            measured = run(state, like, folder)
            shutil.rmtree(folder)
            os.sync()  # or a turn would write what another left
            if number:  # the first is to warm up
                times[name].append(measured)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seconds that saving and restoring a checkpoint take, side by side."
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the disk to measure")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    logging.getLogger("absl").setLevel(logging.ERROR)
    size = int(args.gigabytes * 2**30)
    mesh = eqxshard.make_mesh(data=1, fsdp=DEVICES)
    made: dict[str, Any] = {
        "key": jax.random.key(0),
        "mesh": mesh,
        "rule": eqxshard.fsdp(min_size=2),
    }
    state = eqxshard.init_state(lambda key: make_model(key, size), OPTIM, **made)
    like = eqxshard.abstract_state(lambda key: make_model(key, size), OPTIM, **made)
    size = sum(x.nbytes for x in arrays_of(state))
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        times = in_turns(state, like, args.rounds, Path(root))

    console, results = Console(width=100), []
    measure = times[next(iter(times))]
    for what in ("held up", "save", "restore"):
        table = Table(what, "seconds", "min to max", "MB/s", "of NumPy's MB/s")
        for name, turns in times.items():
            seconds = [turn[what] for turn in turns]
            middle = statistics.median(seconds)
            bare = [turn[what] for turn in measure]
            ratio = statistics.median(b / mine for mine, b in zip(seconds, bare))
            results.append({"what": what, "name": name, "seconds": seconds, "ratio": ratio})
            rates = what != "held up"
            table.add_row(
                name,
                f"{middle:.3f}",
                f"{min(seconds):.3f} to {max(seconds):.3f}",
                f"{size / middle / 1e6:,.0f}" if rates else "",
                f"{ratio:.2f}" if rates else "",
            )
        console.print(table)
    packages = ("eqxshard", "jax", "equinox", "numpy", "orbax-checkpoint")
    setting = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "devices": DEVICES,
        "cpus": os.cpu_count(),
        "bytes": size,
        "rounds": args.rounds,
    }
    console.print(json.dumps(setting))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(setting | {"results": results}, file, indent=2)


if __name__ == "__main__":
    main()
