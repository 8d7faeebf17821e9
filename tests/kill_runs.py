"""Kills training runs at random instants, and has them go on, until they end.

`python tests/kill_runs.py --runs 200` prints the results; it fails if a run does not
end as one that was never killed. A run is a child process, forked from this one before it
has touched a device, so that it starts in a moment.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax
import numpy as np
import optax
import tensorstore  # noqa: F401  (here, so that children start at once)
from run_helpers import measured

import eqxshard

EXAMPLES, BATCH, EPOCHS, EVERY = 300, 32, 6, 3


def train(folder: Path) -> None:
    """One run, from its newest checkpoint, if it has one."""
    mesh = eqxshard.make_mesh(fsdp=2, data=1)
    rule = eqxshard.fsdp(min_size=8)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 8)).astype(np.float32)
    source = eqxshard.data.ArraySource({"x": x, "y": np.sin(x[:, :4])})
    loader = eqxshard.Loader(source, batch_size=BATCH, mesh=mesh)
    optim = optax.adam(1e-2)

    def make_model(key):
        import equinox as eqx

        return eqx.nn.MLP(8, 4, 256, 2, key=key)

    def loss_fn(model, batch, key):
        noise = 0.1 * jax.random.normal(key, batch["x"].shape)
        return ((jax.vmap(model)(batch["x"] + noise) - batch["y"]) ** 2).mean(-1)

    def metric_fn(model, batch):
        return {"loss": loss_fn(model, batch, jax.random.key(0))}

    where = {"mesh": mesh, "rule": rule}
    train_step = eqxshard.make_train_step(loss_fn, optim, **where)
    eval_step = eqxshard.make_eval_step(metric_fn, **where)
    checkpointer = eqxshard.Checkpointer(
        folder / "checkpoints", save_every=EVERY, max_to_keep=2
    )
    key = jax.random.key(0)
    resumes = bool(checkpointer.steps())
    if resumes:
        like = eqxshard.abstract_state(make_model, optim, key=key, **where)
        state = checkpointer.restore(like)
    else:
        state = eqxshard.init_state(make_model, optim, key=key, **where)
    log = eqxshard.trackers.JSONLines(
        folder / "metrics.jsonl", keep_until=int(state.step) if resumes else None
    )
    test = eqxshard.Loader(source, batch_size=BATCH, mesh=mesh, shuffle=False)
    state = eqxshard.fit(
        state,
        train_step,
        loader,
        epochs=EPOCHS,
        log_every=1,
        evaluate=lambda model: eqxshard.evaluate(model, eval_step, test),
        checkpointer=checkpointer,
        trackers=[log],
    )
    leaves = jax.tree.leaves(jax.device_get(state.model)) + jax.tree.leaves(state.opt_state)
    arrays = [np.asarray(leaf) for leaf in leaves if hasattr(leaf, "dtype")]
    np.savez(folder / "part.npz", *arrays)
    os.replace(folder / "part.npz", folder / "end.npz")


def start(folder: Path) -> int:
    """Fork a run; return its process."""
    child = os.fork()
    if child:
        return child
    try:
        with (folder / "log.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_compilation_cache_dir", os.fspath(folder.parent / "cache"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        train(folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def finish(folder: Path) -> float:
    """Have a run go on to its end; return the seconds it took."""
    began = time.monotonic()
    _, status = os.waitpid(start(folder), 0)
    if status:
        raise SystemExit(f"a run failed: {(folder / 'log.txt').read_text()}")
    return time.monotonic() - began


def check_same(folder: Path, whole: Path) -> None:
    """Fail unless a run ended like another one, bit for bit, with the same log."""
    ours, theirs = (np.load(one / "end.npz") for one in (folder, whole))
    for name in theirs.files:
        np.testing.assert_array_equal(ours[name], theirs[name])
    lines = measured(folder)
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)), f"steps in the log: {steps}"
    assert lines == measured(whole)


def main() -> None:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    root = Path(tempfile.mkdtemp(prefix="kill-runs-"))
    whole = root / "whole"
    whole.mkdir()
    finish(whole)
    # Once more, now that all is compiled, to learn how long a run lasts.
    shutil.copytree(whole, root / "again")
    shutil.rmtree(root / "again" / "checkpoints")
    seconds = finish(root / "again")
    check_same(root / "again", whole)
    kills = 0
    for number in range(args.runs):
        folder = root / str(number)
        folder.mkdir()
        while True:
            child = start(folder)
            time.sleep(rng.uniform(0, 1.1 * seconds))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                break
            kills += 1
            if rng.random() < 0.5:
                break
        finish(folder)
        check_same(folder, whole)
        shutil.rmtree(folder)
    shutil.rmtree(root)
    print(f"{args.runs} runs of {seconds:.1f} s, {kills} kills: all ended as one.")


if __name__ == "__main__":
    sys.exit(main())
