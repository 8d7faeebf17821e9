"""A GAN: two states that take their steps in turn, saved and resumed as one."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from garments import Garments
from pictures import save_images

import eqxshard
from eqxshard.training import Metrics

LATENT, WIDTH = 32, 32


def upsample(x):
    channels, height, width = x.shape
    return jax.image.resize(jax.nn.relu(x), (channels, 2 * height, 2 * width), "linear")


def make_generator(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return nn.Sequential(
        [
            nn.Linear(LATENT, 2 * WIDTH * 7 * 7, key=k1),
            nn.Lambda(lambda x: x.reshape(-1, 7, 7)),
            nn.GroupNorm(4, 2 * WIDTH),
            nn.Lambda(upsample),
            nn.Conv2d(2 * WIDTH, WIDTH, kernel_size=3, padding=1, key=k2),
            nn.GroupNorm(4, WIDTH),
            nn.Lambda(upsample),
            nn.Conv2d(WIDTH, 1, kernel_size=5, padding=2, key=k3),
            nn.Lambda(lambda x: jnp.tanh(x[0])),
        ]
    )


def make_discriminator(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return nn.Sequential(
        [
            nn.Lambda(lambda x: x[None]),
            nn.Conv2d(1, WIDTH, kernel_size=4, stride=2, padding=1, key=k1),
            nn.Lambda(jax.nn.leaky_relu),
            nn.Conv2d(WIDTH, 2 * WIDTH, kernel_size=4, stride=2, padding=1, key=k2),
            nn.Lambda(jax.nn.leaky_relu),
            nn.Lambda(jnp.ravel),
            nn.Linear(2 * WIDTH * 7 * 7, "scalar", key=k3),
        ]
    )


def generate(generator, key, count):
    noise = jax.random.normal(key, (count, LATENT))
    return jax.vmap(generator)(noise)


def generator_loss(generator, batch, key, discriminator):
    fake = generate(generator, key, len(batch["image"]))
    return jax.nn.softplus(-jax.vmap(discriminator)(fake))


def discriminator_loss(discriminator, batch, key, generator):
    real = batch["image"] / 127.5 - 1
    fake = generate(generator, key, len(real))
    loss_of_real = jax.nn.softplus(-jax.vmap(discriminator)(real))
    loss_of_fake = jax.nn.softplus(jax.vmap(discriminator)(fake))
    return loss_of_real + loss_of_fake


OPTIM = optax.adam(4e-4, b1=0.5)
train_generator = eqxshard.make_train_step(generator_loss, OPTIM)
train_discriminator = eqxshard.make_train_step(discriminator_loss, OPTIM)


def train_step(states, batch):
    """Take a step of each model; its loss function also gets the other model."""
    generator, discriminator = states["generator"], states["discriminator"]
    discriminator, discriminator_metrics = train_discriminator(
        discriminator, batch, generator.model
    )
    generator, generator_metrics = train_generator(generator, batch, discriminator.model)
    metrics = Metrics.join(generator=generator_metrics, discriminator=discriminator_metrics)
    return {"generator": generator, "discriminator": discriminator}, metrics


@dataclass(frozen=True)
class Args:
    """Train a GAN on Fashion-MNIST."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64)
    garments: Garments = Garments()


def main(args: Args) -> str:
    train_data, _ = args.garments.load()
    run = eqxshard.train(
        make_model={"generator": make_generator, "discriminator": make_discriminator},
        make_optim=OPTIM,
        train_step=train_step,
        train_data=train_data,
        loss_fn=None,
        metric_fn=None,
        eval_data=None,
        config=args.run,
        steps=1500,
    )

    @eqxshard.filter_jit
    def draw(generator):
        return generate(generator, jax.random.key(1), 60)

    images = np.asarray(draw(run.state["generator"].model))
    pixels = np.uint8(127.5 * (images + 1))
    save_images(run.folder / "drawn.png", pixels.reshape(6, 10, 28, 28))
    return f"{int(run.state['generator'].step)} steps | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
