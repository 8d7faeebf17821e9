import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from helpers import assert_equal, make_mesh

import eqxshard
from eqxshard.checkpoint._arrays import partition_by_path, place_parts


def placed(shape, dtype, *axes):
    numbers = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    there = jax.NamedSharding(make_mesh("data=2,fsdp=4"), jax.P(*axes))
    return jax.device_put(numbers, there)


@pytest.mark.versions
def test_tensorstore_alone_reads_arrays_however_they_were_placed(tmp_path):
    model = {
        "scalar": placed((), "float32"),
        "split": placed((8, 6), "bfloat16", "fsdp"),
        "both": placed((8, 6), "int8", ("data", "fsdp")),
        "copies": placed((5,), "bool"),
        "large": placed((1024, 4096), "float32", "fsdp"),
        "large copies": placed((1024, 1024), "float32"),
        "zeros": jnp.zeros((3, 2)),
        "empty": jnp.zeros((0, 2)),
    }
    state = eqxshard.TrainState(jnp.int32(3), model, (), jax.random.key(0))
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    assert_equal(checkpointer.restore(state), state)
    base = {"driver": "file", "path": f"{tmp_path}/3/state/"}
    wanted = {f"model.{name}": leaf for name, leaf in model.items() if leaf.size}
    wanted |= {"step": state.step, "key": jax.random.key_data(state.key)}
    for path, leaf in wanted.items():
        where = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
        stored = ts.open({"driver": "zarr3", "kvstore": where}).result()
        assert stored.dtype.numpy_dtype == leaf.dtype
        np.testing.assert_array_equal(stored.read().result(), leaf)


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


@pytest.mark.parametrize(
    "shape, axes, chunk",
    [
        # A vocabulary of odd length: rows are cut, not columns, of which few are left.
        ((50257, 128), (None, "fsdp"), (25129, 16)),
        ((50257, 16), (None, None), (25129, 16)),
        ((3, 333, 1001), (None, None, None), (3, 333, 501)),
        # A prime number of rows for each device, which cannot be cut: none share chunks.
        ((8 * 6287, 129), ("fsdp", None), (6287, 65)),
        ((8 * 3 * 2003, 129), ("fsdp", None), (2003, 129)),
    ],
)
def test_arrays_of_odd_lengths_come_back_and_have_few_chunks(tmp_path, shape, axes, chunk):
    mesh = make_mesh("fsdp=8")
    there = jax.NamedSharding(mesh, jax.P(*axes))
    x = jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), there)
    state = eqxshard.TrainState(jnp.int32(0), {"x": x}, (), jax.random.key(0))
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    np.testing.assert_array_equal(checkpointer.restore(state).model["x"], x)
    where = {"driver": "ocdbt", "base": f"file://{tmp_path}/0/state/", "path": "model.x/"}
    stored = ts.open({"driver": "zarr3", "kvstore": where}).result()
    assert stored.chunk_layout.read_chunk.shape == chunk
