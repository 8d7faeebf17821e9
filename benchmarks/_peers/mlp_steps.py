"""For `growth.py`: training steps of an MLP, its batch split over simulated devices.

The batch is kept on the devices, so that only the steps are measured.
"""

import equinox as eqx
import jax
import numpy as np
import optax
from _task import LEARNING_RATE, MLP_STEPS, Contestant, Task

import eqxshard


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def make(task: Task) -> Contestant:
    jax.config.update("jax_num_cpu_devices", task.devices)
    mesh, rule, optim = (
        eqxshard.make_mesh(),
        eqxshard.replicate(),
        optax.adam(LEARNING_RATE),
    )
    state = eqxshard.init_state(
        lambda key: eqx.nn.MLP(784, 10, 1024, 2, key=key),
        optim,
        key=jax.random.key(0),
        mesh=mesh,
        rule=rule,
    )
    train_step = eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule)
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(task.batch_size, 784)).astype(np.float32),
        "y": rng.integers(0, 10, task.batch_size, np.int32),
    }
    batch = eqxshard.filter_shard(batch, eqxshard.batch_sharding(mesh))

    def train() -> None:
        nonlocal state
        metrics = None
        for _ in range(MLP_STEPS):
            state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)

    def evaluate() -> tuple[float, float]:
        raise NotImplementedError("mlp_steps only trains: use the command train.")

    return Contestant(train, evaluate)
