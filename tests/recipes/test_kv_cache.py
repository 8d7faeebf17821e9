import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpt_generate import KVCache

from eqxshard.nn import attention


def random(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_appends_after_what_is_there():
    key, value = random(2, 3, 5, 4, 8)
    cache, append = KVCache.empty((3, 6, 4, 8)), jax.jit(KVCache.append)
    for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
        cache = append(cache, key[:, part], value[:, part])
    assert cache.length == 5 and cache.capacity == 6
    np.testing.assert_array_equal(cache.key[:, :5], key)
    np.testing.assert_array_equal(cache.value[:, :5], value)
    assert not np.any(cache.key[:, 5:])


def test_a_full_cache_is_an_error_or_nan_but_never_written_over():
    one = random(2, 1, 1, 2, 8)
    full = KVCache.empty((1, 2, 2, 8)).append(*one).append(*one)
    assert np.all(full.key == one[0]) and full.length == 2
    with pytest.raises(ValueError, match=r"do not fit a cache of .* 2 positions .*; make"):
        full.append(*one)
    two = jnp.concatenate([one, one], 2)
    with pytest.raises(ValueError, match="with 1 positions taken"):
        KVCache.empty((1, 2, 2, 8)).append(*one).append(*two)

    @jax.jit
    def decode(cache, key, value):
        cache = cache.append(key, value)
        return cache, attention(key, cache.key, cache.value, causal=True, offset=1)

    for cache in (full, decode(full, *one)[0]):
        _, out = decode(cache, *one)
        assert np.all(np.isnan(out))
    _, out = decode(KVCache.empty((1, 2, 2, 8)).append(*one), *one)
    np.testing.assert_allclose(out, one[1], rtol=1e-6)


def test_mistakes():
    with pytest.raises(ValueError, match=r"the shape \(6, 4, 8\) has too few dims"):
        KVCache.empty((6, 4, 8))
    cache = KVCache.empty((3, 6, 4, 8))
    for shape in ((3, 7, 4, 8), (2, 1, 4, 8), (3, 1, 2, 8)):
        with pytest.raises(ValueError, match=r"do not fit a cache of \(3, 6, 4, 8\)"):
            cache.append(*random(2, *shape))
    with pytest.raises(ValueError, match=r"do not fit a cache of \(2, 3, 6, 4, 8\)"):
        KVCache.empty((2, 3, 6, 4, 8)).append(*random(2, 3, 1, 4, 8))
