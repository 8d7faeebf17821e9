"""A model's arrays under other names and in other layouts."""

import os
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
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
    options = {"rename": RENAME.get, "transform": outward} | options
    eqxshard.save_weights(path, model, **options)


def test_arrays_have_the_names_and_layouts_of_others(tmp_path):
    file = tmp_path / "new" / "model.safetensors"
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


@pytest.mark.parametrize("spec", [None, jax.P("fsdp", None, "data")])
def test_they_come_back_bit_for_bit_from_any_mesh(tmp_path, spec):
    # A zero with a sign, and a number that is none, in layers of one device each.
    model = MODEL | {
        "experts": MODEL["experts"].at[0, 0, 0, :2].set(jnp.array([-0.0, jnp.nan]))
    }
    file, there = tmp_path / "model.safetensors", jax.tree.map(lambda _: None, MODEL)
    if spec is not None:
        stacked = jax.NamedSharding(make_mesh("data=2,fsdp=2"), spec)
        there = jax.tree.map(lambda _: stacked, MODEL)
        there["norm"] = jax.NamedSharding(stacked.mesh, jax.P())
        model = jax.device_put(model, there)
    save(file, model)
    like = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        *(MODEL, there),
    )
    loaded = eqxshard.load_weights(file, like, rename=RENAME.get, transform=inward)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(model)):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"rename": lambda path: "x", "model": {"a": normal(2), "b": normal(2)}},
            r"rename gives b and another array the name x; give each its own, or None",
        ),
        (
            {"transform": lambda path, x: [x, x] if path == "blocks.qkv" else x},
            r"blocks\.qkv has 3 names in the file; .* returns a list",
        ),
        (
            {"transform": lambda path, x: x.astype(complex), "rename": None},
            r"has dtype complex128, which safetensors does not have",
        ),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        save(tmp_path / "model.safetensors", **options)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_save_leaves_what_was_there(tmp_path):
    def interrupt(path, array):
        if path == "norm" and array.any():  # Zeros only ask for shapes.
            raise KeyboardInterrupt
        return outward(path, array)

    file = tmp_path / "model.safetensors"
    save(file)
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        save(file, transform=interrupt)
    assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]


def test_an_index_of_other_weights_stays(tmp_path):
    """It would be read instead of the file, so the file is not written either."""
    file = tmp_path / "model.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"beside it, model\.safetensors\.index\.json; mo"):
        save(file)
    assert index.read_text() == "{}" and [*tmp_path.iterdir()] == [index]


def test_two_that_write_one_file_leave_the_whole_of_one(tmp_path):
    """The second begins and ends while the first is in the middle of its file."""
    file = tmp_path / "model.safetensors"
    first, second = ({"a": jnp.full(64, x), "b": jnp.full(64, x)} for x in (1.0, 2.0))

    def meanwhile(path, array):
        if path == "b" and array.any():
            eqxshard.save_weights(file, second)
            assert set(load_file(file)["a"]) == {2.0}
        return array

    eqxshard.save_weights(file, first, transform=meanwhile)
    assert [*tmp_path.iterdir()] == [file]
    assert {name: set(x) for name, x in load_file(file).items()} == {"a": {1.0}, "b": {1.0}}


def test_the_host_holds_one_array_at_a_time(tmp_path):
    # Split over devices: a whole array on one CPU is in the host's memory already.
    there = jax.NamedSharding(make_mesh("data=2,fsdp=4"), jax.P(None, "fsdp", "data"))
    # Two of each, because an array may keep the copy that was fetched of it.
    first, model = (
        {"up": jax.device_put(jnp.ones((16, 256, 256)), there)} for _ in range(2)
    )
    file, names = tmp_path / "model.safetensors", {"up": "h.*.up"}
    eqxshard.save_weights(file, first, rename=names.get)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        eqxshard.save_weights(file, model, rename=names.get)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A few of the sixteen layers, and the memory of JAX's programs.
    assert peak - before < model["up"].nbytes / 4
    # Others may read it, if they may read other files.
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


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
    says = f"'{bad}' could not be written: File exists; give another path, or make room."
    lines = (says, "is there: (8,)", "sum: 28.0")
    assert sorted(out.splitlines()) == [f"[{i}] {line}" for i in (0, 1) for line in lines]
