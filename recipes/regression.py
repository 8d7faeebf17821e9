"""Fit a sine with an MLP: Equinox's own example of parallelism, on whatever devices."""

import sys
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import eqxshard
from eqxshard import data
from eqxshard.mesh import describe


def make_model(key):
    return eqx.nn.MLP(4, 4, 32, 1, key=key)


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def metric_fn(model, batch):
    return {"loss": loss_fn(model, batch, None)}


def sine(examples: int, seed: int) -> data.ArraySource:
    x = np.random.default_rng(seed).normal(size=(examples, 4)).astype(np.float32)
    return data.ArraySource({"x": x, "y": np.sin(x)})


@dataclass(frozen=True)
class Args:
    """Fit the sine of each of four numbers with an MLP, data parallel.

    The model and the data are those of https://docs.kidger.site/equinox/examples/parallelism,
    with more of both steps and examples, and others to evaluate on.
    """

    steps: int = 1000
    """How many steps to take."""
    batch_size: int = 64
    """Examples per step, over all devices."""
    learning_rate: float = 3e-3
    """Adam's."""
    devices: int = 2
    """How many CPU devices to simulate, where there is no accelerator."""
    seed: int = 0
    """Decides the data, the initial parameters and the order of the data."""


def train(args: Args) -> str:
    if args.devices < 1:
        raise ValueError(f"--devices {args.devices} is too few; use 1 or more.")
    jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        mesh = eqxshard.make_mesh()
    # JAX asserts that there is a CUDA plugin, and says nothing where there is none.
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"JAX finds no devices ({error}); unset JAX_PLATFORMS.") from None
    rule = eqxshard.replicate()
    optim = optax.adam(args.learning_rate)

    state = eqxshard.init_state(
        make_model, optim, key=jax.random.key(args.seed), mesh=mesh, rule=rule
    )
    train_step = eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule)
    eval_step = eqxshard.make_eval_step(metric_fn, mesh=mesh, rule=rule)

    batches: dict = dict(batch_size=args.batch_size, mesh=mesh)
    loader = eqxshard.Loader(sine(4096, args.seed), seed=args.seed, **batches)
    test = eqxshard.Loader(sine(1024, args.seed + 1), shuffle=False, **batches)

    before = eqxshard.evaluate(state.model, eval_step, test)["loss"]
    state = eqxshard.fit(state, train_step, loader, steps=args.steps)
    after = eqxshard.evaluate(state.model, eval_step, test)["loss"]
    return (
        f"test loss {before:.4f} before, {after:.4f} after {args.steps} steps on "
        + describe(mesh)
    )


def main() -> int:
    args = tyro.cli(Args)
    eqxshard.cache_compilations()
    try:
        print(train(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
