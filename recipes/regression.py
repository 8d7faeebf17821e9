"""Fit a sine with an MLP: Equinox's own example of parallelism, on any devices."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard


def make_model(key):
    return eqx.nn.MLP(4, 4, 32, 1, key=key)


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def metric_fn(model, batch):
    return {"loss": loss_fn(model, batch, None)}


def sine(examples, seed):
    x = np.random.default_rng(seed).normal(size=(examples, 4)).astype(np.float32)
    return eqxshard.data.ArraySource({"x": x, "y": np.sin(x)})


@dataclass(frozen=True)
class Args:
    """Fit the sine of each of four numbers, data parallel.

    The model and data are those of https://docs.kidger.site/equinox/examples/parallelism,
    with more steps, more examples and an evaluation.
    """

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64)
    learning_rate: float = 3e-3
    """Adam's learning rate."""


def main(args: Args) -> str:
    run = eqxshard.train(
        make_model,
        loss_fn,
        metric_fn,
        optax.adam(args.learning_rate),
        sine(4096, args.run.seed),
        sine(1024, args.run.seed + 1),
        config=args.run,
        name="sine",
        steps=1000,
    )
    return f"test loss {run.metrics['loss']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
