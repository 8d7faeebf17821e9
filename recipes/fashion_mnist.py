"""Train a small classifier on Fashion-MNIST, on whatever devices there are."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import nn

import eqxshard


class ConvNet(eqx.Module):
    """Two convolutions and two dense layers: by default, LeNet."""

    conv1: nn.Conv2d
    conv2: nn.Conv2d
    # The annotations name the dims, for rules such as tensor parallelism's.
    hidden: Annotated[nn.Linear, "mlp features"]
    logits: Annotated[nn.Linear, "classes mlp"]

    def __init__(self, key, channels=(20, 50), kernel=5, hidden=128):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.conv1 = nn.Conv2d(1, channels[0], kernel_size=3, key=k1)
        self.conv2 = nn.Conv2d(*channels, kernel_size=kernel, key=k2)
        # Images of 28x28 pixels are 13x13 after the first convolution and its pooling.
        side = (13 - kernel + 1) // 2
        self.hidden = nn.Linear(channels[1] * side**2, hidden, key=k3)
        self.logits = nn.Linear(hidden, 10, key=k4)

    def __call__(self, x):
        pool = nn.AvgPool2d(kernel_size=2, stride=2)
        x = pool(jax.nn.relu(self.conv1(x)))
        x = pool(jax.nn.relu(self.conv2(x)))
        x = jax.nn.relu(self.hidden(jnp.ravel(x)))
        return self.logits(x)


def predict(model, batch):
    # Images stay bytes until they are on the devices.
    pixels = (batch["image"][:, None] / 255 - 0.2860) / 0.3530
    return jax.vmap(model)(pixels)


def loss_fn(model, batch, key):
    logits = predict(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def metric_fn(model, batch):
    correct = jnp.argmax(predict(model, batch), axis=-1) == batch["label"]
    return {"accuracy": correct, "loss": loss_fn(model, batch, None)}


# The options: other models, ways to split them, and optimizers.


class MLP(eqx.Module):
    hidden1: Annotated[nn.Linear, "mlp pixels"]
    hidden2: Annotated[nn.Linear, "features mlp"]
    logits: Annotated[nn.Linear, "classes features"]

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.hidden1 = nn.Linear(784, 256, key=k1)
        self.hidden2 = nn.Linear(256, 128, key=k2)
        self.logits = nn.Linear(128, 10, key=k3)

    def __call__(self, x):
        x = jax.nn.relu(self.hidden1(jnp.ravel(x)))
        x = jax.nn.relu(self.hidden2(x))
        return self.logits(x)


# The name of the run, the model, and the epochs to train it for.
MODELS = {
    "lenet": ("LeNet", ConvNet, 10),
    "cnn": ("CNN", partial(ConvNet, channels=(32, 64), kernel=3, hidden=256), 5),
    "mlp": ("MLP", MLP, 10),
}
TENSOR = eqxshard.by_dim({"mlp": "tensor"})
# A mesh and a rule.
RULES = {
    "replicate": ("data=-1", eqxshard.replicate()),
    "fsdp": ("fsdp=-1", eqxshard.fsdp(min_size=2**10)),
    "tensor": ("tensor=-1", eqxshard.combine(TENSOR, eqxshard.replicate())),
}


@dataclass(frozen=True)
class Args:
    """Train a small classifier on Fashion-MNIST: by default LeNet, on all devices."""

    run: eqxshard.RunConfig = eqxshard.RunConfig()
    model: Literal["lenet", "cnn", "mlp"] = "lenet"
    """The model. lenet and mlp train for 10 epochs by default, cnn for 5."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    """Its learning rate rises over a twentieth of the steps, then falls to a hundredth."""
    learning_rate: Annotated[float | None, eqxshard.run.default("0.005; sgd: 0.05")] = None
    """The highest learning rate."""
    rule: Literal["replicate", "fsdp", "tensor"] = "replicate"
    """Keep parameters whole on each device, or split them over the axis fsdp or tensor."""
    data: Literal["auto", "fashion_mnist", "synthetic"] = "auto"
    """auto: the real images or, if they cannot be downloaded, generated ones."""
    data_dir: Annotated[str | None, eqxshard.run.default("$EQXSHARD_DATA_DIR")] = None
    """The folder that has fashion_mnist in it, or will have it after the download."""


def make_optimizer(args, steps):
    peak = args.learning_rate
    if peak is None:
        peak = 0.05 if args.optimizer == "sgd" else 0.005
    if not 0 < peak < float("inf"):
        raise eqxshard.UsageError(
            f"--learning-rate {peak} is not positive and finite; use another."
        )
    warm_up = steps // 20
    rise = optax.linear_schedule(0.0, peak, warm_up)
    fall = optax.linear_schedule(peak, peak / 100, steps - warm_up)
    schedule = optax.join_schedules([rise, fall], boundaries=[warm_up])
    if args.optimizer == "sgd":
        return optax.sgd(schedule, momentum=0.9, nesterov=True)
    if args.optimizer == "adam":
        return optax.adam(schedule, b2=0.98)
    return optax.adamw(schedule, b2=0.98, weight_decay=0.01)


def main(args: Args) -> str:
    train_data, test_data = eqxshard.data.load_fashion_mnist(
        args.data, data_dir=args.data_dir
    )
    name, make_model, epochs = MODELS[args.model]
    mesh, rule = RULES[args.rule]
    run = eqxshard.train(
        make_model,
        loss_fn,
        metric_fn,
        partial(make_optimizer, args),
        train_data,
        test_data,
        config=args.run,
        name=name,
        epochs=epochs,
        mesh=mesh,
        rule=rule,
        best="eval/accuracy",
    )
    return f"test accuracy {run.metrics['accuracy']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
