"""An ensemble by vmap: sixteen networks at once, which disagree where there are no data."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P
from jax.experimental.multihost_utils import process_allgather
from pictures import COLORS, figure

import eqxshard

MEMBERS = 16
# Each device has some whole members, and sees all examples.
RULE = eqxshard.by_path({".*": P("tensor")})


def make_ensemble(key):
    """One module whose arrays have a leading dim of members."""

    def make_member(key):
        return eqx.nn.MLP(1, "scalar", 64, depth=2, key=key)

    return eqx.filter_vmap(make_member)(jax.random.split(key, MEMBERS))


@eqx.filter_vmap(in_axes=(eqx.if_array(0), None))
def predict(member, x):
    return jax.vmap(member)(x[:, None])


def loss_fn(ensemble, batch, key):
    errors = (predict(ensemble, batch["x"]) - batch["y"]) ** 2
    # Adam ignores the scale of the loss, so each member trains as it would alone.
    return errors.mean(axis=0)


def metric_fn(ensemble, batch):
    outputs = predict(ensemble, batch["x"])
    return {
        "loss_of_one": ((outputs - batch["y"]) ** 2).mean(axis=0),
        "loss_of_mean": (outputs.mean(axis=0) - batch["y"]) ** 2,
    }


def waves(count, seed):
    """A wave with noise, seen in two windows."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(1, 2, count) * rng.choice([-1, 1], count)
    y = np.sin(3 * x) + rng.normal(scale=0.1, size=count)
    return eqxshard.data.ArraySource({"x": np.float32(x), "y": np.float32(y)})


def draw(path, data, x, outputs):
    mean = outputs.mean(axis=0)
    spread = 2 * outputs.std(axis=0)
    with figure(path) as axes:
        ax = axes[0, 0]
        ax.plot(x, outputs.T, color=COLORS[0], linewidth=0.5, alpha=0.5)
        ax.fill_between(x, mean - spread, mean + spread, color=COLORS[0], alpha=0.2)
        ax.plot(x, mean, color=COLORS[0], label="mean, and twice the spread")
        ax.plot(data["x"], data["y"], ".", color=COLORS[1], markersize=3, label="data")
        ax.set_ylim(-3, 3)
        ax.legend(loc="upper center", ncols=2)


@dataclass(frozen=True)
class Args:
    """Fit sixteen networks to a wave with a gap; each device trains some of them."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(
        batch_size=64, evaluate_every=500, save_every=500
    )
    learning_rate: float = 3e-3
    """Adam's learning rate."""


def main(args: Args) -> str:
    if not 0 < args.learning_rate < float("inf"):
        raise eqxshard.UsageError(
            f"--learning-rate {args.learning_rate} is not positive and finite; use another."
        )
    train_data = waves(256, args.run.seed)
    run = eqxshard.train(
        make_ensemble,
        loss_fn,
        metric_fn,
        optax.adam(args.learning_rate),
        train_data,
        waves(1024, args.run.seed + 1),
        config=args.run,
        steps=1500,
        mesh="tensor=-1",
        rule=RULE,
    )
    x = jnp.linspace(-3.2, 3.2, 300)
    outputs = eqxshard.filter_jit(predict)(run.state.model, x)
    # Each process may have some of the members.
    outputs = process_allgather(outputs, tiled=True)
    draw(run.folder / "spread.png", train_data.gather(np.arange(256)), x, outputs)
    one, mean = run.metrics["loss_of_one"], run.metrics["loss_of_mean"]
    return f"test loss {one:.4f} of one member, {mean:.4f} of their mean | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
