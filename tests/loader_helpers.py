"""Loaders of numbers on small meshes, and readers of their batches."""

import itertools
import threading
import time
from contextlib import closing

import jax
import numpy as np

import eqxshard

MESHES = (
    {"count": 1},
    {"count": 2},
    {"count": 4, "fsdp": 2},
    {"count": 8},
    {"count": 8, "fsdp": 4},
    {"count": 8, "tensor": 2, "fsdp": 2},
)


def mesh_of(*, count, **axes):
    return eqxshard.make_mesh(devices=jax.devices()[:count], **axes)


def numbers(n):
    """A source whose example i is the number i."""
    return eqxshard.data.ArraySource({"x": np.arange(n, dtype=np.int32)})


def loader_of(source, *, mesh=MESHES[0], batch_size=8, **options):
    return eqxshard.Loader(source, batch_size=batch_size, mesh=mesh_of(**mesh), **options)


def take(loader, count=None):
    """The next batches, after which the loader's thread has ended.

    The thread may draw random numbers (for beartype), which Hypothesis does not allow while
    it draws the next example.
    """
    with closing(iter(loader)) as iterator:
        batches = list(itertools.islice(iterator, count))
    assert_threads_end()
    return batches


def read(loader, count=None):
    """The next batches, each as the list of its examples."""
    return [rows(batch) for batch in take(loader, count)]


def rows(batch):
    """The examples of a batch, without padding."""
    x = np.asarray(batch["x"])
    if "__weight__" in batch:
        weight = np.asarray(batch["__weight__"])
        assert weight.dtype == np.float32
        assert set(weight.tolist()) <= {0, 1}
        x = x[weight == 1]
    return x.tolist()


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def loader_threads():
    """The threads of Grain, and of streams."""
    names = ("grain", "eqxshard-batches")
    return [t for t in threading.enumerate() if t.name.startswith(names)]


def assert_threads_end():
    deadline = time.monotonic() + 60
    while loader_threads():
        assert time.monotonic() < deadline, loader_threads()
        time.sleep(0.01)
