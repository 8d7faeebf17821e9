import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxshard.nn import RotaryScaling, rotary

LLAMA = RotaryScaling(8.0, 1.0, 4.0, 8192)


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def by_hand(x, positions, theta=1e4):
    """Pairs of features as complex numbers, in float64."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    turned = np.exp(1j * positions[..., None, None] * frequencies)
    z = (x[..., :half] + 1j * x[..., half:]) * turned
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_rotates_pairs_of_features_by_their_position(theta):
    x, positions = random(2, 5, 3, 8), np.array([[0, 1, 2, 3, 4], [7, 0, 1, 300, 2]])
    out = jax.jit(lambda x, p: rotary(x, p, theta=theta))(x, positions)
    np.testing.assert_allclose(out, by_hand(x, positions, theta), atol=2e-4)
    # Exactly, where nothing turns.
    np.testing.assert_array_equal(out[0, 0], x[0, 0])


def test_under_vmap_and_in_bfloat16():
    x, positions = jnp.asarray(random(2, 5, 3, 8)), jnp.arange(10).reshape(2, 5)
    expected = rotary(x, positions)
    np.testing.assert_array_equal(jax.vmap(rotary)(x, positions), expected)
    # The angles of late positions are not rounded to bfloat16.
    late = positions + 1001
    out = rotary(x.astype(jnp.bfloat16), late)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32), by_hand(np.asarray(x), np.asarray(late)), atol=0.03
    )


def test_llama_scales_slow_pairs_alone():
    positions = jnp.arange(1, 2)

    def angles(scaling):
        x = jnp.concatenate([jnp.ones((1, 1, 64)), jnp.zeros((1, 1, 64))], axis=-1)
        out = rotary(x, positions, theta=5e5, scaling=scaling)[0, 0]
        return np.arctan2(out[64:], out[:64])

    plain, scaled = angles(None), angles(LLAMA)
    wavelength = 2 * np.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8, rtol=1e-5)
    between = scaled[~fast & ~slow] / plain[~fast & ~slow]
    assert len(between) > 0 and np.all((between > 1 / 8) & (between < 1))
    assert np.all(np.diff(between) < 0)


def test_mistakes():
    with pytest.raises(ValueError, match=r"has 3 of them; use an even head_dim"):
        rotary(jnp.ones((2, 1, 3)), jnp.arange(2))
    for numbers in ((8.0, 4.0, 1.0, 8192), (8.0, 1.0, 4.0, 0)):
        with pytest.raises(ValueError, match=r"; Llama 3\.1 has"):
            RotaryScaling(*numbers)
