"""LoRA: a model from a safetensors file learns garments that lie on their side."""

from dataclasses import dataclass, replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from garments import GARMENTS, Garments
from pictures import save_guesses

import eqxshard

RENAME = {r"\.(a|b)$": None, r"\.base": ""}  # From our paths to the file's.


class LoRA(eqx.Module):
    """Hu et al. 2021, https://arxiv.org/abs/2106.09685."""

    base: nn.Linear
    a: jax.Array
    b: jax.Array

    def __init__(self, base, rank, key):
        self.base = base
        self.a = jax.random.normal(key, (rank, base.in_features)) / base.in_features**0.5
        self.b = jnp.zeros((base.out_features, rank))

    def __call__(self, x):
        return self.base(x) + self.b @ (self.a @ x)


def make_base(key):
    return nn.MLP(784, 10, 256, depth=2, key=key)


def make_adapted(rank, key):
    base, keys = make_base(key), jax.random.split(key, 3)
    layers = tuple(LoRA(layer, rank, k) for layer, k in zip(base.layers, keys))
    return eqx.tree_at(lambda model: model.layers, base, layers)


def is_adapter(path, leaf):
    return jax.tree_util.keystr(path).endswith((".a", ".b"))


def predict(model, batch):
    return jax.vmap(lambda image: model(jnp.ravel(image) / 255))(batch["image"])


def loss_fn(model, batch, key):
    logits = predict(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def metric_fn(model, batch):
    return {"accuracy": jnp.argmax(predict(model, batch), axis=-1) == batch["label"]}


def turned(source):
    """The same garments, a quarter turn to the left."""
    arrays = source.gather(np.arange(len(source)))
    arrays["image"] = np.ascontiguousarray(np.rot90(arrays["image"], axes=(1, 2)))
    return eqxshard.data.ArraySource(arrays, name=f"turned {source.name}", unit="images")


@dataclass(frozen=True)
class Args:
    """Adapt a classifier of upright garments to others, by 2 % of its parameters."""

    run: eqxshard.RunConfig = eqxshard.RunConfig()
    weights: str = "runs/lora-base/base.safetensors"
    """The classifier. If there is no such file, it is trained first."""
    rank: int = 4
    """Of the adapters."""
    garments: Garments = Garments()


def train(args, make_model, data, epochs, **options):
    functions = (make_model, loss_fn, metric_fn, lambda steps: optax.adamw(2e-3))
    return eqxshard.train(*functions, *data, epochs=epochs, settings=args, **options)


def main(args: Args) -> str:
    if args.rank < 1:
        raise ValueError(f"--rank {args.rank} is too small; use 1 or more.")
    args.run.make_mesh("data=-1")  # Simulates devices, before JAX computes anything.
    data, file = args.garments.load(), Path(args.weights)
    if not file.exists():
        config = replace(args.run, output=str(file.parent), resume="auto")
        run = train(args, make_base, data, 3, config=config, name="base")
        eqxshard.save_weights(file, run.state.model)

    def make_model(key):
        return make_adapted(args.rank, key)

    like = eqx.filter_eval_shape(make_model, jax.random.key(0))
    trainable = jax.tree_util.tree_map_with_path(is_adapter, like)
    sides = [turned(source) for source in data]
    adapting = {"trainable": trainable, "config": args.run}
    adapting["load"] = lambda like: eqxshard.load_weights(file, like, rename=RENAME)
    run = train(args, make_model, sides, 3, **adapting)
    learned = eqx.filter(run.state.model, trainable)
    eqxshard.save_weights(run.folder / "adapters.safetensors", learned)

    test, accuracy = sides[1].gather(np.arange(len(sides[1]))), {}
    without = eqx.combine(jax.tree.map(jnp.zeros_like, learned), run.state.model)
    for name, model in {"before": without, "after": run.state.model}.items():
        logits = eqxshard.filter_jit(predict)(model, test)
        accuracy[name] = np.mean(np.argmax(logits, axis=-1) == test["label"])
        save_guesses(run.folder / f"{name}.png", test, logits, GARMENTS)
    scores = ", ".join(f"{value:.4f} {name}" for name, value in accuracy.items())
    return f"test accuracy {scores} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
