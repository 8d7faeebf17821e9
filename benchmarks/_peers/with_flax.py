"""Flax NNX as in its MNIST tutorial, with Grain, which reads single examples.

https://flax.readthedocs.io/en/latest/mnist_tutorial.html. The step caches the graph of the
model with `nnx.cached_partial`, as Flax's page on performance recommends. The last batch of
an epoch is smaller, so the step is compiled twice.
"""

import importlib
from functools import partial
from typing import Any

import grain
import jax
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
    features,
)

nnx: Any = importlib.import_module("flax.nnx")


class ConvNet(nnx.Module):
    """The model of `recipes/fashion_mnist.py`, with channels last."""

    def __init__(self, conv1, conv2, kernel2, hidden, *, rngs):
        # The same initialisation as the other contestants, for comparable losses.
        init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        options = {"kernel_init": init, "rngs": rngs}
        self.conv1 = nnx.Conv(1, conv1, (3, 3), padding="VALID", **options)
        self.conv2 = nnx.Conv(conv1, conv2, (kernel2, kernel2), padding="VALID", **options)
        self.hidden = nnx.Linear(features(conv2, kernel2), hidden, **options)
        self.logits = nnx.Linear(hidden, 10, **options)

    def __call__(self, x):
        """The logits of a batch of images."""
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.logits(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def loss_fn(model, batch):
    logits = model((batch["image"][..., None] / 255 - MEAN) / DEVIATION)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), (losses, logits)


class Examples:
    """A data source for Grain."""

    def __init__(self, task: Task, split: str):
        self.image, self.label = task.load(split)

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {"image": self.image[index], "label": self.label[index]}


def make(task: Task) -> Contestant:
    model = ConvNet(*SIZES[task.model], rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.adamw(LEARNING_RATE, b2=B2, weight_decay=WEIGHT_DECAY), wrt=nnx.Param
    )
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )
    train_data, test_data = Examples(task, "train"), Examples(task, "test")
    epochs = 0

    @partial(nnx.jit, donate_argnums=(0, 1, 2))
    def train_step(model, optimizer, metrics, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (_, (losses, logits)), grads = grad_fn(model, batch)
        metrics.update(loss=losses, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    @nnx.jit
    def eval_step(model, metrics, batch):
        _, (losses, logits) = loss_fn(model, batch)
        metrics.update(loss=losses, logits=logits, labels=batch["label"])

    cached_train_step = nnx.cached_partial(train_step, model, optimizer, metrics)
    cached_eval_step = nnx.cached_partial(eval_step, model, metrics)

    def train() -> None:
        nonlocal epochs
        epochs += 1
        dataset = grain.MapDataset.source(train_data).seed(epochs).shuffle()
        for batch in dataset.batch(task.batch_size).to_iter_dataset():
            cached_train_step(batch)
        jax.device_get(metrics.compute())
        metrics.reset()

    def evaluate() -> tuple[float, float]:
        for batch in (
            grain.MapDataset.source(test_data).batch(task.batch_size).to_iter_dataset()
        ):
            cached_eval_step(batch)
        results = jax.device_get(metrics.compute())
        metrics.reset()
        return float(results["accuracy"]), float(results["loss"])

    return Contestant(train, evaluate)
