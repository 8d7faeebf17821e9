"""The validation loss of nanoGPT's configurations for Shakespeare, by several seeds.

Trains `recipes/gpt.py` on characters with each seed, and prints the best and the last
losses on all of the validation text, with mean and spread. nanoGPT itself reports 1.88 on
a CPU (2,000 steps of a small model) and 1.4697 on a GPU (5,000 steps, the best one).

    python benchmarks/_shakespeare.py --config gpu --output build/benchmarks/shakespeare
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _side_by_side import machine
from rich.console import Console
from rich.table import Table

from eqxshard.data.text import ByteTokenizer, shakespeare

RECIPE = Path(__file__).parents[1] / "recipes" / "gpt.py"
CONFIGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "layers": 4,
        "heads": 4,
        "embed": 128,
        "mlp": 512,
        "seq-len": 64,
        "batch-size": 12,
        "steps": 2000,
    },
    "gpu": {
        "layers": 6,
        "heads": 6,
        "embed": 384,
        "mlp": 1536,
        "seq-len": 256,
        "batch-size": 64,
        "steps": 5000,
        "dropout": 0.2,
        "precision": "bfloat16",
    },
}
#: Options of both: GPT-2 without biases, and more windows than the validation text has.
SHARED = {
    "positions": "learned",
    "norm": "layer",
    "activation": "gelu",
    "evaluate-every": 250,
    "eval-windows": 10_000,
    "length": 0,
}


def prepare(folder: str) -> None:
    """Write the characters as nanoGPT does: numbered in their order, from 0."""
    corpus = shakespeare()
    texts = {}
    for name, tokens in (("train", corpus.train), ("val", corpus.valid)):
        texts[name] = ByteTokenizer().decode(tokens.take(np.arange(len(tokens))))
    numbers = {char: n for n, char in enumerate(sorted({*"".join(texts.values())}))}
    for name, text in texts.items():
        ids = np.array([numbers[char] for char in text], np.uint16)
        ids.tofile(Path(folder) / f"{name}.bin")


def train(
    config: str, data: str, seed: int, path: Path, options: list[str]
) -> dict[str, float]:
    """Write the metrics of one run, and return its best and its last validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        flags = SHARED | CONFIGS[config] | {"data": data, "seed": seed, "output": folder}
        arguments = [f"--{name}={value}" for name, value in flags.items()]
        subprocess.run([sys.executable, str(RECIPE), *arguments, *options], check=True)
        shutil.copy(Path(folder) / "metrics.jsonl", path)
    lines = path.read_text().splitlines()
    losses = [json.loads(line).get("eval/loss") for line in lines]
    losses = [loss for loss in losses if loss is not None]
    return {"best": min(losses), "last": losses[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", choices=[*CONFIGS], default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("options", nargs="*", help="more options of the recipe, after --")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data:
        prepare(data)
        runs = {}
        for seed in args.seeds:
            path = args.output / f"seed-{seed}.jsonl"
            runs[seed] = train(args.config, data, seed, path, args.options)
    table = Table("validation loss", *map(str, args.seeds), "mean", "spread")
    results: dict[str, Any] = {**machine(), "config": args.config, "seeds": args.seeds}
    for name in ("best", "last"):
        values = [run[name] for run in runs.values()]
        mean, spread = statistics.mean(values), max(values) - min(values)
        results[name] = {"values": values, "mean": mean, "spread": spread}
        table.add_row(name, *(f"{each:.4f}" for each in (*values, mean, spread)))
    Console(width=110).print(table)
    path = args.output / "shakespeare.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
