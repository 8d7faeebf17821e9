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


def grow(x):
    channels, height, width = x.shape
    return jax.image.resize(jax.nn.relu(x), (channels, 2 * height, 2 * width), "linear")


def make_generator(key):
    k1, k2, k3 = jax.random.split(key, 3)
    layers = [
        nn.Linear(LATENT, 2 * WIDTH * 49, key=k1),
        nn.Lambda(lambda x: x.reshape(-1, 7, 7)),
        nn.GroupNorm(4, 2 * WIDTH),
        nn.Lambda(grow),
        nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1, key=k2),
        nn.GroupNorm(4, WIDTH),
        nn.Lambda(grow),
        nn.Conv2d(WIDTH, 1, 5, padding=2, key=k3),
        nn.Lambda(lambda x: jnp.tanh(x[0])),
    ]
    return nn.Sequential(layers)


def make_discriminator(key):
    k1, k2, k3 = jax.random.split(key, 3)
    layers = [
        nn.Lambda(lambda x: x[None]),
        nn.Conv2d(1, WIDTH, 4, 2, padding=1, key=k1),
        nn.Lambda(jax.nn.leaky_relu),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, padding=1, key=k2),
        nn.Lambda(lambda x: jnp.ravel(jax.nn.leaky_relu(x))),
        nn.Linear(2 * WIDTH * 49, "scalar", key=k3),
    ]
    return nn.Sequential(layers)


def sample(generator, key, count):
    return jax.vmap(generator)(jax.random.normal(key, (count, LATENT)))


def generator_loss(generator, batch, key, discriminator):
    fake = sample(generator, key, len(batch["image"]))
    return jax.nn.softplus(-jax.vmap(discriminator)(fake))


def discriminator_loss(discriminator, batch, key, generator):
    real, fake = batch["image"] / 127.5 - 1, sample(generator, key, len(batch["image"]))
    judge = jax.vmap(discriminator)
    return jax.nn.softplus(-judge(real)) + jax.nn.softplus(judge(fake))


LATENT, WIDTH = 32, 32
MODELS = {"generator": make_generator, "discriminator": make_discriminator}
OPTIM = optax.adam(4e-4, b1=0.5)
generator_step = eqxshard.make_train_step(generator_loss, OPTIM)
discriminator_step = eqxshard.make_train_step(discriminator_loss, OPTIM)


def step(states, batch):
    """Each model is a companion of the other's step."""
    g, d = states["generator"], states["discriminator"]
    d, d_metrics = discriminator_step(d, batch, g.model)
    g, g_metrics = generator_step(g, batch, d.model)
    metrics = eqxshard.Metrics.join(generator=g_metrics, discriminator=d_metrics)
    return {"generator": g, "discriminator": d}, metrics


@dataclass(frozen=True)
class Args:
    """Train a GAN on Fashion-MNIST."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64, steps=1500)
    garments: Garments = Garments()


def main(args: Args) -> str:
    config, mesh = args.run, args.run.make_mesh("data=-1")
    if config.profile or config.evaluate_every:
        raise ValueError("there is no --evaluate-every or --profile here; leave it out.")
    data, _ = args.garments.load()
    seed, size, hang = config.seed, config.batch_size, config.hang_seconds
    loader = eqxshard.Loader(data, batch_size=size, mesh=mesh, seed=seed)
    steps = config.steps or (config.epochs or 0) * len(loader)
    folder = eqxshard.run.RunFolder(config.output or "runs/gan")
    save_every = config.save_every or len(loader)
    saver = eqxshard.Checkpointer(folder.checkpoints, save_every=save_every)
    resumes = folder.should_resume(config.resume, saver)
    where = {"mesh": mesh, "rule": eqxshard.replicate()}
    keys = dict(zip(MODELS, jax.random.split(jax.random.key(seed))))
    init = eqxshard.init_state
    states = {n: init(m, OPTIM, key=keys[n], **where) for n, m in MODELS.items()}
    states = saver.restore(states) if resumes else states
    first = int(states["generator"].step)
    saver.claim_run(first, loader)  # Before trackers empty the files of an earlier run.
    title = f"gan on {eqxshard.describe_mesh(mesh)} | {data.name}"
    about = {"title": title, "total_steps": steps, "first": first, "services": config.track}
    trackers = folder.trackers(**about) if jax.process_index() == 0 else []
    how = {"checkpointer": saver, "trackers": trackers, "log_every": config.log_every}
    states = eqxshard.fit(states, step, loader, steps=steps, hang_seconds=hang, **how)
    draw = eqxshard.filter_jit(lambda model: sample(model, jax.random.key(1), 60))
    images = np.uint8(127.5 * (np.asarray(draw(states["generator"].model)) + 1))
    save_images(folder.path / "drawn.png", images.reshape(6, 10, 28, 28))
    return f"{steps} steps | {title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
