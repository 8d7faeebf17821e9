"""Two processes save a step, but one cannot write; then they save it again."""

import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import eqxshard
from eqxshard.checkpoint import _arrays
from eqxshard.distributed import barrier

ARRAYS = 400


def main() -> None:
    eqxshard.initialize()
    folder, first = Path(sys.argv[1]), jax.process_index() == 0
    mesh = eqxshard.make_mesh(data=1, fsdp=2)
    split = jax.NamedSharding(mesh, jax.P("fsdp"))
    everywhere = jax.NamedSharding(mesh, jax.P())

    def state(value: float) -> eqxshard.TrainState:
        make = jax.jit(
            lambda: {str(i): jnp.full(512, value) for i in range(ARRAYS)},
            out_shardings=split,
        )
        rest = jax.jit(lambda: (jnp.int32(0), jax.random.key(0)), out_shardings=everywhere)
        step, key = rest()
        return eqxshard.TrainState(step=step, model=make(), opt_state=(), key=key)

    # Each array is a batch of its own; those of process 0 take a minute.
    _arrays._BATCH_BYTES = 1
    _arrays._MOST_BATCHES = 10**6
    take, taken = _arrays._take, []

    def slowly(*args):
        taken.append(None)
        if len(taken) > ARRAYS // 2:
            time.sleep(0.2)
        return take(*args)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if first:
        _arrays._take = slowly
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    checkpointer = eqxshard.Checkpointer(folder)
    checkpointer.save(state(1.0))
    try:
        checkpointer.wait()
    except OSError as error:
        print(f"failed: {error}")
    if first:
        _arrays._take = take
        print(f"stopped early: {len(taken) < ARRAYS}")
        print(f"left: {sorted(path.name for path in folder.iterdir())}")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    barrier("looked")
    checkpointer.save(state(2.0))
    checkpointer.wait()
    model = checkpointer.restore(state(0.0)).model
    print(f"restored: { {float(jnp.min(x)) for x in model.values()} }")
    if first:
        parts = [path.name for path in (folder / "0" / "state").glob("ocdbt.*")]
        print(f"parts: {len(parts)} of {len({name[-8:] for name in parts})} save")


if __name__ == "__main__":
    main()
