"""eqxshard, with the model, the optimizer and the loss of `recipes/gpt.py`."""

import importlib
import sys
from functools import partial
from pathlib import Path

import jax
from _gpt_task import (
    BETAS,
    CLIP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Contestant,
    Sequences,
    Task,
)

import eqxshard


class LastLoss:
    """A tracker that keeps the mean loss since the report before."""

    def log(self, step, values):
        self.values = dict(values)

    def close(self, error=None):
        pass


def make(task: Task) -> Contestant:
    if task.devices > 1:
        jax.config.update("jax_num_cpu_devices", task.devices)
    sys.path.append(str(Path(__file__).parents[2] / "recipes"))
    recipe, model = importlib.import_module("gpt"), importlib.import_module("gpt_model")
    shape = model.Shape(**task.sizes)
    args = recipe.Args(
        learning_rate=LEARNING_RATE, beta2=BETAS[1], weight_decay=WEIGHT_DECAY, clip=CLIP
    )
    optim = recipe.make_optimizer(args, task.total)
    split = task.devices if task.axis == "fsdp" else 1
    mesh = eqxshard.make_mesh(fsdp=split, devices=jax.devices()[: task.devices])
    placed = {"mesh": mesh, "rule": recipe.make_rule(shape)}
    state = eqxshard.init_state(
        partial(model.GPT, shape=shape, remat=task.remat),
        optim,
        key=jax.random.key(0),
        precision=eqxshard.Precision(task.precision),
        load=partial(eqxshard.load_weights, task.weights) if task.weights else None,
        **placed,
    )
    train_step = eqxshard.make_train_step(recipe.loss_fn, optim, **placed)
    loader = eqxshard.Loader(
        Sequences(task), batch_size=task.batch_size, mesh=mesh, shuffle=False
    )
    tracker, done = LastLoss(), 0

    def train() -> dict[str, float]:
        nonlocal state, done
        done += task.steps
        state = eqxshard.fit(
            state, train_step, loader, steps=done, log_every=task.steps, trackers=[tracker]
        )
        return {"loss": tracker.values["train/loss"]}

    return Contestant(train)
