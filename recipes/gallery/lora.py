"""LoRA: a model from a safetensors file learns garments that lie on their side."""

import dataclasses
from dataclasses import dataclass
from functools import partial
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

# From paths in the model to names in the file, which has no adapters.
RENAME = {r"\.(a|b)$": None, r"\.base": ""}


class LoRA(eqx.Module):
    """A layer with an adapter: Hu et al. 2021, https://arxiv.org/abs/2106.09685."""

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
    base = make_base(key)
    keys = jax.random.split(key, len(base.layers))
    adapted = tuple(LoRA(layer, rank, k) for layer, k in zip(base.layers, keys))
    return eqx.tree_at(lambda model: model.layers, base, adapted)


def is_adapter(path, leaf):
    return jax.tree_util.keystr(path).endswith((".a", ".b"))


def predict(model, batch):
    return jax.vmap(lambda image: model(jnp.ravel(image) / 255))(batch["image"])


def loss_fn(model, batch, key):
    logits = predict(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def metric_fn(model, batch):
    guesses = jnp.argmax(predict(model, batch), axis=-1)
    return {"accuracy": guesses == batch["label"]}


def turned(source):
    """The same garments, a quarter turn to the left."""
    arrays = source.gather(np.arange(len(source)))
    arrays["image"] = np.ascontiguousarray(np.rot90(arrays["image"], axes=(1, 2)))
    return eqxshard.data.ArraySource(arrays, name=f"turned {source.name}", unit="images")


@dataclass(frozen=True)
class Args:
    """Adapt a classifier of upright garments to turned ones, by 2 % of its parameters."""

    run: eqxshard.RunConfig = eqxshard.RunConfig()
    weights: str = "runs/lora-base/base.safetensors"
    """The classifier. If there is no such file, it is trained first."""
    rank: int = 4
    """The rank of the adapters."""
    garments: Garments = Garments()


def train_base(args, file, train_data, test_data):
    run = eqxshard.train(
        make_base,
        loss_fn,
        metric_fn,
        optax.adamw(2e-3),
        train_data,
        test_data,
        config=dataclasses.replace(
            args.run, output=str(file.parent), resume="auto", overwrite=False
        ),
        name="base",
        epochs=3,
    )
    eqxshard.save_weights(file, run.state.model)


def show(path, model, test):
    """Draw a model's guesses for the test images; return its accuracy."""
    logits = eqxshard.filter_jit(predict)(model, test)
    save_guesses(path, test, logits, GARMENTS)
    return np.mean(np.argmax(logits, axis=-1) == test["label"])


def main(args: Args) -> str:
    if args.rank < 1:
        raise eqxshard.UsageError(f"--rank {args.rank} is too small; use 1 or more.")
    train_data, test_data = args.garments.load()
    file = Path(args.weights)
    if not file.exists():
        train_base(args, file, train_data, test_data)

    make_model = partial(make_adapted, args.rank)
    # The key is made inside, so that JAX does not look for devices before `train`.
    like = eqx.filter_eval_shape(lambda: make_model(jax.random.key(0)))
    trainable = jax.tree_util.tree_map_with_path(is_adapter, like)
    turned_test_data = turned(test_data)
    run = eqxshard.train(
        make_model,
        loss_fn,
        metric_fn,
        optax.adamw(2e-3),
        turned(train_data),
        turned_test_data,
        config=args.run,
        epochs=3,
        trainable=trainable,
        load=lambda like: eqxshard.load_weights(file, like, rename=RENAME),
    )
    adapted = run.state.model
    adapters = eqx.filter(adapted, trainable)
    eqxshard.save_weights(run.folder / "adapters.safetensors", adapters)

    # Adapters of zeros change nothing.
    unadapted = eqx.combine(jax.tree.map(jnp.zeros_like, adapters), adapted)
    test = turned_test_data.gather(np.arange(len(turned_test_data)))
    before = show(run.folder / "before.png", unadapted, test)
    after = show(run.folder / "after.png", adapted, test)
    return f"test accuracy {before:.4f} before, {after:.4f} after | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
