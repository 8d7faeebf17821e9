import json
import os
import struct

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_equal, lenient, make_batch, make_mesh, part
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from weights_helpers import FSDP, file, make_mlp, mlp, placed

import eqxshard
from eqxshard.checkpoint import compare_weights

_ = file, mlp  # Fixtures.

#: The dtypes that safetensors and JAX both have.
TYPES = (
    *("bool", "bfloat16", "float16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
)
ADAM = lenient(optax.chain(optax.adam(1e-3), eqxshard.ema_weights(0.9)))


def test_a_model_comes_back_bit_for_bit_and_a_peer_reads_it(mlp, file):
    like = eqx.filter_eval_shape(make_mlp, jax.random.key(1))
    loaded = eqxshard.load_weights(str(file), like)
    assert_equal(loaded, mlp)
    np.testing.assert_array_equal(loaded(jnp.ones(8)), mlp(jnp.ones(8)))
    arrays = load_file(file)
    assert len(arrays) == 6
    for i, layer in enumerate(mlp.layers):
        np.testing.assert_array_equal(arrays[f"layers.{i}.weight"], layer.weight)
        np.testing.assert_array_equal(arrays[f"layers.{i}.bias"], layer.bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_every_type_comes_back_whatever_its_shape(tmp_path, name):
    with jax.enable_x64("64" in name):
        # Every bit pattern, NaNs included; a bool has only two.
        bits = np.random.default_rng(0).integers(0, 256, 12 * 8, np.uint8)
        size = 12 * jnp.dtype(name).itemsize
        values = bits[:size].view(name) if name != "bool" else bits[:12] > 127
        array = jnp.asarray(values.reshape(3, 4))
        assert array.dtype == name
        tree = {
            "array": array,
            "one": array[:1, :1],
            "scalar": array[1, 2],
            "empty": array[:0],
            "nothing": array[:, :0],
            "transposed": array.T,
            # The others begin at multiples of their size nevertheless.
            "byte": jnp.zeros(1, jnp.uint8),
        }
        file = tmp_path / "arrays.safetensors"
        eqxshard.save_weights(file, tree)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        loaded = eqxshard.load_weights(file, like)
        for key, leaf in tree.items():
            assert (loaded[key].shape, loaded[key].dtype) == (leaf.shape, leaf.dtype)
            assert np.asarray(loaded[key]).tobytes() == np.asarray(leaf).tobytes(), key
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        begin = header["array"]["data_offsets"][0]
        assert begin % array.dtype.itemsize == 0


def test_what_is_loaded_does_not_change_with_the_file(mlp, file, tmp_path):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(file.read_bytes())
    loaded = eqxshard.load_weights(copy, make_mlp(jax.random.key(1)))
    with copy.open("r+b") as stream:
        stream.write(bytes(copy.stat().st_size))
    assert_equal(loaded, mlp)


def test_sharded_models_are_saved_whole_and_loaded_on_another_mesh(mlp, file, tmp_path):
    sharded = tmp_path / "sharded.safetensors"
    eqxshard.save_weights(sharded, placed(mlp))
    assert sharded.read_bytes() == file.read_bytes()
    for mesh in ("data=1", "data=2,fsdp=4"):
        like = placed(make_mlp(jax.random.key(1)), mesh)
        loaded = eqxshard.load_weights(sharded, like)
        assert_equal(loaded, mlp)
        for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(like)):
            assert not eqx.is_array(ours) or ours.sharding == theirs.sharding


def test_each_device_reads_its_part_alone(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    eqxshard.save_weights(file, {"x": jnp.zeros((64, 32))})
    parts = []
    put = jax.device_put

    def watched(x, *args, **options):
        parts.extend([x] if isinstance(x, np.ndarray) else [])
        return put(x, *args, **options)

    monkeypatch.setattr(jax, "device_put", watched)
    rows = jax.NamedSharding(make_mesh("fsdp=8"), jax.P("fsdp"))
    like = {"x": jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)}
    loaded = eqxshard.load_weights(file, like)
    assert part(loaded["x"]) == (8, 32)
    assert [x.shape for x in parts] == [(8, 32)] * 8
    assert all(x.base is None for x in parts), "a part keeps the whole alive"


def test_every_leaf_that_differs_is_named(mlp, file):
    like = eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[1].bias),
        mlp,
        (jnp.zeros((16, 9)), jnp.zeros(16, jnp.int32)),
    )
    other = {"layers": [*like.layers[:2], {"weight": mlp.layers[2].weight}], "new": 1.0}
    other["norm"] = jnp.zeros(3)
    with pytest.raises(ValueError) as error:
        eqxshard.load_weights(file, other)
    says = str(error.value)
    assert says.startswith(f"{file} does not fit this model: layers.0.weight is float32")
    assert "layers.1.bias is float32[16] in the file (as layers.1.bias), not int32" in says
    assert "layers.2.bias float32[4] is only in the file" in says
    assert "norm is missing in the file" in says
    assert "layers.0.bias" not in says and "\n" not in says
    with pytest.raises(ValueError, match=r"0\.weight is float32\[16,8\] .*, not float32"):
        eqxshard.load_weights(file, other, partial=True)


def test_a_whole_state_is_refused(mlp, file):
    state = eqxshard.TrainState(jnp.int32(0), mlp, None, jax.random.key(0))
    for load in (eqxshard.load_weights, compare_weights):
        with pytest.raises(TypeError, match="_weights takes a model; give it"):
            load(file, state)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_is_no_other_model(mlp, file, tmp_path_factory, data):
    content = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, start - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    path.write_bytes(content)
    # Whatever was flipped in a header, some array is lost or has another name or type,
    # unless it was in the header's own notes.
    try:
        loaded = eqxshard.load_weights(path, mlp)
    except ValueError as error:
        assert "x.safetensors" in str(error)
    else:
        assert len(content) == len(file.read_bytes())
        assert_equal(loaded, mlp)


def test_arrays_that_only_one_side_has_are_left_out_on_request(mlp, file, caplog):
    like = make_mlp(jax.random.key(1))
    head = eqx.nn.Linear(16, 3, key=jax.random.key(2))
    wider = {"layers": like.layers[:2], "head": head}
    with pytest.raises(ValueError, match=r"head\.weight is missing .*; head\.bias is"):
        eqxshard.load_weights(file, wider)
    loaded = eqxshard.load_weights(file, wider, partial=True)
    assert_equal(loaded["layers"], mlp.layers[:2])
    assert_equal(loaded["head"], head)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{file}: 4 of the model's 6 arrays are read; ")
    assert "head.weight, head.bias, layers.2.bias, layers.2.weight" in record.getMessage()


def test_a_full_disk_is_an_error_in_words(mlp, file, tmp_path, small_disk):
    path = small_disk / "new" / "x.safetensors"
    eqxshard.save_weights(path, mlp)
    free = os.statvfs(small_disk)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 4096))
    with pytest.raises(OSError, match=r"x.safetensors' could not be written: No space"):
        eqxshard.save_weights(path, {"large": jnp.zeros(100_000)})
    assert path.read_bytes() == file.read_bytes()
    assert [*path.parent.iterdir()] == [path]


# Into states


def init(load, **options):
    where = {"mesh": make_mesh("fsdp=8"), "rule": FSDP, "load": load}
    return eqxshard.init_state(make_mlp, ADAM, key=jax.random.key(1), **where, **options)


def addresses(tree):
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in leaves]


@pytest.mark.slow
def test_a_state_takes_loaded_weights_over_without_a_copy(mlp, file):
    read = []

    def load(like):
        loaded = eqxshard.load_weights(file, like)
        read.extend(addresses(loaded))
        return loaded

    state = init(load)
    assert addresses(state.model) == read
    # The optimizer begins at the loaded weights.
    assert_equal(eqxshard.ema_model(state), mlp)
    before = addresses((state.step, state.model, state.opt_state))
    assert len(set(before)) == len(before)
    train_step = eqxshard.make_train_step(
        lambda m, batch, key: jnp.sum((jax.vmap(m)(batch["x"]) - batch["y"]) ** 2, -1), ADAM
    )
    after, _ = train_step(state, make_batch())
    # The arrays of one shape may change places.
    assert {*addresses((after.step, after.model, after.opt_state))} == {*before}


def test_what_is_not_loaded_is_made(mlp, file):
    fresh = init(None)

    def load(like):
        head = {r"layers\.2\.": None}
        return eqxshard.load_weights(file, like, rename=head, partial=True)

    state = init(load, precision=eqxshard.Precision(params=jnp.bfloat16))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, mlp)
    assert_equal(state.model.layers[:2], half.layers[:2])
    made = fresh.model.layers[2].weight.astype(jnp.bfloat16)
    np.testing.assert_array_equal(state.model.layers[2].weight, made)
    assert_equal(state.key, fresh.key)
