"""A recurrent network that reads garments row by row, and guesses after each row."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from garments import GARMENTS, Garments
from pictures import figure

import eqxshard

SHOWN = np.array([0, 1, 4, 18])  # A boot, a pullover, a shirt and a bag.


class RNN(eqx.Module):
    cell: nn.GRUCell
    logits: nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.cell = nn.GRUCell(28, 128, key=k1)
        self.logits = nn.Linear(128, 10, key=k2)

    def __call__(self, rows):
        def read(hidden, row):
            hidden = self.cell(row, hidden)
            return hidden, self.logits(hidden)

        start = jnp.zeros(self.cell.hidden_size)
        _, logits = jax.lax.scan(read, start, rows)
        return logits


def predict(model, batch):
    """Logits after each row: (batch, 28, 10)."""
    return jax.vmap(model)(batch["image"] / 255)


def loss_fn(model, batch, key):
    logits = predict(model, batch)
    labels = jnp.broadcast_to(batch["label"][:, None], logits.shape[:2])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(axis=1)


def metric_fn(model, batch):
    correct = jnp.argmax(predict(model, batch), axis=-1) == batch["label"][:, None]
    return {"accuracy": correct[:, -1], "accuracy_halfway": correct[:, 13]}


def make_optimizer(steps):
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def draw(path, images, beliefs):
    """Each garment, and beside each of its rows the probabilities after that row."""
    with figure(path, 1, 2 * len(SHOWN), size=(9, 2.6)) as axes:
        for garment, belief, (left, right) in zip(images, beliefs, axes.reshape(-1, 2)):
            left.imshow(garment, cmap="gray", aspect="auto")
            left.set_axis_off()
            right.imshow(belief, cmap="magma", vmin=0, vmax=1, aspect="auto")
            right.set_xticks(range(10), GARMENTS, rotation=90, fontsize=7)
            right.set_yticks([])


@dataclass(frozen=True)
class Args:
    """Train a GRU to name a garment of Fashion-MNIST after each of its 28 rows."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=128)
    garments: Garments = Garments()


def main(args: Args) -> str:
    train_data, test_data = args.garments.load()
    run = eqxshard.train(
        RNN,
        loss_fn,
        metric_fn,
        make_optimizer,
        train_data,
        test_data,
        config=args.run,
        epochs=5,
    )
    few = test_data.gather(SHOWN)
    logits = eqxshard.filter_jit(predict)(run.state.model, few)
    draw(run.folder / "rows.png", few["image"], np.asarray(jax.nn.softmax(logits)))
    halfway, end = run.metrics["accuracy_halfway"], run.metrics["accuracy"]
    return f"test accuracy {halfway:.4f} halfway, {end:.4f} at the end | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
