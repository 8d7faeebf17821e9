"""Run by `scaling.py` in each of its processes: steps of eqxshard, and by hand.

Both train the same MLP on the same batches over the same mesh of all devices, and take
turns. The batch is kept on the devices, so that only the steps are measured.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _side_by_side import take_turns

import eqxshard
from eqxshard.sharding import batch_sharding

OPTIM = optax.adam(1e-3)
#: Collectives of simulated devices share one pool of threads: they deadlock when too many
#: steps are in flight.
IN_FLIGHT = 5


def make_model(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(784, 10, 512, 2, key=key)


def losses(model: Any, batch: Any, key: Any) -> Any:
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def make_rows(rows: int) -> dict[str, np.ndarray]:
    """The rows of this process."""
    rng = np.random.default_rng(jax.process_index())
    x = rng.normal(size=(rows, 784)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 10, rows, np.int32)}


def by_eqxshard(rows: int) -> Callable[[], Any]:
    mesh, rule = eqxshard.make_mesh(), eqxshard.replicate()
    key = jax.random.key(0)
    state = eqxshard.init_state(make_model, OPTIM, key=key, mesh=mesh, rule=rule)
    train_step = eqxshard.make_train_step(losses, OPTIM, mesh=mesh, rule=rule)
    batch = global_batch(make_rows(rows), batch_sharding(mesh))

    def step() -> Any:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics

    return step


def by_hand(rows: int) -> Callable[[], Any]:
    """Plain JAX: arrays with shardings on a mesh, and `jax.jit`."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    replicated = jax.NamedSharding(mesh, jax.P())
    params, static = eqx.partition(make_model(jax.random.key(0)), eqx.is_array)
    flat, treedef = jax.tree.flatten((params, OPTIM.init(params)))
    flat = jax.jit(
        lambda: list(map(jnp.asarray, map(np.asarray, flat))), out_shardings=replicated
    )()
    batch = global_batch(make_rows(rows), jax.NamedSharding(mesh, jax.P("data")))

    @partial(jax.jit, donate_argnums=0)
    def jitted(flat, batch):
        params, opt_state = jax.tree.unflatten(treedef, flat)

        def mean(params):
            return jnp.mean(losses(eqx.combine(params, static), batch, None))

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = OPTIM.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves((params, opt_state)), loss

    def step() -> Any:
        nonlocal flat
        flat, loss = jitted(flat, batch)
        return loss

    return step


def global_batch(rows: dict[str, np.ndarray], sharding: Any) -> Any:
    make = partial(jax.make_array_from_process_local_data, sharding)
    return jax.tree.map(make, rows)


def examples_per_second(step: Callable[[], Any], rows: int, steps: int) -> float:
    start = time.perf_counter()
    for number in range(1, steps + 1):
        result = step()
        if number % IN_FLIGHT == 0 or number == steps:
            jax.block_until_ready(result)
    return rows * steps / (time.perf_counter() - start)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("result", type=Path, help="where to write the figures")
    options.add_argument("--batch-sizes", type=int, nargs="+", required=True)
    options.add_argument("--rounds", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    args = options.parse_args()
    eqxshard.initialize()
    found = {}
    for size in args.batch_sizes:
        rows = size // jax.process_count()
        turns = {
            name: partial(examples_per_second, make(rows), size, args.steps)
            for name, make in {"jax.jit by hand": by_hand, "eqxshard": by_eqxshard}.items()
        }
        found[size] = take_turns(turns, args.rounds)
    if jax.process_index() == 0:
        args.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
