import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient

import eqxshard
from eqxshard.data import synthetic_fashion


@pytest.fixture(scope="module")
def train():
    return synthetic_fashion("train", size=5_000)


def test_images_are_like_those_of_fashion_mnist(train):
    image, label = train.arrays["image"], train.arrays["label"]
    assert image.shape == (5_000, 28, 28) and image.dtype == np.uint8
    assert label.dtype == np.int32 and len(set(label[:100])) == 10
    np.testing.assert_array_equal(np.bincount(label), [500] * 10)
    assert image.min() == 0 and image.max() == 255
    assert len(synthetic_fashion("test")) == 10_000


def test_the_seed_and_the_split_decide():
    pairs = [("train", 1), ("train", 1), ("train", 2), ("test", 1)]
    first, again, *others = (
        synthetic_fashion(split, seed=seed, size=23).arrays for split, seed in pairs
    )
    np.testing.assert_array_equal(first["image"], again["image"])
    np.testing.assert_array_equal(first["label"], again["label"])
    assert all((first["image"] != other["image"]).any() for other in others)


class CNN(eqx.Module):
    conv: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 8, 5, stride=3, key=k1)
        self.head = eqx.nn.Linear(8 * 8 * 8, 10, key=k2)

    def __call__(self, image):
        x = image[None].astype(jnp.float32) / 255
        return self.head(jax.nn.relu(self.conv(x)).reshape(-1))


def test_a_small_cnn_learns_them_but_not_perfectly(train):
    def losses(model, batch, key):
        logits = jax.vmap(model)(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def hits(model, batch):
        logits = jax.vmap(model)(batch["image"])
        return {"accuracy": jnp.argmax(logits, axis=-1) == batch["label"]}

    optim, rule = lenient(optax.adam(3e-3)), eqxshard.replicate()
    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    made = {"mesh": mesh, "rule": rule}
    state = eqxshard.init_state(CNN, optim, key=jax.random.key(0), **made)
    loader = eqxshard.Loader(train, batch_size=100, mesh=mesh)
    step = eqxshard.make_train_step(losses, optim, **made)
    state = eqxshard.fit(state, step, loader, epochs=2)
    test = synthetic_fashion("test", size=1_000)
    tests = eqxshard.Loader(test, batch_size=500, mesh=mesh, shuffle=False)
    values = eqxshard.evaluate(state.model, eqxshard.make_eval_step(hits, **made), tests)
    assert 0.6 < values["accuracy"] < 0.99


def test_mistakes_are_errors():
    with pytest.raises(ValueError, match="split='validation' is not 'train' or 'test'"):
        synthetic_fashion("validation")
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        synthetic_fashion("train", size=0)
