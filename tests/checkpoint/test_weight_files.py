"""Several files with an index, Equinox's own files, and what is none of these."""

import io
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal
from hostile_files import HostilePickle, deep_json, forbid
from safetensors.numpy import save_file

import eqxshard


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "first": {"weight": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)},
        "last": {"weight": jnp.asarray(rng.normal(size=(2, 4)), jnp.float32)},
        "steps": jnp.asarray(rng.integers(0, 9, 3), jnp.int32),
    }


def npy_header(about):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


TREE, LIKE = tree(), tree(1)


def index(folder):
    """Two files and their index, as Hugging Face writes them."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    first = {"first.weight": np.asarray(TREE["first"]["weight"])}
    rest = {
        "last.weight": np.asarray(TREE["last"]["weight"]),
        "steps": np.asarray(TREE["steps"]),
    }
    for name, arrays in zip(names, (first, rest)):
        save_file(arrays, folder / name)
    file_of = {**dict.fromkeys(first, names[0]), **dict.fromkeys(rest, names[1])}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": file_of}))
    return path


@pytest.mark.versions
def test_an_index_is_read_from_itself_or_from_its_folder(tmp_path):
    path = index(tmp_path)
    # Another format of the same weights, as in many repositories.
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for given in (str(path), tmp_path):
        assert_equal(eqxshard.load_weights(given, LIKE), TREE)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        eqxshard.load_weights(path, LIKE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"weight_map": [2]}',
        '{"weight_map": {"norm": "../secret.safetensors"}}',
        deep_json(),
    ],
    ids=range(4),
)
def test_a_damaged_index_is_refused(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"index\.json' is not an index of weights"):
        eqxshard.load_weights(path, LIKE)


def test_folders_that_leave_a_choice_or_none_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}' has 0 files to choose"):
        eqxshard.load_weights(tmp_path, LIKE)
    for name in "ab":
        eqxshard.save_weights(tmp_path / f"{name}.safetensors", TREE)
    with pytest.raises(FileNotFoundError, match="has 2 files to choose from; give the"):
        eqxshard.load_weights(tmp_path, LIKE)


class Net(eqx.Module):
    """A number between the arrays is in the file, too."""

    weight: jax.Array
    rate: float
    half: jax.Array


def net(seed):
    rng = np.random.default_rng(seed)
    weight, half = rng.normal(size=(4, 3)), rng.normal(size=5)
    return Net(jnp.asarray(weight, jnp.float32), 0.5, jnp.asarray(half, jnp.bfloat16))


@pytest.fixture
def eqx_file(tmp_path):
    path = tmp_path / "net.eqx"
    eqx.tree_serialise_leaves(path, net(0))
    return path


@pytest.mark.versions
def test_a_file_of_equinox_is_read_whatever_else_it_has(eqx_file, tmp_path):
    like = eqx.filter_eval_shape(net, 1)
    assert_equal(eqxshard.load_weights(eqx_file, like), net(0))
    # With a line of hyperparameters, as in Equinox's documentation.
    path = tmp_path / "with-line.eqx"
    path.write_bytes(b'{"width": 4}\n' + eqx_file.read_bytes())
    assert_equal(eqxshard.load_weights(path, net(1)), net(0))
    with pytest.raises(ValueError, match=r"3 arrays without names, and .* has 4 leaves"):
        eqxshard.load_weights(eqx_file, [net(1), jnp.zeros(2)], partial=True)


@pytest.mark.parametrize("size", [7, 60, 140, 300])
def test_a_file_of_equinox_that_is_cut_is_refused(eqx_file, size):
    content = eqx_file.read_bytes()
    assert size < len(content)
    eqx_file.write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"net\.eqx' cannot be read .*; fetch it again"):
        eqxshard.load_weights(eqx_file, net(1))


@pytest.mark.parametrize("shape", [(-1, 16), (2, -3), (2**62, 2**62), (2**45,)])
def test_an_array_of_impossible_sizes_is_refused(tmp_path, shape):
    about = {"descr": "<c8", "fortran_order": False, "shape": shape}
    (tmp_path / "x.eqx").write_bytes(npy_header(about))
    entry = {"dtype": "F32", "shape": [0, *map(abs, shape)], "data_offsets": [0, 0]}
    header = json.dumps({"x": entry}).encode()
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "x.safetensors").write_bytes(content)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=r"/x\..* (cannot be read|does not fit)"):
            eqxshard.load_weights(path, {"x": jnp.zeros(1)})


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.eqx", "x.bin.index.json"])
def test_what_is_no_file_is_not_opened(tmp_path, kind, name):
    forbid(tmp_path / name, kind)
    with pytest.raises((OSError, ValueError), match=r"not a regular file|symbolic link"):
        eqxshard.load_weights(tmp_path / name, LIKE)


@pytest.mark.parametrize(
    "name, start",
    [
        *((f"x.{ending}", b"") for ending in ("safetensors", "eqx", "pt", "bin", "x")),
        ("x.safetensors.index.json", b""),
        # An array of objects, which NumPy has in a pickle.
        ("x.eqx", npy_header({"descr": "|O", "fortran_order": False, "shape": (1,)})),
    ],
)
def test_pickles_are_not_read(tmp_path, name, start):
    hostile = HostilePickle(tmp_path)
    (tmp_path / name).write_bytes(start + hostile.content)
    with pytest.raises(ValueError, match=rf"{name}' .*; fetch it again"):
        eqxshard.load_weights(tmp_path / name, LIKE)
    assert not hostile.has_run()
