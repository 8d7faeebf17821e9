"""A vision transformer with augmentation, split over the axis `fsdp`."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from garments import GARMENTS, Garments
from pictures import save_guesses, save_images

import eqxshard

WIDTH = 64
HEADS = 4
DEPTH = 4
# An image has 7x7 patches of 4x4 pixels.
SIDE = 7
PATCH = 4


class Block(eqx.Module):
    norm1: nn.LayerNorm
    attention: nn.MultiheadAttention
    norm2: nn.LayerNorm
    mlp: nn.MLP

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, key=k1)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.MLP(WIDTH, WIDTH, 2 * WIDTH, depth=1, activation=jax.nn.gelu, key=k2)

    def __call__(self, x):
        normed = jax.vmap(self.norm1)(x)
        x = x + self.attention(normed, normed, normed)
        normed = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.mlp)(normed)


class ViT(eqx.Module):
    patches: nn.Linear
    position: jax.Array
    blocks: Block  # Stacked: every array has a leading dim of DEPTH.
    logits: nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.patches = nn.Linear(PATCH**2, WIDTH, key=k1)
        self.position = 0.02 * jax.random.normal(k2, (SIDE**2, WIDTH))
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(k3, DEPTH))
        self.logits = nn.Linear(WIDTH, 10, key=k4)

    def __call__(self, image):
        patches = image.reshape(SIDE, PATCH, SIDE, PATCH).swapaxes(1, 2)
        patches = patches.reshape(SIDE**2, PATCH**2)
        x = jax.vmap(self.patches)(patches) + self.position
        x = eqxshard.scan_layers(self.blocks, x)
        return self.logits(jax.nn.standardize(x.mean(axis=0)))


def predict(model, batch):
    return jax.vmap(model)(batch["image"] / 255)


def augment(image, key):
    """Pad an image by 3 pixels, crop it at random, and mirror it with probability 1/2."""
    where, side = jax.random.split(key)
    corner = jax.random.randint(where, (2,), 0, 7)
    cropped = jax.lax.dynamic_slice(jnp.pad(image, 3), corner, (28, 28))
    return jnp.where(jax.random.bernoulli(side), cropped[:, ::-1], cropped)


def augment_all(images, key):
    return jax.vmap(augment)(images, jax.random.split(key, len(images)))


def loss_fn(model, batch, key):
    logits = predict(model, {"image": augment_all(batch["image"], key)})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def metric_fn(model, batch):
    guesses = jnp.argmax(predict(model, batch), axis=-1)
    return {"accuracy": guesses == batch["label"]}


def save_augmented(path, images):
    """Save the images, and below each three random crops of it."""
    epochs = [augment_all(images, key) for key in jax.random.split(jax.random.key(0), 3)]
    save_images(path, np.stack([images, *epochs]))


@dataclass(frozen=True)
class Args:
    """Train a ViT on Fashion-MNIST."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64, save_every=400)
    garments: Garments = Garments()


def main(args: Args) -> str:
    train_data, test_data = args.garments.load()
    run = eqxshard.train(
        ViT,
        loss_fn,
        metric_fn,
        lambda steps: optax.adamw(optax.cosine_decay_schedule(2e-3, steps)),
        train_data,
        test_data,
        config=args.run,
        steps=1200,
        mesh="fsdp=-1",
        rule=eqxshard.fsdp(min_size=2**10),
    )
    few = test_data.gather(np.arange(24))
    logits = eqxshard.filter_jit(predict)(run.state.model, few)
    save_guesses(run.folder / "guesses.png", few, logits, GARMENTS)
    save_augmented(run.folder / "augmented.png", train_data.gather(np.arange(12))["image"])
    return f"test accuracy {run.metrics['accuracy']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
