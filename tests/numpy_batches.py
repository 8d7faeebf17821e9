"""Steps on NumPy batches, for the tests of several processes."""

import json
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard

X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)


def losses_of(batches: list[Any], mesh) -> list[float]:
    """The loss of a step on each of some batches, by one program."""
    optim, rule = optax.sgd(0.1), eqxshard.fsdp(min_size=16)
    state = eqxshard.init_state(
        lambda key: eqx.nn.MLP(8, 8, 64, 1, key=key),
        optim,
        key=jax.random.key(0),
        mesh=mesh,
        rule=rule,
    )

    @eqx.debug.assert_max_traces(max_traces=1)
    def loss_fn(model, batch, key):
        return jnp.sum((jax.vmap(model)(batch["x"]) - batch["x"]) ** 2, -1)

    train_step = eqxshard.make_train_step(loss_fn, optim)
    found = []
    for batch in batches:
        state, metrics = train_step(state, batch)
        found.append(metrics.compute()["loss"])
    return found


def batches_on(mesh) -> list[Any]:
    """The same rows as NumPy arrays, as uncommitted arrays, and from a loader."""
    source = eqxshard.data.ArraySource({"x": X})
    loader = eqxshard.Loader(source, batch_size=32, mesh=mesh, shuffle=False)
    return [{"x": X}, {"x": jnp.asarray(X)}, next(iter(loader))]


def main() -> None:
    """Write the losses, and the error if each process gives a batch of its own."""
    eqxshard.initialize()
    mesh, number = eqxshard.make_mesh(fsdp=-1), jax.process_index()
    found: dict[str, Any] = {"losses": losses_of(batches_on(mesh), mesh)}
    try:
        losses_of([{"x": X[16 * number :][:16]}], mesh)
    except ValueError as error:
        found["refused"] = str(error)
    Path(sys.argv[1], f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
