"""A training script, as users write them: a tiny model, and ways to fail."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard

EXAMPLES, TESTS = 96, 40


class Line(eqx.Module):
    """Two layers, of which the first has a width of its own."""

    hidden: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, width, key):
        k1, k2 = jax.random.split(key)
        self.hidden = eqx.nn.Linear(3, width, key=k1)
        self.out = eqx.nn.Linear(width, 2, key=k2)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def loss_fn(model, batch, key):
    """Squared errors."""
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def jax_bug(model, batch, key):
    """A mistake that JAX finds when it traces the step."""
    return jnp.einsum("bi,ij->b", batch["x"], jnp.ones((7, 2)))


def equinox_bug(model, batch, key):
    """A mistake that Equinox finds when it traces the step."""
    conv = eqx.nn.Conv2d(1, 1, 3, key=jax.random.key(0))
    return jax.vmap(conv)(batch["x"])[:, 0, 0]


def huge(model, batch, key):
    """A loss that takes more memory than there is."""
    losses = loss_fn(model, batch, key)
    wide = jnp.broadcast_to(losses[:, None], (len(losses), 10**12))
    return losses + jnp.cumsum(wide.reshape(len(losses), -1, 1000), axis=1)[:, -1, -1]


LOSSES: dict[str, Any] = {"jax": jax_bug, "equinox": equinox_bug, "memory": huge}


def metric_fn(model, batch):
    """The loss, and the share of signs that are right."""
    right = jnp.sign(jax.vmap(model)(batch["x"])) == jnp.sign(batch["y"])
    return {"loss": loss_fn(model, batch, None), "accuracy": jnp.mean(right, axis=-1)}


def make_data(examples, seed, name="lines"):
    """Points, and the values to fit to them."""
    x = np.random.default_rng(seed).normal(size=(examples, 3)).astype(np.float32)
    arrays = {"x": x, "y": np.sin(2 * x[:, :2])}
    return eqxshard.data.ArraySource(arrays, name=name, unit="points")


def make_optim(name, rate, steps):
    """An optimizer with a schedule over the run."""
    schedule = optax.linear_schedule(rate, rate / 10, steps)
    return {"adam": optax.adam, "sgd": optax.sgd}[name](schedule)


WIDTHS = {"small": 8, "wide": 16}


@dataclass(frozen=True)
class Args:
    """Fit some points."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=16, log_every=2)
    model: Literal["small", "wide"] = "small"
    """How many neurons."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """What trains them."""
    learning_rate: Annotated[float | None, eqxshard.run.default("0.01")] = None
    """The highest learning rate."""
    fail: Literal["no", "value", "file", "number", "jax", "equinox", "key", "memory"] = "no"
    """How to fail."""
    seconds_per_step: float = 0.0
    """How long to wait for each batch."""


def main(args: Args) -> str:
    """Train, and say how it went."""
    rate = 0.01 if args.learning_rate is None else args.learning_rate
    if args.fail == "value":
        raise eqxshard.UsageError("--fail value is not what you want; use another.")
    if args.fail == "file":
        Path("/nowhere/at all").read_text()
    if args.fail == "number":
        int("ten")
    if args.fail == "key":
        {}["missing"]

    def wait(batch):
        time.sleep(args.seconds_per_step)
        return batch

    run = eqxshard.train(
        partial(Line, WIDTHS[args.model]),
        LOSSES.get(args.fail, loss_fn),
        metric_fn,
        partial(make_optim, args.optimizer, rate),
        make_data(EXAMPLES, 0),
        make_data(TESTS, 1),
        config=args.run,
        name=args.model,
        epochs=2,
        best="eval/accuracy",
        transform=wait if args.seconds_per_step else None,
    )
    return f"accuracy {run.metrics['accuracy']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
