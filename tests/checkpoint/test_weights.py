import json
import resource
import struct

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Model, assert_equal, make_mesh, part
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from weights_helpers import FSDP, file, make_mlp, mlp, placed

import eqxshard

_ = file, mlp  # Fixtures.

#: All that safetensors and JAX both have.
TYPES = (
    *("bool", "bfloat16", "float16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
)
# There and back


def test_a_model_comes_back_bit_for_bit(mlp, file):
    other = make_mlp(jax.random.key(1))
    assert_equal(eqxshard.load_weights(file, other), mlp)
    like = eqx.filter_eval_shape(make_mlp, jax.random.key(1))
    loaded = eqxshard.load_weights(str(file), like)
    assert_equal(loaded, mlp)
    np.testing.assert_array_equal(loaded(jnp.ones(8)), mlp(jnp.ones(8)))


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
        }
        file = tmp_path / "arrays.safetensors"
        eqxshard.save_weights(file, tree)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        loaded = eqxshard.load_weights(file, like)
        for key, leaf in tree.items():
            assert (loaded[key].shape, loaded[key].dtype) == (leaf.shape, leaf.dtype)
            assert np.asarray(loaded[key]).tobytes() == np.asarray(leaf).tobytes(), key


def test_floating_point_types_may_be_others(mlp, file):
    half = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x,
        make_mlp(jax.random.key(1)),
    )
    loaded = eqxshard.load_weights(file, half)
    weight = loaded.layers[0].weight
    assert weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(weight, mlp.layers[0].weight.astype(jnp.bfloat16))


def test_what_is_loaded_does_not_change_with_the_file(mlp, file, tmp_path):
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(file.read_bytes())
    loaded = eqxshard.load_weights(copy, make_mlp(jax.random.key(1)))
    with copy.open("r+b") as stream:
        stream.write(bytes(copy.stat().st_size))
    assert_equal(loaded, mlp)


# Where arrays lie


def test_sharded_models_are_saved_whole_and_loaded_on_another_mesh(mlp, file, tmp_path):
    sharded = tmp_path / "sharded.safetensors"
    eqxshard.save_weights(sharded, placed(mlp))
    assert sharded.read_bytes() == file.read_bytes()
    like = eqx.filter_eval_shape(make_mlp, jax.random.key(1))
    for mesh in ("data=1", "data=2,fsdp=4", "fsdp=2"):
        shardings = eqxshard.shardings(like, make_mesh(mesh), FSDP)
        loaded = eqxshard.load_weights(sharded, like, shardings)
        assert_equal(loaded, mlp)
        # `shardings` has an entry for each leaf that is an array, in their order.
        wanted = jax.tree.leaves(shardings)
        for leaf, there in zip(
            jax.tree.leaves(eqx.filter(loaded, eqx.is_array)), wanted, strict=True
        ):
            assert leaf.sharding.is_equivalent_to(there, leaf.ndim)


def test_without_shardings_arrays_go_where_those_of_the_model_are(mlp, file):
    there = placed(make_mlp(jax.random.key(1)))
    loaded = eqxshard.load_weights(file, there)
    assert_equal(loaded, mlp)
    assert part(loaded.layers[1].weight) == (2, 16)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    loaded = eqxshard.load_weights(file, there, one)
    assert loaded.layers[1].weight.sharding == one
    # A prefix, with None where all is to stay.
    some = jax.tree.map(lambda _: None, mlp)
    some = eqx.tree_at(lambda m: m.layers[1], some, one, is_leaf=lambda x: x is None)
    loaded = eqxshard.load_weights(file, there, some)
    assert loaded.layers[1].weight.sharding == one
    assert part(loaded.layers[0].weight) == (2, 8)


def test_each_device_reads_its_part_alone(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    eqxshard.save_weights(file, {"x": jnp.zeros((64, 32))})
    parts = []
    put = jax.device_put

    def watched(x, *args, **options):
        parts.extend([x] if isinstance(x, np.ndarray) else [])
        return put(x, *args, **options)

    monkeypatch.setattr(jax, "device_put", watched)
    like = {"x": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    rows = jax.NamedSharding(make_mesh("fsdp=8"), jax.P("fsdp"))
    loaded = eqxshard.load_weights(file, like, rows)
    assert part(loaded["x"]) == (8, 32)
    assert [x.shape for x in parts] == [(8, 32)] * 8
    assert all(x.base is None for x in parts), "a part keeps the whole alive"


# Peers


def test_a_peer_reads_the_file(mlp, file):
    arrays = load_file(file)
    assert set(arrays) == {
        f"layers.{i}.{name}" for i in range(3) for name in ("weight", "bias")
    }
    for i, layer in enumerate(mlp.layers):
        np.testing.assert_array_equal(arrays[f"layers.{i}.weight"], layer.weight)
        np.testing.assert_array_equal(arrays[f"layers.{i}.bias"], layer.bias)


def test_arrays_that_do_not_lie_at_multiples_of_their_size_are_read(tmp_path):
    file = tmp_path / "odd.safetensors"
    wanted = np.arange(5, dtype=np.float32)
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [5], "data_offsets": [1, 21]},
    }
    file.write_bytes(as_file(header, b"\7" + wanted.tobytes()))
    like = {"byte": jnp.zeros(1, jnp.uint8), "x": jnp.zeros(5)}
    loaded = eqxshard.load_weights(file, like)
    np.testing.assert_array_equal(loaded["x"], wanted)


def as_file(header, data):
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


# What is refused


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
    assert says.startswith(f"{file} does not fit this model: ")
    assert "layers.0.weight has shape [16, 8] there, not [16, 9]" in says
    assert "layers.1.bias has dtype float32 there, not int32" in says
    assert "layers.2.bias float32[4] is only there" in says
    assert "norm is missing there" in says
    assert "layers.0.bias" not in says and "\n" not in says


def test_a_whole_state_is_refused(mlp, file):
    state = eqxshard.TrainState(jnp.int32(0), mlp, None, jax.random.key(0))
    for load in (eqxshard.load_weights, eqxshard.compare_weights):
        with pytest.raises(TypeError, match=r"more than a model; .* or into state\.model"):
            load(file, state)


def test_types_that_safetensors_lacks_are_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"as it was")
    for leaf in (jax.random.key(0), jnp.zeros(2, jnp.int4)):
        says = rf"head.x has dtype {str(leaf.dtype).split('<')[0]}.*; cast it, or leave"
        with pytest.raises(ValueError, match=says):
            eqxshard.save_weights(file, {"head": {"x": leaf}})
    assert file.read_bytes() == b"as it was"


@settings(max_examples=150, deadline=None)
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


# A part of a model


def test_arrays_that_only_one_side_has_are_left_out_on_request(mlp, file, caplog):
    like = make_mlp(jax.random.key(1))
    head = eqx.nn.Linear(16, 3, key=jax.random.key(2))
    wider = {"layers": like.layers[:2], "head": head}
    with pytest.raises(ValueError, match=r"head\.weight is missing there; head\.bias is"):
        eqxshard.load_weights(file, wider)
    loaded = eqxshard.load_weights(file, wider, partial=True)
    assert_equal(loaded["layers"], mlp.layers[:2])
    assert_equal(loaded["head"], head)
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: 4 of the model's 6 arrays are read; the model keeps its own head.weight, "
        "head.bias; the file's layers.2.bias, layers.2.weight are not used."
    ]


def test_another_shape_is_refused_even_in_a_part(mlp, file):
    like = eqx.tree_at(lambda m: m.layers[2].weight, mlp, jnp.zeros((3, 16)))
    with pytest.raises(
        ValueError, match=r"weight has shape \[4, 16\] there, not \[3, 16\]"
    ):
        eqxshard.load_weights(file, like, partial=True)
    new_head = {r"layers\.2\.": None}
    loaded = eqxshard.load_weights(file, like, rename=new_head, partial=True)
    assert_equal(loaded.layers[:2], mlp.layers[:2])
    assert loaded.layers[2].weight is like.layers[2].weight


# Saving that fails


def test_a_full_disk_is_an_error_in_words(mlp, file, tmp_path):
    folder = tmp_path / "new" / "folder"
    path = folder / "x.safetensors"
    eqxshard.save_weights(path, mlp)
    assert path.read_bytes() == file.read_bytes()
    # Compiles, because the limit holds for JAX's cache, too.
    other = Model(jax.random.key(0))
    eqxshard.save_weights(tmp_path / "other.safetensors", other)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(OSError, match=r"x.safetensors' could not be written: "):
            eqxshard.save_weights(path, other)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert path.read_bytes() == file.read_bytes()
    assert [x.name for x in folder.iterdir()] == ["x.safetensors"]
    eqxshard.save_weights(path, other)
    assert path.read_bytes() != file.read_bytes()
