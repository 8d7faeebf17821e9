"""Seconds per epoch of Fashion-MNIST, end to end, side by side.

An epoch trains on 60,000 images, shuffled, in batches of 256, and then evaluates on the
10,000 test images. The models are LeNet and the CNN of `recipes/fashion_mnist.py`, trained
in float32 with AdamW at a constant learning rate; images are normalised on the device. The
baseline is hand-written JAX with NumPy batches on one device. The others are eqxshard as
the recipe uses it, and with its data on the devices; Equinox and Flax NNX as in their own
documentation; and PyTorch with its DataLoader, in one process and in several. The last
batch of an epoch has only 96 images: eqxshard pads it with rows of weight 0, the others
run a smaller batch.

Each contestant runs in a process of its own, which builds everything and then waits for
its turn, so that contestants do not share threads or devices. The first epoch compiles and
is not counted. On CPUs, several devices are simulated. If JAX finds GPUs, one is used, and
the PyTorch model is compiled.

    python benchmarks/epoch.py --output build/benchmarks
"""

import importlib.util
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import _processes
import numpy as np
from _peers._task import SIZES, Task
from _side_by_side import Contest, Report, parser, take_turns

import eqxshard

#: With multiples of this, the last batches of training and of evaluation (on a sixth of
#: the number of examples) divide over up to 16 devices.
MULTIPLE = 96


def contestants(task: Task, devices: int) -> dict[str, tuple[str, Task]]:
    """The module and the task of each contestant, the baseline first."""
    several = replace(task, devices=devices)
    contestants = {
        "JAX by hand, NumPy batches": ("with_jax", task),
        "eqxshard, 1 device": ("with_eqxshard", task),
        "eqxshard, data on 1 device": ("with_eqxshard", replace(task, variant="device")),
        "Equinox's own page, 1 device": ("with_equinox", task),
        "Flax NNX + Grain": ("with_flax", task),
        "PyTorch": ("with_torch", task),
    }
    if task.gpu:
        contestants["PyTorch, data on device"] = (
            "with_torch",
            replace(task, variant="resident"),
        )
    if devices > 1:
        contestants |= {
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
            print(f"{package} is not installed; it is left out.")
            contestants = {
                name: value for name, value in contestants.items() if value[0] != module
            }
    return contestants


def write_data(path: Path, examples: int) -> str:
    """Write the images for all contestants, and return the name of the dataset."""
    train, test = eqxshard.data.load_fashion_mnist()
    arrays: dict[str, Any] = {}
    for split, source, count in (
        ("train", train, examples),
        ("test", test, examples // 6),
    ):
        for name, array in source.gather(np.arange(count)).items():
            arrays[f"{split}_{name}"] = array
    np.savez(path, **arrays)
    return train.name


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--models", nargs="+", choices=SIZES, default=[*SIZES])
    options.add_argument(
        "--devices", type=int, help="1, 2, 4, 8 or 16; default: 1 GPU, or one per CPU core"
    )
    options.add_argument(
        "--examples", type=int, default=60_000, help=f"a multiple of {MULTIPLE}"
    )
    options.add_argument("--device", choices=["auto", "cpu"], default="auto")
    args = options.parse_args()
    if args.examples < Task.batch_size or args.examples % MULTIPLE:
        options.error(
            f"--examples {args.examples} must be a multiple of {MULTIPLE}, and at least "
            f"{Task.batch_size}."
        )
    gpu = _processes.share_platform(args.device)
    cores = len(os.sched_getaffinity(0))
    devices = args.devices or (1 if gpu else min(2 ** (cores.bit_length() - 1), 16))

    contests, accuracy, loss = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        kind = write_data(data, args.examples)
        for model in args.models:
            results: dict[str, list[dict[str, float]]] = {}
            turns = {}
            with ExitStack() as stack:
                task = Task(model=model, data=str(data), gpu=gpu)
                processes = {
                    name: stack.enter_context(
                        _processes.Contestant(
                            module,
                            each,
                            processes=each.devices if each.variant == "ddp" else 1,
                        )
                    )
                    for name, (module, each) in contestants(task, devices).items()
                }
                for name, process in processes.items():
                    results[name] = []
                    turns[name] = _processes.turn(
                        f"{model}, {name}", process, "epoch", results[name]
                    )
                values = _processes.without_failed(take_turns(turns, args.rounds))
            contests.append(Contest(model, "s/epoch", values))
            accuracy[model] = {name: results[name][-1]["accuracy"] for name in values}
            loss[model] = {name: results[name][0]["loss"] for name in values}
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
