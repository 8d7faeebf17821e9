"""A model's arrays under other names, in other layouts, in several files."""

import json
import os
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal, make_mesh
from process_helpers import finished
from safetensors.numpy import load_file

import eqxshard

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


#: Two layers with their keys and values in one array, and experts in layers.
MODEL = {
    "norm": normal(4),
    "blocks": {"qkv": normal(2, 2, 4, 3, 8), "up": normal(2, 8, 16)},
    "experts": normal(2, 3, 4, 8),
}
RENAME = {
    "norm": "model.norm.weight",
    "blocks.qkv": [f"model.layers.*.{x}_proj" for x in "qkv"],
    "blocks.up": "model.layers.*.up.weight",
    "experts": "moe.*.experts.*.w1",
}


def rename(path):
    return RENAME[path]


def outward(path, array):
    if path == "blocks.up":
        return array.T
    if path == "blocks.qkv":
        parts = array[:, :2], array[:, 2:3], array[:, 3:]
        return [part.reshape(-1, 8) for part in parts]
    return array


def inward(path, array):
    if path == "blocks.up":
        return array.T
    if path != "blocks.qkv":
        return array
    return np.concatenate([part.reshape(2, -1, 3, 8) for part in array], axis=1)


def save(path, model=MODEL, **options):
    options = {"rename": rename, "transform": outward} | options
    eqxshard.save_weights(path, model, **options)


def load(path, shardings=None):
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), MODEL)
    return eqxshard.load_weights(path, like, shardings, rename=rename, transform=inward)


# Names and layouts


def test_arrays_have_the_names_and_layouts_of_others(tmp_path):
    file = tmp_path / "model.safetensors"
    save(file)
    arrays = load_file(file)
    assert len(arrays) == 1 + 6 + 2 + 6
    qkv, up = np.asarray(MODEL["blocks"]["qkv"]), np.asarray(MODEL["blocks"]["up"])
    for i in range(2):
        proj = {x: arrays[f"model.layers.{i}.{x}_proj"] for x in "qkv"}
        np.testing.assert_array_equal(proj["q"], qkv[i, :, :2].reshape(12, 8))
        np.testing.assert_array_equal(proj["k"], qkv[i, :, 2].reshape(6, 8))
        np.testing.assert_array_equal(proj["v"], qkv[i, :, 3].reshape(6, 8))
        np.testing.assert_array_equal(arrays[f"model.layers.{i}.up.weight"], up[i].T)
        for j in range(3):
            expert = arrays[f"moe.{i}.experts.{j}.w1"]
            np.testing.assert_array_equal(expert, MODEL["experts"][i, j])


@pytest.mark.parametrize("spec", [None, jax.P("fsdp"), jax.P(("data", "fsdp"))])
def test_they_come_back_bit_for_bit_from_any_mesh(tmp_path, spec):
    # A zero with a sign, and a number that is none, in layers of one device each.
    model = MODEL | {
        "experts": MODEL["experts"].at[0, 0, 0, :2].set(jnp.array([-0.0, jnp.nan]))
    }
    there = None
    if spec is not None:
        mesh = make_mesh("data=2,fsdp=2")
        stacked = jax.NamedSharding(mesh, jax.P("fsdp", None, "data"))
        whole = jax.NamedSharding(mesh, jax.P())
        there = {"norm": whole, "blocks": stacked, "experts": stacked}
        model = jax.device_put(model, there)
    save(tmp_path / "model.safetensors", model)
    for target in (None, there):
        loaded = load(tmp_path / "model.safetensors", target)
        for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(model)):
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


# What is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"rename": lambda path: "x", "model": {"a": normal(2), "b": normal(2)}},
            r"rename gives a and b the same name, x; give each array its own, or None",
        ),
        (
            {"rename": lambda path: "h.*.x.*", "model": {"a": normal(2)}},
            r"a has the shape \[2\], and h\.\*\.x\.\* more stars than that",
        ),
        (
            {"transform": None},
            r"blocks\.qkv has 3 names in the file and one array, .*; write a transform=",
        ),
        (
            {"transform": lambda path, x: [x, x] if path == "blocks.qkv" else x},
            r"blocks\.qkv has 3 names in the file and 2 .*; write a transform=",
        ),
        (
            {
                "rename": None,
                "model": {"a": normal(2)},
                "transform": lambda path, x: x.astype(np.complex128),
            },
            r"a has dtype complex128, which safetensors does not have",
        ),
        ({"max_bytes": 0}, r"max_bytes must be positive, got 0\."),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        save(tmp_path / "model.safetensors", **options)
    assert not list(tmp_path.iterdir())


# Several files


def test_what_is_too_large_for_one_file_is_in_several(tmp_path):
    file = tmp_path / "new" / "model.safetensors"
    save(file, max_bytes=1000)
    names = sorted(path.name for path in file.parent.iterdir())
    index = json.loads((file.parent / names.pop()).read_text())
    assert names == [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)]
    assert index["metadata"] == {
        "total_size": sum(x.nbytes for x in jax.tree.leaves(MODEL))
    }
    held = {name: {*load_file(file.parent / name)} for name in names}
    assert sum(map(len, held.values())) == len(index["weight_map"]) == 15
    for array, name in index["weight_map"].items():
        assert array in held[name]
    for name in names:
        assert sum(x.nbytes for x in load_file(file.parent / name).values()) <= 1000
    # By the name that was asked for, the index, and the folder.
    for path in (file, file.with_name("model.safetensors.index.json"), file.parent):
        assert_equal(load(path), MODEL)


@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch, fails_at):
    from safetensors.numpy import save_file

    calls = []

    def fail(arrays, path, metadata):
        save_file(arrays, path, metadata)
        calls.append(path)
        if len(calls) > fails_at:
            raise KeyboardInterrupt

    file = tmp_path / "model.safetensors"
    save(file, max_bytes=1000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        save(file, jax.tree.map(lambda x: 2 * x, MODEL), max_bytes=1000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_host_holds_one_file_at_a_time(tmp_path):
    # Split over devices: what is whole on one CPU is the host's memory already.
    there = jax.NamedSharding(make_mesh("data=2,fsdp=4"), jax.P(None, "fsdp", "data"))
    # Two of each, because an array may keep what was fetched of it once.
    first, model = (
        {"up": jax.device_put(jnp.ones((8, 256, 128)), there), "down": jnp.ones((2, 4))}
        for _ in range(2)
    )
    file, most = tmp_path / "model.safetensors", 2**18
    names = {"up": "h.*.up", "down": "down"}
    eqxshard.save_weights(file, first, rename=names.get)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        eqxshard.save_weights(file, model, rename=names.get, max_bytes=most)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = model["up"].nbytes
    assert size == 4 * most
    # A file, the array that did not fit into it, and what JAX keeps of its programs.
    assert peak - before < most + size / 8 + most < size
    assert after - before < most


def test_one_file_replaces_several_and_the_other_way_round(tmp_path):
    file, twice = tmp_path / "model.safetensors", jax.tree.map(lambda x: 2 * x, MODEL)
    for model, most in ((MODEL, 1), (twice, None), (MODEL, 1000)):
        save(file, model, max_bytes=most)
        assert_equal(load(file), model)
        assert file.exists() == (most is None)


# Several processes


PROCESSES = """
import sys
import jax, jax.numpy as jnp
import eqxshard

eqxshard.initialize()
mesh = eqxshard.make_mesh(data=1, fsdp=2)
there = jax.NamedSharding(mesh, jax.P("fsdp"))
x = jax.jit(lambda: jnp.arange(8.0), out_shardings=there)()
for path in sys.argv[1:]:
    try:
        eqxshard.save_weights(path, {"x": x, "y": 2 * x})
        print("is there:", eqxshard.load_weights(path, {"x": x, "y": x})["y"].shape)
    except OSError as error:
        print(error)
print("sum:", float(jnp.sum(x)))
"""


@pytest.mark.slow
def test_an_error_of_process_0_is_raised_in_all(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "file"
    script.write_text(PROCESSES)
    file.touch()
    bad, good = file / "w.safetensors", tmp_path / "w.safetensors"
    command = [sys.executable, "-m", "eqxshard.launch", "--processes=2"]
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    status, out, err = finished(
        [*command, "--devices-per-process=1", script, bad, good], env=env
    )
    assert status == 0, out + err
    why = f"[Errno 17] File exists: '{file}'"
    assert sorted(out.splitlines()) == [
        "[0] " + why,
        "[0] is there: (8,)",
        "[0] sum: 28.0",
        "[1] is there: (8,)",
        f"[1] process 0 could not write '{bad}': {why}",
        "[1] sum: 28.0",
    ]
