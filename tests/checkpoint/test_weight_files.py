"""Several files with an index, and files that are neither."""

import json

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
    with pytest.raises(ValueError, match=r"index\.json' cannot be read .*; fetch it again"):
        eqxshard.load_weights(path, LIKE)


def test_folders_that_leave_a_choice_or_none_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}' has 0 files to choose"):
        eqxshard.load_weights(tmp_path, LIKE)
    for name in "ab":
        eqxshard.save_weights(tmp_path / f"{name}.safetensors", TREE)
    with pytest.raises(FileNotFoundError, match="has 2 files to choose from; give the"):
        eqxshard.load_weights(tmp_path, LIKE)


@pytest.mark.parametrize("shape", [(-1, 16), (2, -3), (2**62, 2**62), (2**45,)])
def test_an_array_of_impossible_sizes_is_refused(tmp_path, shape):
    entry = {"dtype": "F32", "shape": [0, *map(abs, shape)], "data_offsets": [0, 0]}
    header = json.dumps({"x": entry}).encode()
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"/x\..* (cannot be read|does not fit)"):
        eqxshard.load_weights(tmp_path / "x.safetensors", {"x": jnp.zeros(1)})


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json"])
def test_what_is_no_file_is_not_opened(tmp_path, kind, name):
    forbid(tmp_path / name, kind)
    with pytest.raises((OSError, ValueError), match=r"not a regular file|symbolic link"):
        eqxshard.load_weights(tmp_path / name, LIKE)


@pytest.mark.parametrize(
    "name", ["x.safetensors", "x.safetensors.index.json", "x.pt", "x.bin", "x.eqx"]
)
def test_pickles_are_not_read(tmp_path, name):
    hostile = HostilePickle(tmp_path)
    (tmp_path / name).write_bytes(hostile.content)
    with pytest.raises(ValueError, match=rf"{name}' .*; fetch it again, or convert it"):
        eqxshard.load_weights(tmp_path / name, LIKE)
    assert not hostile.has_run()
