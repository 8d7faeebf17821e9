"""Folders of runs as training leaves them, without training."""

import json
import math
import random

from eqxshard.run import RunFolder

PARTS = {"device": 6.0, "dispatch": 0.5, "data": 1.0, "compile": 0.0, "evaluation": 0.8}
PARTS |= {"checkpoint": 0.4, "callbacks": 0.0, "log": 0.2, "other": 0.1}


def make_lines(count=40, *, every=50, epoch=200, rate=1.0, seed=0):
    """The lines of a log: a loss that falls, and an evaluation at the end of each epoch."""
    rng, lines = random.Random(seed), []
    for n in range(1, count + 1):
        step, noise = n * every, rng.gauss(0, 0.03)
        loss = 2.2 * math.exp(-rate * step / (0.3 * count * every)) + 0.25 + noise
        line = {"step": step, "epoch": step / epoch, "train/loss": loss}
        line |= {"train/grad_norm": 3.0 + 2 * noise, "train/seconds": 6.5}
        line |= {"train/examples_per_second": 64 * every / 6.5}
        if step % epoch == 0:
            right = 0.95 - 0.6 * math.exp(-step / 700 * rate)
            line |= {"eval/loss": 1.1 * loss, "eval/accuracy": right}
        line |= {f"seconds/{part}": seconds for part, seconds in PARTS.items()}
        line["seconds/compile"] = 9.0 if n == 1 else 0.0
        lines.append(line | {"goodput": 0.7, "data": "lines"})
    return lines


def make_record(**changes):
    """The contents of `run.json`."""
    record = {
        "title": "small on 8 x NVIDIA H200 (data=2, fsdp=4)",
        "steps": 2000,
        "batch_size": 64,
        "unit": "images",
        "mesh": {"data": 2, "fsdp": 4},
        "devices": {"kind": "NVIDIA H200", "count": 8, "per_process": 4},
        "host": "node-3",
        "system": "Linux-6.1",
        "command": "train.py --mesh data=2,fsdp=4",
        "data": "lines",
        "parameters": 1_250_000,
        "settings": {
            "batch_size": 64,
            "learning_rate": 0.001,
            "output": "/home/somebody/run",
            "steps": None,
        },
        "versions": {"python": "3.11.7", "jax": "0.10.2", "eqxshard": "0.1.0"},
        "starts": [{"time": "2026-03-01T10:00:00+00:00", "step": 0}],
        "ended": {"time": "2026-03-01T10:06:00+00:00", "why": ""},
        "memory": {"peak": 61_000_000_000, "limit": 141_000_000_000},
    }
    return record | changes


def make_plan(**changes):
    """The part of a plan's JSON that is compared with a run."""
    plan = {
        "target": {"kind": "NVIDIA H200"},
        "mesh": {"data": 2, "fsdp": 4},
        "devices": 8,
        "examples": 64,
        "time": {"step": 0.1, "bound": "compute"},
        "examples_per_second": 640.0,
        "mfu": 0.8,
        "memory": {"peak": 58_000_000_000},
    }
    return plan | changes


def make_run(path, *, lines=None, record=None, warnings=(), plan=None):
    """Write a run's folder; without a record, there is no `run.json`."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    text = "".join(json.dumps(line) + "\n" for line in (lines or make_lines()))
    folder.metrics.write_text(text)
    if record is not None:
        folder.record.write_text(json.dumps(record))
    if warnings:
        said = ({"time": "", "source": "eqxshard", "text": text} for text in warnings)
        folder.warnings.write_text("".join(json.dumps(line) + "\n" for line in said))
    if plan is not None:
        (path / "plan.json").write_text(json.dumps(plan))
    return folder
