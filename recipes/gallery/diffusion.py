"""A diffusion model that draws garments: flow matching, with an average of the weights."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from garments import Garments
from pictures import save_images

import eqxshard

# An image has 7x7 patches of 4x4 pixels.
PATCH = 4
TOKENS = 49
WIDTH = 96
DEPTH = 4
# How many garments of each kind to draw, and in how many steps.
ROWS = 6
STEPS = 50


class Block(eqx.Module):
    """A mixer, scaled and shifted depending on the time and the kind of garment."""

    tokens: nn.MLP
    features: nn.MLP
    condition: nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.tokens = nn.MLP(
            TOKENS, TOKENS, 2 * TOKENS, depth=1, activation=jax.nn.gelu, key=k1
        )
        self.features = nn.MLP(
            WIDTH, WIDTH, 2 * WIDTH, depth=1, activation=jax.nn.gelu, key=k2
        )
        self.condition = nn.Linear(WIDTH, 2 * WIDTH, key=k3)

    def __call__(self, x, condition):
        scale, shift = jnp.split(self.condition(condition), 2)
        normed = jax.nn.standardize(x) * (1 + scale) + shift
        x = x + jax.vmap(self.tokens)(normed.T).T
        return x + jax.vmap(self.features)(jax.nn.standardize(x))


class Flow(eqx.Module):
    """Predicts how an image should change, at a time from noise (0) to a garment (1)."""

    patches: nn.Linear
    position: jax.Array
    kinds: nn.Embedding
    time: nn.MLP
    blocks: Block  # Stacked: every array has a leading dim of DEPTH.
    out: nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4, k5, k6 = jax.random.split(key, 6)
        self.patches = nn.Linear(PATCH**2, WIDTH, key=k1)
        self.position = 0.1 * jax.random.normal(k2, (TOKENS, WIDTH))
        self.kinds = nn.Embedding(10, WIDTH, key=k3)
        self.time = nn.MLP("scalar", WIDTH, WIDTH, depth=1, activation=jax.nn.silu, key=k4)
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(k5, DEPTH))
        self.out = nn.Linear(WIDTH, PATCH**2, key=k6)

    def __call__(self, image, time, kind):
        patches = image.reshape(7, PATCH, 7, PATCH).swapaxes(1, 2)
        x = jax.vmap(self.patches)(patches.reshape(TOKENS, PATCH**2)) + self.position
        condition = self.time(time) + self.kinds(kind)
        x = eqxshard.scan_layers(self.blocks, x, condition, remat="none")
        patches = jax.vmap(self.out)(x).reshape(7, 7, PATCH, PATCH)
        return patches.swapaxes(1, 2).reshape(28, 28)


def loss_fn(model, batch, key):
    images = batch["image"] / 127.5 - 1
    noise_key, time_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, images.shape)
    time = jax.nn.sigmoid(jax.random.normal(time_key, (len(images), 1, 1)))
    mixed = time * images + (1 - time) * noise
    flow = jax.vmap(model)(mixed, time[:, 0, 0], batch["label"])
    return jnp.mean((flow - (images - noise)) ** 2, axis=(1, 2))


def metric_fn(model, batch):
    return {"loss": loss_fn(model, batch, jax.random.key(0))}


@eqxshard.filter_jit
def draw(model, key):
    kinds = jnp.tile(jnp.arange(10), ROWS)

    def step(images, time):
        flow = jax.vmap(model, in_axes=(0, None, 0))(images, time, kinds)
        return images + flow / STEPS, None

    noise = jax.random.normal(key, (len(kinds), 28, 28))
    times = jnp.arange(STEPS) / STEPS
    images, _ = jax.lax.scan(step, noise, times)
    pixels = jnp.uint8(jnp.clip(127.5 * (images + 1), 0, 255))
    return pixels.reshape(ROWS, 10, 28, 28)


def make_optimizer(steps):
    adam = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    return optax.chain(adam, eqxshard.ema_weights(0.99))


@dataclass(frozen=True)
class Args:
    """Learn to draw the garments of Fashion-MNIST."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64)
    garments: Garments = Garments()


def main(args: Args) -> str:
    train_data, test_data = args.garments.load()
    run = eqxshard.train(
        Flow,
        loss_fn,
        metric_fn,
        make_optimizer,
        train_data,
        test_data,
        config=args.run,
        epochs=1,
    )
    images = draw(eqxshard.ema_model(run.state), jax.random.key(args.run.seed))
    save_images(run.folder / "drawn.png", np.asarray(images))
    return f"test loss {run.metrics['loss']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
