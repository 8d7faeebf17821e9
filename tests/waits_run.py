"""Processes of which the last does not come to a place where the others wait."""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from cluster_run import make_model

import eqxshard

WHERE, HOW, FOLDER = sys.argv[1:]
#: The last process behaves once the launcher has started all again.
FIRST_START = not Path(FOLDER, "started").exists()


def arrives(where):
    """True if this process goes on at a place, where the last one may be late."""
    if where != WHERE or jax.process_index() < jax.process_count() - 1 or not FIRST_START:
        return True
    Path(FOLDER, "started").touch()
    if HOW == "sleeps":
        time.sleep(3600)
    if HOW == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    return HOW != "skips"


def main() -> None:
    """Make a loader and a state, and save it."""
    eqxshard.initialize()
    where = {"mesh": eqxshard.make_mesh(), "rule": eqxshard.replicate()}
    arrives("barrier")
    eqxshard.distributed.barrier("the files")
    if arrives("loader"):
        source = eqxshard.data.ArraySource({"x": np.ones((48, 8), np.float32)})
        eqxshard.Loader(source, batch_size=12, mesh=where["mesh"])
    arrives("state")
    optim = optax.sgd(1e-2)
    state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
    checkpointer = eqxshard.Checkpointer(Path(FOLDER, "checkpoints"))
    arrives("save")
    checkpointer.save(state)
    checkpointer.wait()
    print("finished")


if __name__ == "__main__":
    main()
