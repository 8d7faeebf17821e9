"""Seconds per epoch of Fashion-MNIST, end to end, side by side.

An epoch is 60,000 images in batches of 256, in a random order, and an evaluation on the
10,000 test images after it; the models are LeNet and the CNN of `recipes/fashion_mnist.py`,
with AdamW at a constant rate, in float32, from bytes that are normalised on the device.
Hand-written JAX with batches of NumPy, on one device, is the measure. The others are
eqxshard as the recipe uses it, and with its data on the devices; Equinox and Flax NNX as
their own pages write it; and PyTorch with its DataLoader, in one process and in several.
The last batch of an epoch has 96 images: eqxshard fills it up with rows of weight 0, for
all others it is smaller.

Each contestant is a process, which builds everything and then waits for its turn, so that
none meets the threads or the devices of another. Its first epoch, which compiles, is not
counted. CPU devices are simulated; where JAX finds a GPU, one of them is used, and PyTorch
is compiled.

    python benchmarks/epoch.py --output build/benchmarks
"""

import importlib.util
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import _processes
import jax
import numpy as np
from _peers._task import SIZES, Task
from _side_by_side import Contest, Report, Turn, parser, take_turns

import eqxshard

#: What is left over of so many divides over up to 16 devices, as do a sixth of them.
MULTIPLE = 96


def contestants(task: Task, devices: int) -> dict[str, tuple[str, Task]]:
    """The module of each, and its task; the measure first."""
    several = replace(task, devices=devices)
    made = {
        "JAX by hand, NumPy batches": ("with_jax", task),
        "eqxshard, 1 device": ("with_eqxshard", task),
        "eqxshard, data on 1 device": ("with_eqxshard", replace(task, variant="device")),
        "Equinox's own page, 1 device": ("with_equinox", task),
        "Flax NNX + Grain": ("with_flax", task),
        "PyTorch": ("with_torch", task),
    }
    if task.gpu:
        made["PyTorch, data on device"] = ("with_torch", replace(task, variant="resident"))
    if devices > 1:
        made |= {
            f"eqxshard, {devices} devices": ("with_eqxshard", several),
            f"eqxshard, data on {devices} devices": (
                "with_eqxshard",
                replace(several, variant="device"),
            ),
            f"Equinox's own page, {devices} devices": ("with_equinox", several),
            f"PyTorch DDP, {devices} processes": (
                "with_torch",
                replace(several, variant="ddp"),
            ),
        }
    for module, package in (("with_flax", "flax"), ("with_torch", "torch")):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed, and left out.")
            made = {name: value for name, value in made.items() if value[0] != module}
    return made


def write_data(path: Path, examples: int) -> str:
    """Write the images for all contestants, and return which they are."""
    kind, load = "fashion_mnist", eqxshard.data.fashion_mnist
    try:
        load("test")
    except FileNotFoundError:
        kind, load = "synthetic", eqxshard.data.synthetic_fashion
    arrays: dict[str, Any] = {}
    for split, count in (("train", examples), ("test", examples // 6)):
        for name, array in load(split).gather(np.arange(count)).items():
            arrays[f"{split}_{name}"] = array
    np.savez(path, **arrays)
    return kind


def epochs(name: str, process: Any, found: list[dict[str, float]]) -> Turn:
    def turn() -> float:
        if not found:
            process.ready()
        answer = process.ask("epoch")
        found.append(answer)
        print(
            f"{name}, epoch {len(found)}: {answer['seconds']:.2f} s, test accuracy "
            f"{answer['accuracy']:.4f}, loss {answer['loss']:.4f}",
            file=sys.stderr,
        )
        return answer["seconds"]

    return turn


def main() -> None:
    made = parser(__doc__, rounds=3)
    made.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    made.add_argument("--devices", type=int, help="1, 2, 4, 8 or 16; CPU: one per core")
    made.add_argument(
        "--examples", type=int, default=60_000, help=f"a multiple of {MULTIPLE}"
    )
    made.add_argument("--device", choices=["auto", "cpu"], default="auto")
    args = made.parse_args()
    if args.examples < Task.batch_size or args.examples % MULTIPLE:
        made.error(f"--examples {args.examples} is no multiple of {MULTIPLE} above a batch")
    if args.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    # Several processes share the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpu = jax.devices()[0].platform == "gpu"
    cores = len(os.sched_getaffinity(0))
    devices = args.devices or (1 if gpu else min(2 ** (cores.bit_length() - 1), 16))

    contests, accuracy, loss = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        kind = write_data(data, args.examples)
        for model in args.models:
            found: dict[str, list[dict[str, float]]] = {}
            turns = {}
            with ExitStack() as stack:
                task = Task(model=model, data=str(data), gpu=gpu)
                processes = {
                    name: stack.enter_context(
                        _processes.Contestant(
                            module, of, processes=of.devices if of.variant == "ddp" else 1
                        )
                    )
                    for name, (module, of) in contestants(task, devices).items()
                }
                for name, process in processes.items():
                    found[name] = []
                    turn = epochs(f"{model}, {name}", process, found[name])
                    turns[name] = _processes.or_nan(turn)
                values = _processes.without_failed(take_turns(turns, args.rounds))
            contests.append(Contest(model, "s/epoch", values))
            accuracy[model] = {name: found[name][-1]["accuracy"] for name in values}
            loss[model] = {name: found[name][0]["loss"] for name in values}
    Report(
        "epoch",
        contests,
        {
            "data": kind,
            "examples": args.examples,
            "batch_size": Task.batch_size,
            "rounds": args.rounds,
            "last_test_accuracy": accuracy,
            "test_loss_after_1_epoch": loss,
        },
    ).show_and_write(args.output)


if __name__ == "__main__":
    main()
