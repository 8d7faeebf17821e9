import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from etils import epath
from helpers import make_mesh

import eqxshard
from eqxshard.checkpoint._arrays import partition_by_path, place_parts, read, write


def test_the_table_of_all_arrays_is_read_once(tmp_path):
    leaves = {f"w{i}": jnp.ones(2) for i in range(16)}
    folder = epath.Path(tmp_path) / "arrays"
    write(folder, leaves).result()
    before = bytes_read()
    read(folder, leaves)
    # It has a few bytes of each, and here the numbers, too.
    assert bytes_read() - before < 16 * 100


def bytes_read():
    name = "/tensorstore/kvstore/file/bytes_read"
    (metric,) = tensorstore.experimental_collect_matching_metrics(name)
    return metric["values"][0]["value"]


def test_two_arrays_with_one_path_are_refused():
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}
    with pytest.raises(ValueError, match=r"two arrays have the path a\.b; use dict keys"):
        partition_by_path(tree)


@pytest.mark.slow
def test_parts_that_straddle_chunks_are_read_whole(tmp_path):
    def make_model(key):
        # Several chunks, whatever the dims are split by.
        return {"x": jax.random.normal(key, (3, 1000, 1008))}

    def where(mesh, *axes):
        rule = eqxshard.by_path({r".*\.x|x": jax.P(*axes)})
        rule = eqxshard.first_match(rule, eqxshard.replicate())
        return {"key": jax.random.key(0), "mesh": make_mesh(mesh), "rule": rule}

    optim = optax.sgd(1.0)
    for axes in ((None, None, None), (None, "fsdp", None), (None, None, "fsdp")):
        folder = tmp_path / "-".join(map(str, axes))
        state = eqxshard.init_state(make_model, optim, **where("fsdp=2", *axes))
        checkpointer = eqxshard.Checkpointer(folder)
        checkpointer.save(state)
        checkpointer.wait()
        for mesh, *split in (
            ("fsdp=8", None, "fsdp", None),
            ("fsdp=8", None, None, "fsdp"),
            ("data=2,fsdp=4", None, "data", "fsdp"),
        ):
            like = eqxshard.abstract_state(make_model, optim, **where(mesh, *split))
            restored = checkpointer.restore(like).model["x"]
            assert restored.sharding.spec == jax.P(*split)
            np.testing.assert_array_equal(restored, state.model["x"])


@pytest.mark.parametrize("offset", [0, 16])
def test_parts_are_copied_however_they_are_aligned(offset):
    memory = np.zeros(16 * 4 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    on_host = memory[start : start + 16 * 4].view(np.float32)
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = place_parts(lambda part: on_host, (16,), there)
    assert array.unsafe_buffer_pointer() != on_host.ctypes.data
    on_host[:] = 1
    np.testing.assert_array_equal(array, np.zeros(16, np.float32))
