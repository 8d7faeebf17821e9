"""eqxshard, with the model and the loss of `recipes/fashion_mnist.py`.

The last batch of an epoch is padded with rows of weight 0, so the step is compiled once.
With the variant `device`, the images are kept on the devices and batches are gathered
there.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from _task import B2, LEARNING_RATE, SIZES, WEIGHT_DECAY, Contestant, Task

import eqxshard


def make(task: Task) -> Contestant:
    if task.devices > 1:
        jax.config.update("jax_num_cpu_devices", task.devices)
    sys.path.append(str(Path(__file__).parents[2] / "recipes"))
    recipe = importlib.import_module("fashion_mnist")

    def make_model(key):
        return recipe.ConvNet(*SIZES[task.model], key=key)

    mesh = eqxshard.make_mesh(devices=jax.devices()[: task.devices])
    rule = eqxshard.replicate()
    optim = optax.adamw(LEARNING_RATE, b2=B2, weight_decay=WEIGHT_DECAY)
    state = eqxshard.init_state(
        make_model, optim, key=jax.random.key(0), mesh=mesh, rule=rule
    )
    train_step = eqxshard.make_train_step(recipe.loss_fn, optim, mesh=mesh, rule=rule)
    eval_step = eqxshard.make_eval_step(recipe.metric_fn, mesh=mesh, rule=rule)
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
