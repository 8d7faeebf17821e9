"""Seconds that a checkpoint blocks the training loop, and the speed of save and restore.

The state has `--gigabytes` of parameters, split over 2 simulated devices. Three things are
measured: how long `Checkpointer.save` blocks its caller, compared with a save that waits
and with a plain save by Orbax, if that is installed; how fast the state is written to disk,
with all checksums; and how fast it is restored. The baseline is `numpy.save` and
`numpy.load` of the same bytes on the same disk. Orbax flushes its files to the disk
(`fsync`), so NumPy takes part with and without that. Files are read right after they are
written, usually from the page cache.

Small arrays are measured beside Orbax: the first save of a process that has 2,000 of them,
of 64 x 64 on 8 devices; and the first restore of another, with the memory that it takes
beyond what the process had, of which the arrays themselves are 31 MiB.

    python benchmarks/checkpoint.py --gigabytes 1 --output build/benchmarks
"""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from _side_by_side import Contest, Report, parser, take_turns

import eqxshard

DEVICES, ARRAYS = 2, 16
OPTIM = optax.sgd(1.0)

#: Seconds by phase.
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
    blocked = time.perf_counter()
    checkpointer.wait()
    saved = time.perf_counter()
    jax.block_until_ready(arrays_of(checkpointer.restore(like)))
    restored = time.perf_counter()
    return {
        "blocked": blocked - start,
        "save": saved - start,
        "restore": restored - saved,
    }


def by_orbax(state: Any, like: Any, folder: Path) -> Times:
    ocp = importlib.import_module("orbax.checkpoint").v1

    def named(state: Any) -> dict[str, Any]:
        leaves = jax.tree.leaves(state.model)
        return {str(number): leaf for number, leaf in enumerate(leaves)}

    start = time.perf_counter()
    ocp.save(os.fspath(folder / "state"), named(state))
    saved = time.perf_counter()
    jax.block_until_ready(ocp.load(os.fspath(folder / "state"), named(like)))
    restored = time.perf_counter()
    return {
        "blocked": saved - start,
        "save": saved - start,
        "restore": restored - saved,
    }


def by_numpy(state: Any, like: Any, folder: Path, sync: bool = True) -> Times:
    arrays = [np.asarray(x) for x in arrays_of(state)]  # gathering is not measured
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
        "blocked": saved - start,
        "save": saved - start,
        "restore": restored - saved,
    }


#: The baseline first.
CONTESTANTS: dict[str, Callable[[Any, Any, Path], Times]] = {
    "NumPy": by_numpy,
    "NumPy, without fsync": lambda *args: by_numpy(*args, sync=False),
    "eqxshard.Checkpointer": by_eqxshard,
    "eqxshard.Checkpointer, waited for": lambda *args: by_eqxshard(*args, wait=True),
}
if importlib.util.find_spec("orbax"):
    CONTESTANTS["Orbax, blocking"] = by_orbax


def one_turn(
    run: Callable[[Any, Any, Path], Times], state: Any, like: Any, root: Path
) -> Times:
    folder = Path(tempfile.mkdtemp(dir=root))
    times = run(state, like, folder)
    shutil.rmtree(folder)
    os.sync()  # so that no turn pays for another's dirty pages
    return times


def small_arrays(rounds: int, directory: str | None) -> list[Contest]:
    """Many small arrays, saved and restored in processes of their own."""
    script = Path(__file__).parent / "_checkpoint.py"

    def turn(contestant: str) -> Times:
        times = {}
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            for what in ("save", "restore"):
                command = [sys.executable, str(script), what, contestant, folder]
                pipe = subprocess.PIPE
                done = subprocess.run(command, check=True, stdout=pipe, text=True)
                for name, figure in json.loads(done.stdout.splitlines()[-1]).items():
                    times[f"{what}, {name}"] = figure
        return times

    peers = ["orbax"] * bool(importlib.util.find_spec("orbax"))
    turns = {name: partial(turn, name) for name in [*peers, "eqxshard"]}
    found = take_turns(turns, rounds)
    return [
        Contest(
            f"2,000 small arrays: {says}",
            unit,
            {name: [each[figure] for each in times] for name, times in found.items()},
        )
        for says, unit, figure in (
            ("first save", "s", "save, seconds"),
            ("first restore", "s", "restore, seconds"),
            ("memory of a restore", "MiB", "restore, memory"),
        )
    ]


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument(
        "--gigabytes", type=float, default=1.0, help="size of the parameters"
    )
    options.add_argument("--directory", help="a folder on the disk to measure")
    args = options.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    logging.getLogger("absl").setLevel(logging.ERROR)
    size = int(args.gigabytes * 2**30)
    mesh = eqxshard.make_mesh(data=1, fsdp=DEVICES)
    settings: dict[str, Any] = {
        "key": jax.random.key(0),
        "mesh": mesh,
        "rule": eqxshard.fsdp(min_size=2),
    }
    state = eqxshard.init_state(lambda key: make_model(key, size), OPTIM, **settings)
    like = eqxshard.abstract_state(lambda key: make_model(key, size), OPTIM, **settings)
    size = sum(x.nbytes for x in arrays_of(state))
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        turns = {
            name: partial(one_turn, run, state, like, Path(root))
            for name, run in CONTESTANTS.items()
        }
        times = take_turns(turns, args.rounds)

    blocked = {name: [turn["blocked"] for turn in rounds] for name, rounds in times.items()}
    contests = [Contest("held up by a save", "seconds", blocked)]
    for phase in ("save", "restore"):
        rates = {
            name: [size / turn[phase] / 1e6 for turn in rounds]
            for name, rounds in times.items()
        }
        contests.append(Contest(phase, "MB/s", rates))
    contests += small_arrays(args.rounds, args.directory)
    setting = {"bytes": size, "rounds": args.rounds}
    Report("checkpoint", contests, setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
