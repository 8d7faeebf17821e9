import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from etils import epath
from helpers import make_mesh

import eqxshard
from eqxshard.checkpoint._arrays import (
    abstract_array,
    array_metadata,
    check_structure,
    partition_by_path,
    place_parts,
    read,
    write,
)


def test_arrays_are_described_by_shape_dtype_and_spec():
    sharding = jax.NamedSharding(make_mesh("fsdp=8"), jax.P(None, ("data", "fsdp")))
    array = jax.device_put(np.ones((2, 8), np.float32), sharding)
    described = array_metadata(array)
    assert described == {
        "shape": [2, 8],
        "dtype": "float32",
        "spec": [None, ["data", "fsdp"]],
    }
    assert abstract_array(described) == jax.ShapeDtypeStruct((2, 8), jnp.float32)


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


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_are_described_with_their_implementation(impl):
    key = jax.random.split(jax.random.key(0, impl=impl), 3)
    described = array_metadata(key)
    assert described["impl"] == impl
    assert abstract_array(described).dtype == key.dtype


def test_two_arrays_with_one_path_are_refused():
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}
    with pytest.raises(ValueError, match=r"two arrays have the path a\.b; use dict keys"):
        partition_by_path(tree)


def test_differences_of_structure_are_all_named():
    wanted = {"same": jnp.ones(2), "new": jnp.ones((3, 2)), "shape": jnp.ones(4)}
    saved = {
        "same": {"shape": [2], "dtype": "bfloat16"},
        "old": {"shape": [], "dtype": "int32"},
        "shape": {"shape": [5], "dtype": "float32"},
    }
    with pytest.raises(ValueError) as error:
        check_structure(wanted, saved, "the file")
    assert str(error.value).startswith(
        "the file does not fit this model: new float32[3,2] is missing there; shape has "
        "shape [5] there, not [4]; old int32[] is only there; use the model"
    )


def test_of_many_differences_the_first_are_named():
    wanted = {f"model.{i}": jnp.ones(2) for i in range(12)}
    with pytest.raises(ValueError, match=r"model\.0 .*; model\.3 [^;]*; and 8 more; use"):
        check_structure(wanted, {}, "the file")


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
    target = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=there)
    array = place_parts(lambda part: on_host, target)
    assert array.unsafe_buffer_pointer() != on_host.ctypes.data
    on_host[:] = 1
    np.testing.assert_array_equal(array, np.zeros(16, np.float32))
