import equinox as eqx
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpt_generate import KVCache, generate
from gpt_model import GPT, Shape
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh

import eqxshard

pytestmark = pytest.mark.usefixtures("as_scripts_run")

SHAPE = Shape(
    layers=2, heads=4, kv_heads=2, embed=32, mlp=32, seq_len=24, vocab_size=48, tied=False
)
KEY = jax.random.key(1)


def prompts():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, SHAPE.vocab_size, (4, 6), np.int32))


@eqx.filter_jit
def sample(model, prompt, length=10, **options):
    cache = gpt.make_cache(model, len(prompt))
    return generate(model.decode, cache, prompt, length, key=KEY, **options)


@pytest.fixture(scope="module")
def model():
    model = eqx.filter_jit(GPT)(jax.random.key(0), SHAPE)
    # Larger, so that it says more than one word.
    return jax.tree.map(lambda x: 4 * x if eqx.is_inexact_array(x) else x, model)


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_without_a_cache(model):
    tokens = sample(model, prompts(), temperature=0.0)
    assert tokens.shape == (4, 16) and tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens[:, :6], prompts())
    best = jnp.argmax(eqx.filter_jit(GPT.logits)(model, tokens), axis=-1)
    np.testing.assert_array_equal(tokens[:, 6:], best[:, 5:-1])
    assert len(np.unique(np.asarray(tokens[:, 6:]))) > 4


@pytest.mark.slow
def test_the_chances_of_tokens_are_those_of_the_model():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    rows = 4000

    def draw(**options):
        prompt = jnp.zeros((rows, 1), jnp.int32)
        apply = lambda tokens, cache: (jnp.tile(logits, (rows, 1)), cache)  # noqa: E731
        sample = jax.jit(lambda: generate(apply, None, prompt, 2, key=KEY, **options))
        tokens = sample()
        assert np.any(tokens[:, 1] != tokens[:, 2])
        return np.bincount(np.asarray(tokens[:, 1:]).ravel(), minlength=4) / (2 * rows)

    np.testing.assert_allclose(draw(), [0.5, 0.3, 0.15, 0.05], atol=0.02)
    np.testing.assert_allclose(draw(top_k=2), [0.625, 0.375, 0, 0], atol=0.02)
    np.testing.assert_allclose(
        draw(top_p=0.9), np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.02
    )
    squares = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(draw(temperature=0.5), squares / squares.sum(), atol=0.02)
    np.testing.assert_allclose(draw(top_k=4, top_p=1.0), draw())


@pytest.mark.slow
def test_the_same_tokens_on_eight_devices(model):
    options = {"top_k": 20, "top_p": 0.95}
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    rule = gpt.make_rule(SHAPE)
    split = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, rule))
    prompt = jax.device_put(prompts(), NamedSharding(mesh, P(("data", "fsdp"))))
    with jax.sharding.set_mesh(mesh):
        tokens = sample(split, prompt, **options)
    np.testing.assert_array_equal(tokens, sample(model, prompts(), **options))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"length": -1}, "length=-1.* is out of range"),
        ({"temperature": -1.0}, "temperature=-1.0.* is out of range"),
        ({"top_k": 0}, "top_k=0.* is out of range"),
        ({"top_p": 0.0}, "top_p=0.0 is out of range"),
        ({"prompt": jnp.ones((4, 0), jnp.int32)}, "the prompt is empty"),
        ({"length": 20}, "a prompt of 6 tokens and 20 more do not fit a cache of 24"),
    ],
)
def test_mistakes(model, options, message):
    with pytest.raises(ValueError, match=message):
        sample(model, **{"prompt": prompts(), **options})


def test_a_cache_that_holds_tokens_already_ends_the_text():
    """Under jit, their number is not known."""
    one = jnp.ones((1, 3, 1, 4))
    taken = KVCache.empty((1, 4, 1, 4)).append(one, one)

    def apply(tokens, cache):
        new = jnp.ones((1, tokens.shape[1], 1, 4))
        cache = cache.append(new, new)
        return jnp.sum(cache.key, (1, 2)), cache

    def add(cache):
        prompt = jnp.array([[1]])
        return generate(apply, cache, prompt, 3, key=KEY, temperature=0.0)

    assert jax.jit(add)(taken).tolist() == [[1, 0, -1, -1]]
