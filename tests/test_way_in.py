"""No array is larger on a device than its part there: in making, restoring, and loading."""

import contextlib
import sys
import threading
import tracemalloc
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from helpers import make_mesh

import eqxshard

pytestmark = pytest.mark.versions

SIDE = 1024
PART = SIDE * SIDE * 4 // 8
OPTIM = optax.sgd(1.0)
OURS = str(Path(eqxshard.__file__).parent)


class Seen:
    """The most bytes that a new array had on a device at any call or return of ours."""

    def __init__(self):
        self.largest = 0
        # Kept, so that no new one gets the identity of an old one.
        self._old = jax.live_arrays()
        self._known = {*map(id, self._old)}

    def look(self, frame, event, arg):
        callers = (frame, frame.f_back)
        if any(each and each.f_code.co_filename.startswith(OURS) for each in callers):
            for array in jax.live_arrays():
                if id(array) not in self._known:
                    self.largest = max(self.largest, bytes_on_a_device(array))


def bytes_on_a_device(array):
    return np.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


@contextlib.contextmanager
def watched():
    seen = Seen()
    threading.setprofile(seen.look)
    sys.setprofile(seen.look)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def make_model(key):
    return {"weight": jax.random.normal(key, (SIDE, SIDE))}


def where(axis, *spec):
    rule = eqxshard.by_path({".*weight": jax.P(*spec)})
    rule = eqxshard.first_match(rule, eqxshard.replicate())
    return {"key": jax.random.key(0), "mesh": make_mesh(f"{axis}=8"), "rule": rule}


@pytest.mark.slow
def test_a_state_is_made_in_its_place():
    with watched() as seen:
        state = eqxshard.init_state(make_model, optax.adam(1.0), **where("fsdp", "fsdp"))
        jax.block_until_ready(eqx.filter(state, eqx.is_array))
    assert seen.largest == PART


@pytest.mark.slow
def test_a_state_is_restored_into_its_place(tmp_path):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(eqxshard.init_state(make_model, OPTIM, **where("fsdp", "fsdp")))
    checkpointer.wait()
    like = eqxshard.abstract_state(make_model, OPTIM, **where("data", None, "data"))
    # Imports and compiled programs take memory, too.
    checkpointer.restore(like)
    tracemalloc.start()
    try:
        with watched() as seen:
            state = checkpointer.restore(like)
        _, on_host = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen.largest == bytes_on_a_device(state.model["weight"]) == PART
    assert on_host < 4 * PART


def test_a_batch_is_placed_where_it_is_used():
    mesh = make_mesh("data=2,fsdp=4")
    source = eqxshard.data.ArraySource({"x": np.zeros((2 * SIDE, SIDE), np.float32)})
    with watched() as seen:
        loader = eqxshard.Loader(source, batch_size=SIDE, mesh=mesh, epochs=1)
        batches = jax.block_until_ready([*loader])
    assert len(batches) == 2
    assert seen.largest == bytes_on_a_device(batches[0]["x"]) == PART
