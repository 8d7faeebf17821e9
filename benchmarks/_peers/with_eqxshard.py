"""eqxshard, with the model and the loss of `with_equinox.py`, unchanged.

The last batch of an epoch is padded with rows of weight 0, so the step is compiled once.
With the variant `device`, the images are kept on the devices and batches are gathered
there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from _task import B2, LEARNING_RATE, SIZES, WEIGHT_DECAY, Contestant, Task
from with_equinox import ConvNet, losses_and_logits

import eqxshard


def loss_fn(model, batch, key):
    return losses_and_logits(model, batch["image"], batch["label"])[0]


def metric_fn(model, batch):
    losses, logits = losses_and_logits(model, batch["image"], batch["label"])
    return {"accuracy": jnp.argmax(logits, axis=-1) == batch["label"], "loss": losses}


def make(task: Task) -> Contestant:
    if task.devices > 1:
        jax.config.update("jax_num_cpu_devices", task.devices)

    def make_model(key):
        return ConvNet(*SIZES[task.model], key=key)

    mesh = eqxshard.make_mesh(devices=jax.devices()[: task.devices])
    rule = eqxshard.replicate()
    optim = optax.adamw(LEARNING_RATE, b2=B2, weight_decay=WEIGHT_DECAY)
    state = eqxshard.init_state(
        make_model, optim, key=jax.random.key(0), mesh=mesh, rule=rule
    )
    train_step = eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule)
    eval_step = eqxshard.make_eval_step(metric_fn, mesh=mesh, rule=rule)
    placement: dict[str, Any] = {"placement": task.variant} if task.variant else {}
    settings = {"batch_size": task.batch_size, "mesh": mesh, **placement}
    loader = eqxshard.Loader(source(task, "train"), **settings)
    test = eqxshard.Loader(source(task, "test"), shuffle=False, **settings)
    epochs = 0

    def train() -> None:
        nonlocal state, epochs
        epochs += 1
        state = eqxshard.fit(state, train_step, loader, epochs=epochs)

    def evaluate() -> tuple[float, float]:
        metrics = eqxshard.evaluate(state.model, eval_step, test)
        return metrics["accuracy"], metrics["loss"]

    return Contestant(train, evaluate)


def source(task: Task, split: str) -> eqxshard.data.ArraySource:
    image, label = task.load(split)
    return eqxshard.data.ArraySource({"image": image, "label": label})
