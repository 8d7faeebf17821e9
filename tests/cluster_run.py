"""A small training run that resumes, for the tests of several processes."""

import argparse
import contextlib
import itertools
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard

RULES = {
    "data": eqxshard.replicate(),
    "fsdp": eqxshard.fsdp(min_size=8),
    "tensor": eqxshard.first_match(
        eqxshard.by_path(
            {
                r"layers\.0\.weight": jax.P("tensor"),
                r"layers\.0\.bias": jax.P("tensor"),
                r"layers\.1\.weight": jax.P(None, "tensor"),
            }
        ),
        eqxshard.replicate(),
    ),
}


def make_model(key):
    """A small MLP."""
    return eqx.nn.MLP(8, 4, 32, 1, key=key)


#: The examples, and how many of them one metric counts.
EXAMPLES, GROUP = 100, 20


def loss_fn(model, batch, key):
    """Squared errors of noisy inputs, and which examples they were."""
    noise = 0.1 * jax.random.normal(key, batch["x"].shape)
    errors = (jax.vmap(model)(batch["x"] + noise) - batch["y"]) ** 2
    index = batch["index"]
    # A bit for each example, so that a mean says which were there.
    bits = jnp.left_shift(1, index % GROUP).astype(jnp.float32)
    groups = range(EXAMPLES // GROUP)
    found = {f"index_{n}": jnp.where(index // GROUP == n, bits, 0.0) for n in groups}
    return errors.mean(-1), {"index": index, **found}


def examples_of(line: dict[str, Any], count: int) -> list[int]:
    """The examples in a batch of `count`, from its line in the log."""
    found = []
    for n in range(EXAMPLES // GROUP):
        bits = int(count * line[f"train/index_{n}"])
        found += [GROUP * n + i for i in range(bits.bit_length()) if bits >> i & 1]
    return found


def metric_fn(model, batch):
    """The number of examples, and which they are."""
    return {"ones": jnp.ones(batch["index"].shape), "index": batch["index"]}


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--mesh", default="data=-1")
    parser.add_argument("--dcn", help="JSON")
    parser.add_argument("--explicit", action="store_true")
    parser.add_argument("--rule", default="data")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    parser.add_argument("--checkpoints", help="where, if not in the folder")
    parser.add_argument("--stall-process", type=int, help="stalls in step 8, from step 0")
    parser.add_argument("--linger", type=float, default=0.0, help="seconds, in evaluations")
    parser.add_argument("--full-process", type=int, help="whose disk is full for a while")
    parser.add_argument("--hang-seconds", type=float)
    parser.add_argument("--heartbeat-seconds", type=int, default=30)
    parser.add_argument("--disk", help="a folder, to record what is synced")
    parser.add_argument("--address")
    parser.add_argument("--process", type=int)
    parser.add_argument("--processes", type=int)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if args.disk:
            # A copy of this script, in another folder, has no such module beside it.
            from power import Disk

            disk = Disk(Path(args.folder) / "checkpoints", Path(args.disk))
            stack.enter_context(disk.recording())
        train(args)


def train(args: argparse.Namespace) -> None:
    """The run itself."""
    eqxshard.initialize(
        args.address,
        args.processes,
        args.process,
        heartbeat_seconds=args.heartbeat_seconds,
    )
    # Mistakes: something that is not the same in all processes.
    differ = os.environ.get("DIFFER")
    first = jax.process_index() == 0
    if differ is not None and not first:
        args.seed += differ == "seed"
        args.batch_size *= 2 if differ == "batch_size" else 1
    pairs = (pair.split("=") for pair in args.mesh.split(","))
    sizes: dict[str, Any] = {axis: int(size) for axis, size in pairs}
    if args.dcn:
        sizes["dcn"] = json.loads(args.dcn)
    mesh = eqxshard.make_mesh(**sizes, explicit=args.explicit)
    where = {"mesh": mesh, "rule": RULES[args.rule]}
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 8)).astype(np.float32)
    arrays = {"x": x, "y": np.sin(x[:, :4]), "index": np.arange(EXAMPLES)}
    source = eqxshard.data.ArraySource(arrays)

    def slowly(batch):
        time.sleep(args.seconds_per_step)
        if args.full_process == jax.process_index():
            # From its eighth batch on, until the twelfth, it cannot write files.
            count = next(batches)
            if count in (8, 12):
                limit = 0 if count == 8 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        if differ == "exception" and not first and next(calls) == 8:
            raise RuntimeError("a bad file")
        stalls = begin == 0 and args.stall_process == jax.process_index()
        if stalls and next(calls) == 8:
            time.sleep(3600)
        return batch

    calls, batches = itertools.count(1), itertools.count(1)
    loader = eqxshard.Loader(
        source, batch_size=args.batch_size, mesh=mesh, transform=slowly, prefetch=0
    )
    test = eqxshard.Loader(source, batch_size=args.batch_size, mesh=mesh, shuffle=False)
    optim, key = optax.adam(1e-2), jax.random.key(args.seed)
    checkpointer = eqxshard.Checkpointer(
        args.checkpoints or f"{args.folder}/checkpoints",
        save_every=5,
    )
    if checkpointer.steps():
        if args.linger:
            print("reading the checkpoint", flush=True)
        like = eqxshard.abstract_state(make_model, optim, key=key, **where)
        state = checkpointer.restore(like)
    else:
        state = eqxshard.init_state(make_model, optim, key=key, **where)
    begin = int(state.step)
    path = f"{args.folder}/metrics.jsonl"
    trackers = [eqxshard.trackers.JSONLines(path, keep_until=begin)]

    def evaluate(model):
        if args.linger:
            print("in the evaluation", flush=True)
            time.sleep(args.linger)
        measured = eqxshard.evaluate(model, eval_step, test)
        if args.linger:
            print("evaluated", flush=True)
        return measured

    train_step = eqxshard.make_train_step(loss_fn, optim, **where)
    eval_step = eqxshard.make_eval_step(metric_fn, **where)
    print(f"resuming from step {begin} in {jax.process_count()} processes")
    state = eqxshard.fit(
        state,
        train_step,
        loader,
        steps=args.steps,
        log_every=1,
        evaluate=evaluate,
        checkpointer=None if differ == "checkpointer" and not first else checkpointer,
        trackers=trackers,
        hang_seconds=args.hang_seconds,
    )
    print(f"finished at step {int(state.step)}")


if __name__ == "__main__":
    main()
