"""A mixer for diffusion, as in Equinox's example "score_based_diffusion".

Tolstikhin et al. 2021, https://arxiv.org/abs/2105.01601, as the score of Song et al. 2021,
https://arxiv.org/abs/2011.13456.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, patches, hidden, mix_patches, mix_hidden, *, key):
        key1, key2 = jax.random.split(key)
        self.patch_mixer = eqx.nn.MLP(patches, patches, mix_patches, 1, key=key1)
        self.hidden_mixer = eqx.nn.MLP(hidden, hidden, mix_hidden, 1, key=key2)
        self.norm1 = eqx.nn.LayerNorm((hidden, patches))
        self.norm2 = eqx.nn.LayerNorm((patches, hidden))

    def __call__(self, y: Float[Array, "hidden patches"]):
        y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
        return y + jax.vmap(self.hidden_mixer)(self.norm2(y.T)).T


class Mixer2d(eqx.Module):
    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    t1: float

    def __init__(
        self,
        img_size,
        patch_size,
        hidden_size,
        mix_patch_size,
        mix_hidden_size,
        num_blocks,
        t1,
        *,
        key,
    ):
        channels, height, width = img_size
        patches = (height // patch_size) * (width // patch_size)
        in_key, out_key, *keys = jax.random.split(key, 2 + num_blocks)
        kernel = {"kernel_size": patch_size, "stride": patch_size}
        self.conv_in = eqx.nn.Conv2d(channels + 1, hidden_size, **kernel, key=in_key)
        self.conv_out = eqx.nn.ConvTranspose2d(hidden_size, channels, **kernel, key=out_key)
        sizes = (patches, hidden_size, mix_patch_size, mix_hidden_size)
        self.blocks = [MixerBlock(*sizes, key=key) for key in keys]
        self.norm = eqx.nn.LayerNorm((hidden_size, patches))
        self.t1 = t1

    def __call__(self, t: Float[Array, ""], y: Float[Array, "channels height width"]):
        time = jnp.full((1, *y.shape[1:]), t / self.t1)
        y = self.conv_in(jnp.concatenate([y, time]))
        shape = y.shape
        y = y.reshape(shape[0], -1)
        for block in self.blocks:
            y = block(y)
        return self.conv_out(self.norm(y).reshape(shape))
