"""The models of Equinox's documentation, and how its examples train them.

The models in `examples/models` have the layers and the constructors of Equinox's, but are
written anew.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

MODELS = Path(__file__).parent / "examples" / "models"


def load_file(file: str) -> Any:
    """What a file of `examples/models` defines, as attributes."""
    return execute(MODELS / file)


def execute(path: Path) -> Any:
    """What a script defines, as attributes, without what it does as `__main__`."""
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


class Example(NamedTuple):
    """A model of Equinox's documentation, and how it is trained there.

    - `file`: of the model.
    - `make`: `make(models, key)`; `loss_fn`: `loss_fn(model, batch, key)`, one loss per
        example; `optim`: the example's own.
    - `data`: `data(rng)`, arrays of `EXAMPLES` rows by name.
    """

    file: str
    make: Callable[[Any, Any], Any]
    loss_fn: Callable[[Any, Any, Any], Any]
    optim: optax.GradientTransformation
    data: Callable[[np.random.Generator], dict[str, Any]]


EXAMPLES = 32


def normal(rng, *shape):
    return rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)


def integers(rng, stop, *shape, start=0):
    return rng.integers(start, stop, size=(EXAMPLES, *shape), dtype=np.int32)


def cross_entropy(model, batch, key):
    log_probs = jax.vmap(model)(batch["image"])
    return -jnp.take_along_axis(log_probs, batch["label"][:, None], axis=1)[:, 0]


def binary_cross_entropy(model, batch, key):
    p, y = jax.vmap(model)(batch["x"]), batch["y"]
    return -jnp.mean(y * jnp.log(p) + (1 - y) * jnp.log(1 - p), axis=-1)


def stateful_squares(model_and_state, batch, key):
    model, state = model_and_state
    axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
    out, state = jax.vmap(model, axis_name="batch", **axes)(batch["x"], state)
    return jnp.mean((out - batch["y"]) ** 2, axis=-1), state


def spirals(rng):
    """Clockwise and anticlockwise ones."""
    t = np.linspace(0, 2 * np.pi, 16)
    offset = rng.uniform(0, 2 * np.pi, size=(EXAMPLES, 1))
    y = np.arange(EXAMPLES)[:, None] % 2
    x = np.stack([np.sin(t + offset) * (2 * y - 1), np.cos(t + offset)], axis=-1)
    return {"x": np.float32(x / (1 + t[:, None])), "y": np.float32(y)}


def stateful_data(rng):
    x = normal(rng, 3)
    return {"x": x, "y": np.sin(x) + 1}


def images(*shape):
    return lambda rng: {"image": normal(rng, *shape), "label": integers(rng, 10)}


MODELS_OF_EQUINOX = {
    "mnist": Example(
        "cnn.py",
        lambda models, key: models.CNN(key),
        cross_entropy,
        optax.adamw(3e-4),
        images(1, 28, 28),
    ),
    "rnn": Example(
        "rnn.py",
        lambda models, key: models.RNN(2, 1, 16, key=key),
        binary_cross_entropy,
        optax.adam(3e-3),
        spirals,
    ),
    "stateful": Example(
        "stateful.py",
        lambda models, key: eqx.nn.make_with_state(models.Model)(key),
        stateful_squares,
        optax.adam(3e-4),
        stateful_data,
    ),
}
