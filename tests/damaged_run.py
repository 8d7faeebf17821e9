"""Two processes restore a checkpoint, and one of them finds its part damaged."""

import sys

import jax
import jax.numpy as jnp
from etils import epath

import eqxshard
from eqxshard.distributed import barrier


def main() -> None:
    eqxshard.initialize()
    folder = epath.Path(sys.argv[1])
    mesh = eqxshard.make_mesh(data=1, fsdp=2)
    split = jax.NamedSharding(mesh, jax.P("fsdp"))
    everywhere = jax.NamedSharding(mesh, jax.P())

    def state(step: int) -> eqxshard.TrainState:
        # Each process has a file of chunks that is too large to be hashed.
        x = jax.jit(lambda: jnp.arange(2.0**20) + step, out_shardings=split)()
        make = jax.jit(
            lambda: (jnp.int32(step), jax.random.key(step)), out_shardings=everywhere
        )
        taken, key = make()
        return eqxshard.TrainState(step=taken, model={"x": x}, opt_state=(), key=key)

    checkpointer = eqxshard.Checkpointer(folder)
    for step in (0, 1):
        checkpointer.save(state(step))
        checkpointer.wait()
    if jax.process_index() == 0:
        files = (folder / "1" / "state").glob("ocdbt.process_1_*/d/*")
        file = max(files, key=lambda file: file.stat().length)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    barrier("damage")
    restored = checkpointer.restore(state(0))
    shards = [shard.data for shard in restored.model["x"].addressable_shards]
    first = float(shards[0][0]) - 2**19 * jax.process_index()
    print(f"restored step {int(restored.step)}, whose numbers begin with {first:g}")


if __name__ == "__main__":
    main()
