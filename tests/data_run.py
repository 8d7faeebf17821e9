"""A run that a test kills, on each kind of data; it records the examples that it reads.

`python tests/data_run.py FOLDER --way mix` trains from the newest checkpoint, if there is
one; `--kill 10` has the last process kill itself after ten steps. With `--forked`, a run of
one process is made three times in one: whole, and killed, and resumed.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import grain
import jax
import numpy as np
import optax
import tensorstore  # noqa: F401  (here, so that children start at once)

import eqxshard

#: In batches of 8, seven make an epoch of arrays, and the last one is padded.
EXAMPLES, BATCH, STEPS, SAVE_EVERY = 50, 8, 16, 4
#: Documents, of which every process packs its own, and the length of a row.
DOCUMENTS, LENGTH = 600, 8


def arrays() -> dict[str, np.ndarray]:
    """Examples that know their number."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 8)).astype(np.float32)
    return {"x": x, "index": np.arange(EXAMPLES, dtype=np.int32)}


def _records(first: int, count: int) -> grain.MapDataset:
    rows = np.random.default_rng(first).normal(size=(count, 8)).astype(np.float32)
    examples = [{"x": row, "index": np.int32(first + i)} for i, row in enumerate(rows)]
    return grain.MapDataset.source(examples).seed(first).shuffle()


def _augmented(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    noise = rng.normal(size=8).astype(np.float32)
    return {**example, "x": example["x"] + noise}


def mixed() -> grain.MapDataset:
    """Two sources, three of the first for one of the second, and random augmentation.

    Their lengths are as their weights; the second's examples are numbered from 1000 on.
    """
    mix = grain.MapDataset.mix([_records(0, 39), _records(1000, 13)], weights=[0.75, 0.25])
    return mix.seed(3).random_map(_augmented)


def packed(process: int, processes: int, rows: int) -> grain.IterDataset:
    """A process's share of the documents: some are left out, and others share a row.

    Document i consists of one to five tokens that are i + 1; those of two are left out.
    """
    documents = [np.full(1 + i % 5, i + 1, np.int32) for i in range(DOCUMENTS)]
    share = grain.MapDataset.source(documents).seed(4).shuffle()[process::processes]
    several = share.map(lambda tokens: {"tokens": tokens}).repeat().to_iter_dataset()
    several = several.filter(lambda example: len(example["tokens"]) != 2)
    rows_of = grain.experimental.FirstFitPackIterDataset(
        several, length_struct={"tokens": LENGTH}, num_packing_bins=4
    )
    return rows_of.batch(rows)


class Uneven:
    """A given number of batches; the last one may be an error."""

    def __init__(self, count: int, rows: int, error: Exception | None = None):
        self.count, self.rows, self.error = count, rows, error

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for step in range(self.count):
            x = np.full((self.rows, 8), step, np.float32)
            yield {"x": x, "index": np.full(self.rows, step, np.int32)}
        if self.error is not None:
            raise self.error


def make_loader(way: str, batch_size: int = BATCH, **options: Any) -> eqxshard.Loader:
    """The loader of this process, on all devices of the run."""
    options = {"mesh": eqxshard.make_mesh(fsdp=2), **options}
    process, processes = jax.process_index(), jax.process_count()
    share = batch_size // processes
    last = process == processes - 1
    if way == "arrays":
        return eqxshard.Loader(arrays(), batch_size=batch_size, **options)
    if way == "mix":
        return eqxshard.Loader(mixed(), batch_size=batch_size, **options)
    if way == "packed":
        return eqxshard.Loader(packed(process, processes, share), **options)
    if way == "shorter dataset":
        # In the last process.
        examples = [{"x": np.ones(8, np.float32), "index": np.int32(0)}] * 5 * share
        several = grain.MapDataset.source(examples).repeat(1 if last else 4)
        return eqxshard.Loader(several.to_iter_dataset().batch(share), **options)
    if way == "shorter iterable":
        # In the first process.
        return eqxshard.Loader(Uneven(30 if last else 10, share), **options)
    assert way == "failing iterable"
    error = RuntimeError("a bad file") if last else None
    return eqxshard.Loader(Uneven(5 if last else 30, share, error), **options)


def make_model(key: jax.Array) -> eqx.Module:
    """A small MLP."""
    return eqx.nn.MLP(8, 4, 16, 1, key=key)


def loss_fn(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    """Losses of images, or of packed tokens."""
    x = batch["x"] if "x" in batch else batch["tokens"].astype(np.float32) / DOCUMENTS
    return ((jax.vmap(model)(x) - 1) ** 2).mean(-1)


class Noting:
    """A step that records its examples, and at one step kills the last process.

    Each line of the file has a step, and the numbers of the examples, by the first row of
    each part of the batch that is on this process's devices.
    """

    def __init__(self, step: Any, folder: Path, first: int, kill: int | None, wait: Any):
        self.step, self.taken, self.kill, self.wait = step, first, kill, wait
        self.file = (folder / f"read-{first:03}-{jax.process_index()}.jsonl").open("w")

    def __call__(self, state: Any, batch: Any) -> Any:
        if self.taken == self.kill:
            # Saves end first, so that chance does not decide which checkpoint is newest.
            self.wait()
            eqxshard.distributed.barrier("the kill")
            if jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        parts: dict[int, Any] = {}
        for shard in batch["index" if "index" in batch else "tokens"].addressable_shards:
            parts[shard.index[0].start or 0] = np.asarray(shard.data).tolist()
        if "__weight__" in batch:
            for shard in batch["__weight__"].addressable_shards:
                start = shard.index[0].start or 0
                pairs = zip(parts[start], shard.data.tolist())
                parts[start] = [number for number, weight in pairs if weight]
        self.file.write(json.dumps([self.taken, parts]) + "\n")
        self.file.flush()
        self.taken += 1
        return self.step(state, batch)


def read_in(folder: Path) -> list[Any]:
    """The examples of each step, in order, as the last process that took it read them."""
    steps: dict[int, dict[int, Any]] = {}
    files = sorted(folder.glob("read-*.jsonl"))
    for first, some in itertools.groupby(files, lambda file: int(file.name.split("-")[1])):
        # Examples that a killed run had read after its checkpoint are read again.
        steps = {step: parts for step, parts in steps.items() if step < first}
        lines = itertools.chain(*(file.read_text().splitlines() for file in some))
        for step, parts in map(json.loads, lines):
            steps.setdefault(step, {}).update((int(k), part) for k, part in parts.items())
    assert sorted(steps) == list(range(len(steps)))
    return [
        [row for start in sorted(steps[step]) for row in steps[step][start]]
        for step in range(len(steps))
    ]


def train(folder: Path, args: argparse.Namespace) -> None:
    """A run, from its newest checkpoint, if it has one."""
    loader = make_loader(args.way)
    where: dict[str, Any] = {
        "mesh": eqxshard.make_mesh(fsdp=2),
        "rule": eqxshard.fsdp(min_size=8),
    }
    optim, key = optax.sgd(1e-2, momentum=0.9), jax.random.key(0)
    checkpointer = eqxshard.Checkpointer(folder / "checkpoints", save_every=SAVE_EVERY)
    if checkpointer.steps():
        like = eqxshard.abstract_state(make_model, optim, key=key, **where)
        state = checkpointer.restore(like)
    else:
        state = eqxshard.init_state(make_model, optim, key=key, **where)
    first = int(state.step)
    print(f"from step {first} in {jax.process_count()} processes", flush=True)
    trackers = [eqxshard.trackers.JSONLines(folder / "metrics.jsonl", keep_until=first)]
    train_step = eqxshard.make_train_step(loss_fn, optim, **where)
    state = eqxshard.fit(
        state,
        Noting(train_step, folder, first, args.kill, checkpointer.wait),
        loader,
        steps=args.steps,
        log_every=1,
        checkpointer=checkpointer,
        trackers=trackers,
    )
    leaves = [x for x in jax.tree.leaves(state.model) if eqx.is_array(x)]
    whole = [eqxshard.distributed.fetch_whole(leaf) for leaf in leaves]
    if jax.process_index() == 0:
        np.savez(folder / "end.npz", *whole)


def fork(folder: Path, args: argparse.Namespace) -> int:
    """The status of a run in a child, forked before a device was touched."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        train(folder, args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    """Train once, or, in forks, a whole run, and one that is killed and goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--forked", action="store_true")
    args = parser.parse_args()
    if not args.forked:
        eqxshard.initialize()
        train(args.folder, args)
        return
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", os.fspath(args.folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    kill, args.kill = args.kill, None
    statuses = [fork(args.folder / "whole", args)]
    args.kill = kill
    statuses.append(fork(args.folder / "killed", args))
    args.kill = None
    statuses.append(fork(args.folder / "killed", args))
    sys.exit(statuses != [0, signal.SIGKILL, 0])


if __name__ == "__main__":
    main()
