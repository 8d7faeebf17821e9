"""A ResNet with BatchNorm, whose statistics are those of the whole batch on all devices."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from garments import Images
from pictures import save_guesses

import eqxshard

WIDTHS = (16, 32, 64)


class Block(eqx.Module):
    conv1: nn.Conv2d
    norm1: nn.BatchNorm
    conv2: nn.Conv2d
    norm2: nn.BatchNorm
    skip: nn.Conv2d

    def __init__(self, channels_in, channels_out, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.conv1 = nn.Conv2d(
            channels_in, channels_out, 3, stride=2, padding=1, use_bias=False, key=k1
        )
        self.norm1 = nn.BatchNorm(channels_out, axis_name="batch", mode="batch")
        self.conv2 = nn.Conv2d(
            channels_out, channels_out, 3, padding=1, use_bias=False, key=k2
        )
        self.norm2 = nn.BatchNorm(channels_out, axis_name="batch", mode="batch")
        self.skip = nn.Conv2d(
            channels_in, channels_out, 1, stride=2, use_bias=False, key=k3
        )

    def __call__(self, x, state):
        y, state = self.norm1(self.conv1(x), state)
        y = jax.nn.relu(y)
        y, state = self.norm2(self.conv2(y), state)
        return jax.nn.relu(self.skip(x) + y), state


class ResNet(eqx.Module):
    stem: nn.Conv2d
    blocks: list[Block]
    logits: nn.Linear

    def __init__(self, key):
        stem_key, logits_key, *block_keys = jax.random.split(key, 2 + len(WIDTHS))
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, key=stem_key)
        self.blocks = []
        channels = WIDTHS[0]
        for width, block_key in zip(WIDTHS, block_keys):
            self.blocks.append(Block(channels, width, block_key))
            channels = width
        self.logits = nn.Linear(channels, 10, key=logits_key)

    def __call__(self, x, state):
        x = jax.nn.relu(self.stem(x))
        for block in self.blocks:
            x, state = block(x, state)
        return self.logits(x.mean(axis=(1, 2))), state


def predict(model_and_state, batch):
    model, state = model_and_state
    images = jnp.moveaxis(batch["image"], -1, 1) / 128 - 1
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return apply(images, state)


def loss_fn(model_and_state, batch, key):
    logits, state = predict(model_and_state, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, state


def metric_fn(model_and_state, batch):
    logits, _ = predict(model_and_state, batch)
    return {"accuracy": jnp.argmax(logits, axis=-1) == batch["label"]}


def make_optimizer(steps):
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    return optax.adamw(schedule, weight_decay=0.01)


@dataclass(frozen=True)
class Args:
    """Train a ResNet on 32x32 images in colour: Fashion-MNIST, coloured, or CIFAR-10."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64, save_every=400)
    images: Images = Images()


def main(args: Args) -> str:
    train_data, test_data = args.images.load()
    run = eqxshard.train(
        nn.make_with_state(ResNet),
        loss_fn,
        metric_fn,
        make_optimizer,
        train_data,
        test_data,
        config=args.run,
        steps=1200,
        remainder="drop",
    )
    few = test_data.gather(np.arange(24))
    trained = nn.inference_mode((run.state.model, run.state.model_state))
    logits, _ = eqxshard.filter_jit(predict)(trained, few)
    save_guesses(run.folder / "guesses.png", few, logits, args.images.names)
    return f"test accuracy {run.metrics['accuracy']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
