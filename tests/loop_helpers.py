"""Small runs of `fit` for tests of how runs end."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import copied, lenient, make_mesh

import eqxshard

OPTIM = lenient(optax.sgd(0.01))
ROWS = 48


class Layers(eqx.Module):
    """Three layers."""

    layers: list[eqx.nn.Linear]
    power: float = eqx.field(static=True, default=1.0)

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        sizes = ((4, 8), (8, 8), (8, 1))
        self.layers = [eqx.nn.Linear(*size, key=k) for size, k in zip(sizes, keys)]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x[0]


def loss_fn(model, batch, key):
    """The squares of what the model returns."""
    return jax.vmap(model)(batch["x"]) ** 2


def nan_loss(model, batch, key):
    """NaN, from numbers that are finite."""
    return jnp.log(-1 - loss_fn(model, batch, key))


def make_loader(bad=None, batch_size=8, **options):
    """Batches of 8 examples in order, of which some are NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    if bad is not None:
        x[bad] = np.nan
    source = eqxshard.data.ArraySource({"x": x})
    options = {"batch_size": batch_size, "mesh": make_mesh(), "shuffle": False, **options}
    return eqxshard.Loader(source, **options)


def make(make_model: Any = Layers, loss_fn: Any = loss_fn):
    """A state, and a step that is not compiled yet, on eight devices."""
    where: dict[str, Any] = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(make_model, OPTIM, key=jax.random.key(0), **where)
    return state, eqxshard.make_train_step(loss_fn, OPTIM, **where)


make_once = functools.cache(make)


def fresh(make_model: Any = Layers, loss_fn: Any = loss_fn):
    """A state, and the same step each time, which compiles once."""
    state, step = make_once(make_model, loss_fn)
    return copied(state), step


def run(folder, loader, make_model: Any = Layers, loss_fn: Any = loss_fn, **options):
    """Train from the start; save each step, if there is a folder."""
    state, step = fresh(make_model, loss_fn)
    checkpointer = None
    if folder is not None:
        checkpointer = eqxshard.Checkpointer(folder, save_every=1)
    return eqxshard.fit(state, step, loader, checkpointer=checkpointer, **options)


class Recorder:
    """A tracker that keeps what is reported."""

    def __init__(self):
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed: list[BaseException | None] = []

    def log(self, step, values):
        self.lines.append((step, dict(values)))

    def close(self, error=None):
        self.closed.append(error)

    def steps(self, name):
        """The steps whose reports have an entry."""
        return [step for step, values in self.lines if name in values]


def count_dispatched(monkeypatch) -> list[int]:
    """Collects how many steps each dispatch of a resident dataset takes."""
    taken: list[int] = []
    stacked = eqxshard.Loader.stacked

    def count(self, steps, **room):
        taken.append(steps)
        return stacked(self, steps, **room)

    monkeypatch.setattr(eqxshard.Loader, "stacked", count)
    return taken
