"""Three processes, of which the last does not come to a place where the others wait."""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from cluster_run import loss_fn, make_model, metric_fn

import eqxshard

WHERE, HOW, FOLDER = sys.argv[1:]
#: The last process behaves once the launcher has started all again.
FIRST_START = not Path(FOLDER, "started").exists()


def arrives(where):
    """What the last process does at a place."""
    if where != WHERE or jax.process_index() < jax.process_count() - 1 or not FIRST_START:
        return
    Path(FOLDER, "started").touch()
    if HOW == "sleeps":
        time.sleep(3600)
    if HOW == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "leaves":
        sys.exit(0)


def main() -> None:
    """Train, evaluate, save and restore."""
    eqxshard.initialize()
    where = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
    arrives("barrier")
    eqxshard.distributed.barrier("the files")
    x = np.ones((48, 8), np.float32)
    arrays = {"x": x, "y": x[:, :4], "index": np.arange(48)}
    calls = iter(range(1, 1000))

    def transform(batch):
        if next(calls) == 3:
            arrives("step")
        return batch

    arrives("loader")
    loader = eqxshard.Loader(
        eqxshard.data.ArraySource(arrays),
        batch_size=12,
        mesh=where["mesh"],
        transform=transform,
        prefetch=0,
    )
    arrives("state")
    optim = optax.sgd(1e-2)
    state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
    step = eqxshard.make_train_step(loss_fn, optim, **where)
    eval_step = eqxshard.make_eval_step(metric_fn, **where)

    def evaluate(model):
        if HOW == "all take long":
            time.sleep(10)
        arrives("evaluation")
        return eqxshard.evaluate(model, eval_step, loader)

    state = eqxshard.fit(state, step, loader, steps=8, evaluate=evaluate)
    arrives("evaluate")
    eqxshard.evaluate(state.model, eval_step, loader)
    checkpointer = eqxshard.Checkpointer(Path(FOLDER, "checkpoints"))
    arrives("save")
    checkpointer.save(state, loader=loader)
    checkpointer.wait()
    arrives("restore")
    checkpointer.restore(state)
    arrives("end")
    print("finished")


if __name__ == "__main__":
    main()
