"""Kills runs of the language model recipe as `kill_runs.py` kills its own.

`python tests/kill_gpt.py --runs 10` prints what came of it.
"""

import os
import sys
from pathlib import Path

import kill_runs
import numpy as np

import eqxshard

sys.path.append(os.fspath(Path(__file__).parents[1] / "recipes"))

import gpt


def train(folder: Path) -> None:
    """One run, from its newest checkpoint, if it has one."""
    text = folder.parent / "words.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    config = eqxshard.RunConfig(
        batch_size=8,
        steps=40,
        devices=2,
        output=os.fspath(folder),
        resume="auto",
        save_every=3,
        evaluate_every=10,
        log_every=1,
    )
    changes = gpt.Changes(layers=2, embed=32, mlp=64, seq_len=16, dropout=0.1)
    args = gpt.Args(
        run=config,
        shape=changes,
        data=os.fspath(text),
        accumulate=2,
        eval_windows=16,
        length=8,
        export=os.fspath(folder / "export"),
    )
    gpt.main(args)
    weights = (folder / "export" / "model.safetensors").read_bytes()
    np.savez(folder / "part.npz", np.frombuffer(weights, np.uint8))
    os.replace(folder / "part.npz", folder / "end.npz")


if __name__ == "__main__":
    kill_runs.train = train
    sys.exit(kill_runs.main())
