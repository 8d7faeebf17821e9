"""Shared by many tests: tiny models, made-up batches, optimizers under strict types."""

import contextlib
import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxshard

#: Where the real Fashion-MNIST is; read before tests on made-up files hide it.
REAL = os.environ.get("EQXSHARD_DATA_DIR")
needs_real_data = pytest.mark.skipif(
    not REAL, reason="$EQXSHARD_DATA_DIR does not say where Fashion-MNIST is"
)
#: Marks tests of features that JAX 0.10.1 lacks.
needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="it needs JAX 0.10.2 or newer"
)

#: By name: sizes of mesh axes and the number of devices they need.
MESHES: dict[str, tuple[dict[str, Any], int]] = {
    "data=1": ({"data": 1}, 1),
    "data=2": ({"data": 2}, 2),
    "data=4": ({"data": 4}, 4),
    "data=8": ({"data": 8}, 8),
    "fsdp=2": ({"data": 1, "fsdp": 2}, 2),
    "fsdp=8": ({"data": 1, "fsdp": 8}, 8),
    "data=2,fsdp=2": ({"data": 2, "fsdp": 2}, 4),
    "data=2,fsdp=4": ({"data": 2, "fsdp": 4}, 8),
}
RULES = {"replicate": eqxshard.replicate(), "fsdp": eqxshard.fsdp(min_size=1)}


def make_mesh(name="data=8"):
    sizes, count = MESHES[name]
    return eqxshard.make_mesh(**sizes, devices=jax.devices()[:count])


def lenient(optim):
    """Optax itself mixes dtypes, which our tests forbid everybody else."""

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return optim.init(params)

    def update(updates, state, params=None):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optim.update(updates, state, params)

    return optax.GradientTransformation(init, update)


class Model(eqx.Module):
    """A little of everything: weights, biases, dropout, an integer array, a function."""

    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear
    permutation: jax.Array

    def __init__(self, key, width=32):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(8, width, key=k1)
        self.dropout = eqx.nn.Dropout(0.1)
        self.last = eqx.nn.Linear(width, 4, key=k2)
        self.permutation = jnp.arange(8)[::-1]

    def __call__(self, x, key=None):
        hidden = jax.nn.gelu(self.first(x[self.permutation]))
        return self.last(self.dropout(hidden, key=key))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Named:
    """An array with names, registered without keys, as in haliax and jax_dataclasses."""

    array: Any
    axes: Any = ("a", "b")

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(children[0], axes)


def squared_errors(model, batch, key):
    """Losses, one per example, with a dropout mask each."""
    keys = jax.random.split(key, batch["x"].shape[0])
    return jnp.sum((jax.vmap(model)(batch["x"], keys) - batch["y"]) ** 2, axis=-1)


def once(fn):
    """A function that raises if JAX traces it a second time."""
    return eqx.debug.assert_max_traces(fn, max_traces=1)


def source(examples=100):
    """Examples that know their number; in batches of 32, the last one is ragged."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 8)).astype(np.float32)
    y = rng.normal(size=(examples, 4)).astype(np.float32)
    return eqxshard.data.ArraySource({"x": x, "y": y, "index": np.arange(examples)})


def make_loader(**options):
    return eqxshard.Loader(source(), **{"batch_size": 32, "mesh": make_mesh(), **options})


def make_batch(rows=32, seed=0, weight=None):
    rng = np.random.default_rng(seed)
    batch = {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.normal(size=(rows, 4)).astype(np.float32),
    }
    return batch if weight is None else {**batch, "__weight__": np.float32(weight)}


def copied(tree):
    """A PyTree with arrays of its own, which a step may donate."""
    return jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, tree)


def stack(batches):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def arrays(tree):
    """The arrays of a PyTree on the host, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(path): host(leaf) for path, leaf in leaves}


def host(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def part(array):
    """The shape of each device's part, if that is the same on all of them."""
    (shape,) = {shard.data.shape for shard in array.addressable_shards}
    return shape


def assert_equal(tree, other):
    """Equal bit for bit."""
    ours, theirs = arrays(tree), arrays(other)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(array, theirs[path], err_msg=path)


def assert_close(tree, other, rtol=2e-5, atol=2e-6):
    """Equal up to rounding in float32."""
    ours, theirs = arrays(tree), arrays(other)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_allclose(array, theirs[path], rtol, atol, err_msg=path)


@contextlib.contextmanager
def compiled_by_jit(monkeypatch):
    """Collects the programs of functions that are jitted meanwhile, for each call."""
    compiled, real_jit = [], jax.jit

    def jit(fn, **options):
        jitted = real_jit(fn, **options)

        def lower(*args):
            lowered = jitted.lower(*args)

            def compile():
                program = lowered.compile()

                def run(*args):
                    compiled.append(program)
                    return program(*args)

                return run

            return SimpleNamespace(compile=compile)

        def call(*args):
            return lower(*args).compile()(*args)

        call.trace, call.lower = jitted.trace, lower  # pyright: ignore
        return call

    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        yield compiled


@contextlib.contextmanager
def compiles(name):
    """Collects JAX's traces and compiles of functions with this name."""
    events = []

    def listen(event: str, duration_secs: float, **what: str | int) -> None:
        if what.get("fun_name") in (name, f"jit({name})"):
            events.append(event.rsplit("/", 1)[-1])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
