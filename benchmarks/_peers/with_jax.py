"""Hand-written JAX and optax: the baseline.

A dict of parameters, `jax.jit` with donation, batches gathered by NumPy. The last batch of
an epoch is smaller, so the step is compiled twice. Channels are last, XLA's fastest layout.
"""

from functools import partial
from typing import Any

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

Params = dict[str, dict[str, jax.Array]]


def init(key: jax.Array, conv1: int, conv2: int, kernel2: int, hidden: int) -> Params:
    shapes = {
        "conv1": (3, 3, 1, conv1),
        "conv2": (kernel2, kernel2, conv1, conv2),
        "hidden": (features(conv2, kernel2), hidden),
        "logits": (hidden, 10),
    }
    params = {}
    for (name, shape), layer_key in zip(shapes.items(), jax.random.split(key, len(shapes))):
        limit = np.prod(shape[:-1]) ** -0.5
        w_key, b_key = jax.random.split(layer_key)
        params[name] = {
            "w": jax.random.uniform(w_key, shape, minval=-limit, maxval=limit),
            "b": jax.random.uniform(b_key, shape[-1:], minval=-limit, maxval=limit),
        }
    return params


def conv(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    layouts = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", None, None, layouts) + b


def pool(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4


def losses_and_logits(params: Params, image: Any, label: Any) -> tuple[Any, Any]:
    x = (image[..., None] / 255 - MEAN) / DEVIATION
    x = pool(jax.nn.relu(conv(x, **params["conv1"])))
    x = pool(jax.nn.relu(conv(x, **params["conv2"])))
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = x @ params["logits"]["w"] + params["logits"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label), logits


def make(task: Task) -> Contestant:
    train_image, train_label = task.load("train")
    test_image, test_label = task.load("test")
    in_order = np.arange(len(test_image))
    optim = optax.adamw(LEARNING_RATE, b2=B2, weight_decay=WEIGHT_DECAY)
    params = init(jax.random.key(0), *SIZES[task.model])
    opt_state = optim.init(params)
    rng = np.random.default_rng(0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, image, label):
        def mean_loss(params):
            return losses_and_logits(params, image, label)[0].mean()

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optim.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    def measure(params, image, label):
        losses, logits = losses_and_logits(params, image, label)
        return (jnp.argmax(logits, axis=-1) == label).sum(), losses.sum()

    def train() -> None:
        nonlocal params, opt_state
        losses = []
        order = rng.permutation(len(train_image))
        for image, label in batches(train_image, train_label, task.batch_size, order):
            params, opt_state, loss = step(params, opt_state, image, label)
            losses.append(loss)
        np.mean(jax.device_get(losses))

    def evaluate() -> tuple[float, float]:
        parts = [
            measure(params, *batch)
            for batch in batches(test_image, test_label, task.batch_size, in_order)
        ]
        accuracy, loss = np.sum(jax.device_get(parts), axis=0) / len(test_image)
        return float(accuracy), float(loss)

    return Contestant(train, evaluate)
