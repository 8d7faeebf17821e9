"""An `equinox.error_if` that fails on the device of one process: every process raises."""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxshard


def metric_fn(model, batch):
    """Checks the rows of each device by themselves."""

    def check(x):
        return eqx.error_if(x, jnp.any(x > 3), "a row is too large")

    rows = jax.P(("data", "fsdp"))
    mesh = jax.sharding.get_abstract_mesh()
    checked = jax.shard_map(
        check, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    return {"x": checked(batch["x"]) * model.weight[0, 0]}


def main() -> None:
    """Evaluate two good batches and a bad one; write the results to a file per process."""
    eqxshard.initialize()
    mesh = eqxshard.make_mesh()
    make = lambda key: eqx.nn.Linear(2, 2, key=key)  # noqa: E731
    model = eqxshard.filter_shard(make(jax.random.key(0)), jax.NamedSharding(mesh, jax.P()))
    eval_step = eqxshard.make_eval_step(metric_fn, lint="off")
    found = []
    for batch in ([0.0, 1.0], [0.0, 5.0], [1.0, 2.0]):
        try:
            eval_step(model, {"x": np.array(batch, np.float32)}).compute()
            found.append("right")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    path = Path(sys.argv[1]) / f"{jax.process_index()}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
