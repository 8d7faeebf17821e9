from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import numpy as np
import optax

import eqxshard


def make_vit(width, key):
    k1, k2, k3, *keys = jax.random.split(key, 7)
    return {
        "patch": eqx.nn.Conv2d(3, width, kernel_size=8, stride=8, key=k1),
        "position": jax.random.normal(k2, (16, width)),
        "attention": [eqx.nn.MultiheadAttention(4, width, key=k) for k in keys[:2]],
        "mlp": [eqx.nn.MLP(width, width, 4 * width, 1, key=k) for k in keys[2:]],
        "out": eqx.nn.Linear(width, 10, key=k3),
    }


@eqx.filter_vmap(in_axes=(None, 0))
def vit(net, example):
    x = net["patch"](example["image"].T / 255).reshape(-1, 16).T + net["position"]
    for attend, mlp in zip(net["attention"], net["mlp"]):
        x = jax.nn.standardize(x + attend(x, x, x))  # A layer norm without parameters.
        x = jax.nn.standardize(x + jax.vmap(mlp)(x))
    return net["out"](x.mean(axis=0))


def loss(net, batch, key):
    return optax.softmax_cross_entropy_with_integer_labels(vit(net, batch), batch["label"])


def metric(net, batch):
    return {"accuracy": vit(net, batch).argmax(axis=1) == batch["label"]}


@dataclass(frozen=True)
class Args:
    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=64)
    width: int = 64  # Features of each patch.
    rule: Literal["replicate", "fsdp"] = "replicate"  # fsdp splits over --mesh fsdp=N.


def main(args: Args) -> str:
    rng, label = np.random.default_rng(0), np.arange(1280) % 10
    raw = rng.poisson(128 * rng.random((10, 32, 32, 3))[label], (2, 1280, 32, 32, 3))
    data = [eqxshard.data.ArraySource({"image": np.uint8(x), "label": label}) for x in raw]
    rule = eqxshard.fsdp(min_size=2**10) if args.rule == "fsdp" else eqxshard.replicate()
    model, optim = lambda key: make_vit(args.width, key), lambda steps: optax.adam(1e-3)
    run = eqxshard.train(
        model, loss, metric, optim, *data, name="vit", epochs=5, rule=rule, config=args.run
    )
    return f"test accuracy {run.metrics['accuracy']:.4f} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
