"""Training steps of a GPT, beside PyTorch.

The model, the optimizer and the loss are those of `recipes/gpt.py`. The peer is the same
model in plain PyTorch, in the manner of nanoGPT (`_peers/gpt_torch.py`): eager on a CPU;
on a GPU with `torch.compile`, `scaled_dot_product_attention` and fused AdamW. Both start
from the same weights, see the same batches, and clip and decay alike, so that their losses
must agree. Sizes that are not shaped like GPT-2 run without a peer.

`--size small` is nanoGPT's configuration for CPUs: 4 layers of 4 heads, 128 wide, blocks of
64, batches of 12. Each contestant runs in a process of its own and waits for its turn. The
first turn compiles and is not counted. On CPUs, several devices are simulated.

    python benchmarks/gpt.py --output build/benchmarks
    python benchmarks/gpt.py --size 124m --precision bfloat16 --batch-size 16
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import _processes
import equinox as eqx
import jax
import numpy as np
from _peers._gpt_task import Task
from _side_by_side import Contest, Report, parser, take_turns

import eqxshard

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
gpt_model: Any = importlib.import_module("gpt_model")

_GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu"}
SIZES = {
    **gpt_model.SIZES,
    "tiny": replace(gpt_model.SIZES["tiny"], vocab_size=65),
    "small": gpt_model.Shape(4, 4, 128, 512, 64, kv_heads=4, vocab_size=65, **_GPT2),
}


def contestants(task: Task, devices: int, peer: bool) -> dict[str, tuple[str, Task]]:
    """The module and the task of each contestant, the baseline first."""
    found = {}
    if peer:
        name = "PyTorch, torch.compile" if task.gpu else "PyTorch"
        found[name] = ("gpt_torch", task)
    found["eqxshard, 1 device"] = ("gpt_eqxshard", task)
    if devices > 1:
        for axis in ("data", "fsdp"):
            several = replace(task, devices=devices, axis=axis)
            found[f"eqxshard, {axis}={devices}"] = ("gpt_eqxshard", several)
    return found


def has_peer(shape: Any) -> bool:
    """True if `gpt_torch` can be a model of this shape, and PyTorch is installed."""
    if any(getattr(shape, name) != value for name, value in _GPT2.items()):
        return False
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed; it is left out.")
        return False
    return True


def write_data(folder: Path, shape: Any, batch_size: int, total: int) -> str:
    """Write tokens for all contestants, and return the path."""
    rng = np.random.default_rng(0)
    # Words of natural frequencies: no order to learn, yet a loss that falls.
    tokens = rng.zipf(1.3, size=1_000_000) % shape.vocab_size
    starts = rng.integers(0, len(tokens) - shape.seq_len, (total, batch_size))
    path = folder / "data.npz"
    np.savez(path, tokens=tokens.astype(np.int32), starts=starts)
    return str(path)


def write_weights(folder: Path, shape: Any) -> str:
    """Write the first weights for all contestants, and return the path."""
    path = folder / "weights.safetensors"
    eqxshard.save_weights(path, gpt_model.GPT(jax.random.key(0), shape))
    return str(path)


def count_parameters(shape: Any) -> int:
    model = eqx.filter_eval_shape(gpt_model.GPT, jax.random.key(0), shape)
    return sum(getattr(x, "size", 0) for x in jax.tree.leaves(model))


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--size", choices=[*SIZES], default="small")
    options.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    options.add_argument("--seq-len", type=int, help="tokens of a sequence")
    options.add_argument("--batch-size", type=int, default=12)
    options.add_argument("--steps", type=int, default=50, help="steps of each turn")
    options.add_argument("--remat", default="dots", help="the recipe's, for eqxshard only")
    options.add_argument(
        "--devices", type=int, help="default: 1 GPU, or one per CPU core, at most 4"
    )
    options.add_argument("--device", choices=["auto", "cpu"], default="auto")
    args = options.parse_args()
    gpu = _processes.share_platform(args.device)
    cores = len(os.sched_getaffinity(0))
    # As many as the batch of 12 divides over.
    devices = args.devices or (1 if gpu else max(n for n in (1, 2, 4) if n <= cores))
    shape = SIZES[args.size]
    shape = replace(shape, seq_len=args.seq_len or shape.seq_len)
    total = args.steps * (args.rounds + 1)
    peer, results = has_peer(shape), {}

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        task = Task(
            shape=json.dumps(dataclasses.asdict(shape)),
            data=write_data(Path(folder), shape, args.batch_size, total),
            weights=write_weights(Path(folder), shape) if peer else "",
            steps=args.steps,
            total=total,
            batch_size=args.batch_size,
            precision=args.precision,
            remat=args.remat,
            gpu=gpu,
        )
        turns = {}
        for name, (module, each) in contestants(task, devices, peer).items():
            process = stack.enter_context(_processes.Contestant(module, each))
            results[name] = []
            turns[name] = _processes.turn(name, process, "train", results[name])
        values = _processes.without_failed(take_turns(turns, args.rounds))

    counted = {name: results[name][1:] for name in values}
    tokens = args.steps * args.batch_size * shape.seq_len
    speeds = {name: [tokens / s for s in each] for name, each in values.items()}
    contests = [Contest(args.size, "tokens/s", speeds)]
    if not gpu:
        times = {
            name: [1000 * each["cpu_seconds"] / args.steps for each in found]
            for name, found in counted.items()
        }
        contests.append(Contest(f"{args.size}, time of all threads", "ms/step", times))
    operations = gpt_model.flops_per_token(shape)
    mfu = {
        name: eqxshard.nn.mfu(
            statistics.median(each),
            operations,
            devices=jax.devices()[:1] if gpu else None,
            dtype=args.precision,
        )
        for name, each in speeds.items()
    }
    Report(
        "gpt" if args.size == "small" else f"gpt_{args.size}",
        contests,
        {
            "shape": dataclasses.asdict(shape),
            "parameters": count_parameters(shape),
            "precision": args.precision,
            "batch_size": args.batch_size,
            "steps": args.steps,
            "rounds": args.rounds,
            "losses": {n: [each["loss"] for each in results[n]] for n in values},
            "mfu": mfu,
        },
    ).show_and_write(args.output)


if __name__ == "__main__":
    main()
