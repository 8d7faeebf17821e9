"""A GAN with BatchNorm, two states over 8 devices, equals the loop that one writes by hand.

The models are those of Equinox's example "deep_convolutional_gan", for images of 8 x 8.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RULES, arrays, make_mesh
from loop_helpers import Recorder

import eqxshard

LATENTS, WIDTH, STEPS = 8, 8, 3
OPTIM = optax.adam(2e-4, b1=0.5)
#: Which model is the companion of which, in the order of their steps.
OTHERS = {"discriminator": "generator", "generator": "discriminator"}


class Layers(eqx.Module):
    layers: list

    def __call__(self, x, state):
        for layer in self.layers:
            if isinstance(layer, eqx.nn.BatchNorm):
                x, state = layer(x, state)
            else:
                x = layer(x)
        return x, state


def batch_norm(channels):
    return eqx.nn.BatchNorm(channels, axis_name="batch", mode="batch")


SCALE: Any = {"stride": 2, "padding": 1, "use_bias": False}


def make_generator(key):
    """From latents of shape (LATENTS, 1, 1) to images."""
    key1, key2 = jax.random.split(key)
    layers = [
        eqx.nn.ConvTranspose2d(LATENTS, WIDTH, 4, use_bias=False, key=key1),
        batch_norm(WIDTH),
        jax.nn.relu,
        eqx.nn.ConvTranspose2d(WIDTH, 1, 4, **SCALE, key=key2),
        jax.nn.tanh,
    ]
    return Layers(layers)


def make_discriminator(key):
    """From images to logits."""
    keys = jax.random.split(key, 3)
    layers = [
        eqx.nn.Conv2d(1, WIDTH, 4, **SCALE, key=keys[0]),
        eqx.nn.PReLU(0.2),
        eqx.nn.Conv2d(WIDTH, 2 * WIDTH, 4, **SCALE, key=keys[1]),
        batch_norm(2 * WIDTH),
        eqx.nn.PReLU(0.2),
        eqx.nn.Conv2d(2 * WIDTH, 1, 2, use_bias=False, key=keys[2]),
    ]
    return Layers(layers)


def batched(model, x, state):
    axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
    return jax.vmap(model, axis_name="batch", **axes)(x, state)


def sample(generator, count, key):
    noise = jax.random.normal(key, (count, LATENTS, 1, 1))
    return batched(generator[0], noise, generator[1])


def logits(model, images, state):
    out, state = batched(model, images, state)
    return out[:, 0, 0, 0], state


def discriminator_loss(discriminator, batch, key, generator):
    model, state = discriminator
    images = batch["image"]
    fake, state = logits(model, sample(generator, len(images), key)[0], state)
    real, state = logits(model, images, state)
    return (jax.nn.softplus(fake) + jax.nn.softplus(-real)) / 2, state


def generator_loss(generator, batch, key, discriminator):
    fake, state = sample(generator, len(batch["image"]), key)
    return jax.nn.softplus(-logits(discriminator[0], fake, discriminator[1])[0]), state


MAKE = {"generator": make_generator, "discriminator": make_discriminator}
LOSSES = {"discriminator": discriminator_loss, "generator": generator_loss}


def pair(state):
    return state.model, state.model_state


@eqx.filter_jit
def step_by_hand(loss_fn, model, model_state, opt_state, batch, key, other):
    """One step as Equinox's documentation has it: the new pair, and the loss."""

    def mean_loss(model):
        losses, new_state = loss_fn((model, model_state), batch, key, other)
        return jnp.mean(losses), new_state

    grad = eqx.filter_value_and_grad(mean_loss, has_aux=True)
    (loss, model_state), grads = grad(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = OPTIM.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), model_state, opt_state, loss


def train_by_hand(states, batches):
    """The models and their states after training in turn, and their losses by step."""
    made, keys, losses = {}, {}, []
    for name, (model, model_state, key) in states.items():
        opt_state = OPTIM.init(eqx.filter(model, eqx.is_inexact_array))
        made[name], keys[name] = (model, model_state, opt_state), key
    for number, batch in enumerate(batches):
        for name, other in OTHERS.items():
            key = jax.random.fold_in(keys[name], number)
            model, model_state, opt_state = made[name]
            *made[name], loss = step_by_hand(
                LOSSES[name], model, model_state, opt_state, batch, key, made[other][:2]
            )
            losses.append(float(loss))
    return {name: tuple(model[:2]) for name, model in made.items()}, losses


def on_one_device(tree):
    """Copies of the arrays, which stay when a step donates its own."""
    device = jax.devices()[0]
    arrays, rest = eqx.partition(tree, eqx.is_array)
    copied = jax.tree.map(lambda x: jnp.copy(jax.device_put(x, device)), arrays)
    return eqx.combine(copied, rest)


@pytest.mark.usefixtures("as_scripts_run")
def test_a_gan_with_batch_norm_equals_a_loop_by_hand():
    mesh, rule = make_mesh("data=2,fsdp=4"), RULES["fsdp"]
    images = np.tanh(np.random.default_rng(0).normal(size=(32, 1, 8, 8)))
    source = eqxshard.data.ArraySource({"image": images.astype(np.float32)})
    loader = eqxshard.Loader(source, batch_size=16, mesh=mesh, remainder="drop")
    states = {
        name: eqxshard.init_state(
            eqx.nn.make_with_state(make_model),
            OPTIM,
            key=jax.random.key(number),
            mesh=mesh,
            rule=rule,
        )
        for number, (name, make_model) in enumerate(MAKE.items())
    }
    start = on_one_device({n: (*pair(s), s.key) for n, s in states.items()})
    batches = [source.gather(loader.rows(step)) for step in range(STEPS)]
    expected, losses = train_by_hand(start, batches)
    steps = {name: eqxshard.make_train_step(loss, OPTIM) for name, loss in LOSSES.items()}

    def step(states, batch):
        states, metrics = {**states}, {}
        for name, other in OTHERS.items():
            extra = pair(states[other])
            states[name], metrics[name] = steps[name](states[name], batch, extra)
        return states, eqxshard.Metrics.join(**metrics)

    recorder = Recorder()
    options = {"steps": STEPS, "log_every": 1, "trackers": [recorder]}
    states = eqxshard.fit(states, step, loader, **options)
    found = [
        values[f"train/{name}/loss"] for _, values in recorder.lines for name in OTHERS
    ]
    np.testing.assert_allclose(found, losses, 2e-6)
    ours, theirs = arrays({n: pair(s) for n, s in states.items()}), arrays(expected)
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        # Biases have only begun to leave zero, so rounding is a larger part of them.
        off = np.linalg.norm(np.float64(ours[path]) - array)
        assert off <= 1e-4 * max(np.linalg.norm(array), 1e-30), path
