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

WIDTH, HEADS, DEPTH, PATCH, SIDE = 64, 4, 4, 4, 7  # 7x7 patches of 4x4 pixels.


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
        self.mlp = nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=k2)

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


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
        x = image.reshape(SIDE, PATCH, SIDE, PATCH).swapaxes(1, 2)
        x = jax.vmap(self.patches)(x.reshape(len(self.position), -1)) + self.position
        x = eqxshard.scan_layers(self.blocks, x)
        return self.logits(jax.nn.standardize(x.mean(axis=0)))


def predict(model, batch):
    return jax.vmap(model)(batch["image"] / 255)


def loss_fn(model, batch, key):
    logits = predict(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def metric_fn(model, batch):
    return {"accuracy": jnp.argmax(predict(model, batch), axis=-1) == batch["label"]}


def augment(batch, generators):
    """Crop each image after padding it by 3, and mirror every second one."""
    padded = np.pad(batch["image"], ((0, 0), (3, 3), (3, 3)))
    images = []
    for image, generator in zip(padded, generators):
        y, x = generator.integers(7, size=2)
        step = generator.choice([1, -1])
        images.append(image[y : y + 28, x : x + 28][:, ::step])
    return {**batch, "image": np.stack(images)}


def save_augmented(path, batch):
    """The images, and below each what three epochs may make of it."""
    generators = np.random.default_rng(0).spawn(12)
    rows = [augment(batch, generators)["image"] for _ in range(3)]
    save_images(path, np.stack([batch["image"], *rows]))


@dataclass(frozen=True)
class Args:
    """Train a ViT on Fashion-MNIST."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64, save_every=400)
    garments: Garments = Garments()


def main(args: Args) -> str:
    data = args.garments.load()
    run = eqxshard.train(
        ViT,
        loss_fn,
        metric_fn,
        lambda steps: optax.adamw(optax.cosine_decay_schedule(2e-3, steps)),
        *data,
        config=args.run,
        steps=1200,
        mesh="fsdp=-1",
        rule=eqxshard.fsdp(min_size=2**10),
        transform=eqxshard.data.RandomTransform(augment),
        settings=args,
    )
    few = data[1].gather(np.arange(24))
    logits = eqxshard.filter_jit(predict)(run.state.model, few)
    save_guesses(run.folder / "guesses.png", few, logits, GARMENTS)
    save_augmented(run.folder / "augmented.png", data[0].gather(np.arange(12)))
    return f"test accuracy {run.metrics['accuracy']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
