"""Equinox as in its own example of parallelism, with NumPy batches.

https://docs.kidger.site/equinox/examples/parallelism: `filter_jit` with donation, and
`filter_shard` inside and outside of it. The last batch of an epoch is smaller.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _task import (
    B2,
    DEVIATION,
    LEARNING_RATE,
    MEAN,
    SIZES,
    WEIGHT_DECAY,
    Contestant,
    Task,
    batches,
    features,
)


class ConvNet(eqx.Module):
    """The model of `recipes/fashion_mnist.py`."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    hidden: eqx.nn.Linear
    logits: eqx.nn.Linear

    def __init__(self, conv1, conv2, kernel2, hidden, *, key):
        keys = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(1, conv1, 3, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(conv1, conv2, kernel2, key=keys[1])
        self.hidden = eqx.nn.Linear(features(conv2, kernel2), hidden, key=keys[2])
        self.logits = eqx.nn.Linear(hidden, 10, key=keys[3])

    def __call__(self, x):
        """The logits of one image."""
        pool = eqx.nn.AvgPool2d(2, 2)
        x = pool(jax.nn.relu(self.conv1(x)))
        x = pool(jax.nn.relu(self.conv2(x)))
        return self.logits(jax.nn.relu(self.hidden(jnp.ravel(x))))


def losses_and_logits(model, image, label):
    logits = jax.vmap(model)((image[:, None] / 255 - MEAN) / DEVIATION)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label), logits


def make(task: Task) -> Contestant:
    if task.devices > 1:
        jax.config.update("jax_num_cpu_devices", task.devices)
    train_image, train_label = task.load("train")
    test_image, test_label = task.load("test")
    in_order = np.arange(len(test_image))
    mesh = jax.sharding.Mesh(jax.devices()[: task.devices], "batch")
    data_sharding = jax.NamedSharding(mesh, jax.P("batch"))
    model_sharding = jax.NamedSharding(mesh, jax.P())
    optim = optax.adamw(LEARNING_RATE, b2=B2, weight_decay=WEIGHT_DECAY)
    model = ConvNet(*SIZES[task.model], key=jax.random.key(0))
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    model, opt_state = eqx.filter_shard((model, opt_state), model_sharding)
    rng = np.random.default_rng(0)

    @eqx.filter_value_and_grad
    def loss_and_grads(model, image, label):
        return losses_and_logits(model, image, label)[0].mean()

    @eqx.filter_jit(donate="all")
    def train_step(model, opt_state, image, label):
        model, opt_state = eqx.filter_shard((model, opt_state), model_sharding)
        image, label = eqx.filter_shard((image, label), data_sharding)
        loss, grads = loss_and_grads(model, image, label)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optim.update(grads, opt_state, params)
        model = eqx.apply_updates(model, updates)
        return *eqx.filter_shard((model, opt_state), model_sharding), loss

    @eqx.filter_jit(donate="all-except-first")
    def measure(model, image, label):
        model = eqx.filter_shard(model, model_sharding)
        image, label = eqx.filter_shard((image, label), data_sharding)
        losses, logits = losses_and_logits(model, image, label)
        return (jnp.argmax(logits, axis=-1) == label).sum(), losses.sum()

    def train() -> None:
        nonlocal model, opt_state
        losses = []
        order = rng.permutation(len(train_image))
        for batch in batches(train_image, train_label, task.batch_size, order):
            image, label = eqx.filter_shard(batch, data_sharding)
            model, opt_state, loss = train_step(model, opt_state, image, label)
            losses.append(loss)
        np.mean(jax.device_get(losses))

    def evaluate() -> tuple[float, float]:
        parts = []
        for batch in batches(test_image, test_label, task.batch_size, in_order):
            image, label = eqx.filter_shard(batch, data_sharding)
            parts.append(measure(model, image, label))
        accuracy, loss = np.sum(jax.device_get(parts), axis=0) / len(test_image)
        return float(accuracy), float(loss)

    return Contestant(train, evaluate)
