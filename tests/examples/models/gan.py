"""A convolutional GAN, as in Equinox's example "deep_convolutional_gan", for 8x8 images.

Radford et al. 2015, https://arxiv.org/abs/1511.06434.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float


def batch_norm(channels):
    return eqx.nn.BatchNorm(channels, axis_name="batch", mode="batch")


class Layers(eqx.Module):
    layers: list

    def __call__(self, x: Float[Array, "_ _ _"], state: eqx.nn.State):
        for layer in self.layers:
            if isinstance(layer, eqx.nn.BatchNorm):
                x, state = layer(x, state)
            else:
                x = layer(x)
        return x, state


def generator(latent_size, width, key):
    """From latents of shape (latent_size, 1, 1) to images."""
    key1, key2 = jax.random.split(key)
    scale = {"stride": 2, "padding": 1, "use_bias": False}
    layers = [
        eqx.nn.ConvTranspose2d(latent_size, width, 4, use_bias=False, key=key1),
        batch_norm(width),
        jax.nn.relu,
        eqx.nn.ConvTranspose2d(width, 1, 4, **scale, key=key2),
        jax.nn.tanh,
    ]
    return Layers(layers)


def discriminator(width, key):
    """From images to logits."""
    keys = jax.random.split(key, 3)
    scale = {"stride": 2, "padding": 1, "use_bias": False}
    layers = [
        eqx.nn.Conv2d(1, width, 4, **scale, key=keys[0]),
        eqx.nn.PReLU(0.2),
        eqx.nn.Conv2d(width, 2 * width, 4, **scale, key=keys[1]),
        batch_norm(2 * width),
        eqx.nn.PReLU(0.2),
        eqx.nn.Conv2d(2 * width, 1, 2, use_bias=False, key=keys[2]),
    ]
    return Layers(layers)
