"""Safetensors in several files, Equinox's own files, and what is none of these."""

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


def index(folder, ending="safetensors", **changes):
    """Two files and their index, as Hugging Face writes them."""
    names = [f"model-0000{i}-of-00002.{ending}" for i in (1, 2)]
    first = {"first.weight": np.asarray(TREE["first"]["weight"])}
    rest = {
        "last.weight": np.asarray(TREE["last"]["weight"]),
        "steps": np.asarray(TREE["steps"]),
    }
    for name, arrays in zip(names, (first, rest)):
        save_file(arrays, folder / name)
    file_of = {**dict.fromkeys(first, names[0]), **dict.fromkeys(rest, names[1])}
    path = folder / f"model.{ending}.index.json"
    content = {"metadata": {"total_size": 0}, "weight_map": file_of | changes}
    path.write_text(json.dumps(content))
    return path


# Several files


@pytest.mark.versions
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_an_index_is_read_from_itself_or_from_its_folder(tmp_path, ending):
    path = index(tmp_path, ending)
    for given in (path, str(path), tmp_path):
        assert_equal(eqxshard.load_weights(given, LIKE), TREE)


def test_a_folder_with_one_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    eqxshard.save_weights(tmp_path / "weights.safetensors", TREE)
    # Another format of the same weights, as in many repositories.
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert_equal(eqxshard.load_weights(tmp_path, LIKE), TREE)


def test_a_missing_file_of_an_index_is_named(tmp_path):
    path = index(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    says = r"index\.json' names 2 files, and model-00002-of-00002\.safetensors cannot be"
    with pytest.raises(FileNotFoundError, match=says):
        eqxshard.load_weights(path, LIKE)


def test_an_array_that_an_index_promises_is_named(tmp_path):
    path = index(tmp_path, norm="model-00001-of-00002.safetensors")
    with pytest.raises(
        ValueError, match=r"says that norm is in model-00001.*, and it is n"
    ):
        eqxshard.load_weights(path, LIKE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"weight_map": [2]}',
        '{"weight_map": {"norm": "../secret.safetensors"}}',
        deep_json(),
    ],
    ids=range(5),
)
def test_a_damaged_index_is_refused(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"index\.json' is not an index of weights, or is"):
        eqxshard.load_weights(path, LIKE)


def test_folders_that_leave_a_choice_or_none_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no weights in '{tmp_path}'; give a file"):
        eqxshard.load_weights(tmp_path, LIKE)
    for name in "abcd":
        eqxshard.save_weights(tmp_path / f"{name}.safetensors", TREE)
    says = r"has 4 files \*\.safetensors \(a\.safetensors, b\.saf.*\) and no index"
    with pytest.raises(ValueError, match=says):
        eqxshard.load_weights(tmp_path, LIKE)


# Equinox's files


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
    assert_equal(eqxshard.load_weights(eqx_file, net(1)), net(0))
    like = eqx.filter_eval_shape(net, 1)
    assert_equal(eqxshard.load_weights(eqx_file, like), net(0))
    # With a line of hyperparameters, as in Equinox's documentation.
    path = tmp_path / "with-line.eqx"
    path.write_bytes(b'{"width": 4}\n' + eqx_file.read_bytes())
    assert_equal(eqxshard.load_weights(path, net(1)), net(0))
    # An array in the order of Fortran.
    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)))
    path.write_bytes(buffer.getvalue())
    loaded = eqxshard.load_weights(path, {"x": jnp.zeros((2, 3))})
    np.testing.assert_array_equal(loaded["x"], np.arange(6.0).reshape(2, 3))


def test_another_number_of_leaves_is_refused(eqx_file):
    says = r"net\.eqx' has 3 arrays without names, and this model 4 leaves; load it into"
    with pytest.raises(ValueError, match=says):
        eqxshard.load_weights(eqx_file, [net(1), jnp.zeros(2)], partial=True)


@pytest.mark.parametrize("size", [7, 60, 140, 300])
def test_a_file_of_equinox_that_is_cut_is_refused(eqx_file, size):
    content = eqx_file.read_bytes()
    assert size < len(content)
    eqx_file.write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"net\.eqx' (cannot be read|has \d arrays)"):
        eqxshard.load_weights(eqx_file, net(1))


@pytest.mark.parametrize("shape", [(-1, 16), (-4,), (2, -3), (2**62, 2**62), (2**45,)])
def test_an_array_of_impossible_sizes_is_refused(tmp_path, shape):
    path = tmp_path / "x.eqx"
    about = {"descr": "<c8", "fortran_order": False, "shape": shape}
    path.write_bytes(npy_header(about))
    with pytest.raises(ValueError, match=r"x\.eqx' cannot be read .*; it is damaged"):
        eqxshard.load_weights(path, {"x": jnp.zeros(1)})


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [0] * 70, [0, 2**63]])
def test_a_tensor_of_impossible_sizes_is_refused(tmp_path, shape):
    path = tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"x": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"x.safetensors' (has|cannot).*; .*"):
        eqxshard.load_weights(path, {"x": jnp.zeros(1)})


# Anything else


@pytest.mark.parametrize(
    "kind, says",
    [
        ("fifo", "is not a regular file; give"),
        ("device", "is not a regular file; give"),
        ("loop", "does not exist; give a file of"),
    ],
)
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.eqx", "x.bin.index.json"])
def test_what_is_no_file_is_not_opened(tmp_path, kind, says, name):
    forbid(tmp_path / name, kind)
    with pytest.raises((FileNotFoundError, ValueError), match=rf"{name}' {says}"):
        eqxshard.load_weights(tmp_path / name, LIKE)


@pytest.mark.parametrize("content", [b"", b"hello", b"{}", bytes(100), b"PAR1" * 9])
def test_what_is_none_of_these_is_refused(tmp_path, content):
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"weights\.bin' is not a file of safetensors, tor"
    ):
        eqxshard.load_weights(path, LIKE)


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
    says = r"it is damaged|or is damaged|or it is damaged"
    with pytest.raises(ValueError, match=says):
        eqxshard.load_weights(tmp_path / name, LIKE)
    assert not hostile.has_run()
