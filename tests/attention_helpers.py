"""Attention by hand, and its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def with_gradients(fn):
    """The output, and the gradients of its product with another array."""

    def call(q, k, v, g):
        out, back = jax.vjp(fn, q, k, v)
        return (out, *back(g.astype(out.dtype)))

    return jax.jit(call)


def plain(
    query, key, value, *, causal=False, window=None, segments=None, offset=0, scale=None
):
    """The output, from all scores at once."""
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = np.ones(scores.shape[-2:], bool)
    if causal:
        seen = np.tri(*seen.shape, k=offset, dtype=bool)
    if window is not None:
        seen = seen & ~np.tri(*seen.shape, k=offset - window, dtype=bool)
    seen = seen[None, None]
    if segments is not None:
        segments = np.asarray(segments)
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def by_hand(arrays, **options):
    """The output, and the gradients of its product with the last array, in float64."""
    with jax.enable_x64():
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return [np.asarray(x) for x in with_gradients(partial(plain, **options))(*exact)]


def assert_close(results, expected, tolerance=1e-5):
    """Compare, relative to an array's largest element or to 1."""
    for name, result, array in zip(("out", "dq", "dk", "dv"), results, expected):
        result, array = np.asarray(result, np.float64), np.asarray(array, np.float64)
        atol = tolerance * max(np.abs(array).max(), 1)
        np.testing.assert_allclose(result, array, 0, atol, err_msg=name)
