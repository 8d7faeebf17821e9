"""Files of torch.save, written here byte by byte, and by torch if it is there."""

import io
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, part
from hostile_files import in_little_memory
from hypothesis import given, settings
from hypothesis import strategies as st

import eqxshard

STORAGES = {
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
}


#: Pickles whose reading, or what is read, grows much faster than they do.
GROWING = {
    # A memo that is a list as long as its largest index.
    "memo": b"}" + pickle.LONG_BINPUT + (2**32 - 1).to_bytes(4, "little"),
    # Dicts, each with the one before it twice.
    "dicts": b"}"
    + b"q\0"
    + b"".join(b"}(X\1\0\0\0ah\0X\1\0\0\0bh\0uq\0" for _ in range(60)),
    # A dict in itself.
    "itself": b"}q\0X\1\0\0\0ah\0s",
    # Tuples, each with the one before it twice, whose hash is a key.
    "tuples": b"}" + b")" + b"q\0h\0\x86" * 60 + b"K\1s",
    # One long tuple in another.
    "long tuples": b"}(" + b"K\1" * 101 + b"tK\1s",
    # A list that is copied into tuples, again and again.
    "copies": b"](" + b"K\1" * 101 + b"eq\0" + b"ctorch\nSize\nh\0\x85R",
    # Many bytes, as an instruction of a later protocol says.
    "bytes": b"\x96" + (2**42).to_bytes(8, "little"),
    "text": b"\x8d" + (2**42).to_bytes(8, "little"),
    # Long keys on the way to many tensors.
    "keys": b"X\x40\x42\x0f\0"
    + b"k" * 1_000_000
    + b"q\1}q\0"
    + b"".join(b"}h\1h\0sq\0" for _ in range(500)),
}


class Named:
    """Stands for a function or class of this name: pickled as such."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, *args):
        raise AssertionError("only to be pickled")


class Storage:
    def __init__(self, array, dtype=None):
        self.data = np.ascontiguousarray(array)
        self.dtype = dtype or str(self.data.dtype)


class Tensor:
    """A view of a storage, as torch pickles it."""

    def __init__(self, storage, shape=None, strides=None, offset=0, *rest):
        if not isinstance(storage, Storage):
            shape = np.shape(storage)
            strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
            storage = Storage(storage)
        self.storage = storage
        self.args = (offset, shape, strides, False, OrderedDict(), *rest)
        newer = rest and isinstance(rest[0], Named)
        self.function = "_rebuild_tensor_v3" if newer else "_rebuild_tensor_v2"


class Parameter:
    def __init__(self, tensor):
        self.tensor = tensor


#: Python's own in Python, which pyright does not know.
PythonPickler: Any = vars(pickle)["_Pickler"]


class Pickler(PythonPickler):
    """With the names of torch, which is not there."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = []

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Named):
            # GLOBAL: two lines.
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Tensor):
            named = Named("torch._utils", obj.function)
            self.save_reduce(named, (obj.storage, *obj.args))
        elif isinstance(obj, Parameter):
            named = Named("torch._utils", "_rebuild_parameter")
            self.save_reduce(named, (obj.tensor, True, OrderedDict()))
        else:
            super().save(obj, save_persistent_id)

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        if obj not in self.storages:
            self.storages.append(obj)
        kind = Named("torch", STORAGES.get(obj.dtype, obj.dtype))
        if obj.dtype == "bytes":
            kind = Named("torch.storage", "UntypedStorage")
        return ("storage", kind, str(self.storages.index(obj)), "cpu", obj.data.size)


def torch_save(path, obj, *, root="archive", order=b"little", compress=zipfile.ZIP_STORED):
    data = io.BytesIO()
    pickler = Pickler(data)
    pickler.dump(obj)
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr(f"{root}/data.pkl", data.getvalue())
        archive.writestr(f"{root}/byteorder", order)
        for i, storage in enumerate(pickler.storages):
            archive.writestr(f"{root}/data/{i}", storage.data.tobytes())
        archive.writestr(f"{root}/version", b"3\n")


def values(dtype: Any = "float32", shape=(4, 6), seed=0):
    return np.random.default_rng(seed).integers(0, 2, shape).astype(jnp.dtype(dtype))


def state_dict():
    """As a module's, which is an OrderedDict with an attribute."""
    result: Any = OrderedDict()
    result["up.weight"] = Tensor(values())
    result["up.bias"] = Parameter(Tensor(values(shape=(3,), seed=1)))
    result._metadata = OrderedDict({"": {"version": 1}})
    return result


LIKE = {
    "up": {
        "weight": jax.ShapeDtypeStruct((4, 6), jnp.float32),
        "bias": jax.ShapeDtypeStruct((3,), jnp.float32),
    }
}


def assert_loaded(loaded):
    np.testing.assert_array_equal(loaded["up"]["weight"], values())
    np.testing.assert_array_equal(loaded["up"]["bias"], values(shape=(3,), seed=1))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("torch") / "model.pt"
    torch_save(path, state_dict())
    return path


def refused(path, says, like=None):
    with pytest.raises(ValueError, match=says) as error:
        eqxshard.load_weights(path, LIKE if like is None else like)
    assert "\n" not in str(error.value) and path.name in str(error.value)


# Files that are read


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "model"])
def test_a_state_dict_is_read_into_shards(tmp_path, name):
    path = tmp_path / name
    torch_save(path, state_dict(), root=name.partition(".")[0])
    assert_loaded(eqxshard.load_weights(path, LIKE))
    columns = jax.NamedSharding(make_mesh("fsdp=2"), jax.P(None, "fsdp"))
    shardings = {"up": {"weight": columns, "bias": None}}
    loaded = eqxshard.load_weights(path, LIKE, shardings)
    assert_loaded(loaded)
    assert part(loaded["up"]["weight"]) == (4, 3)


def test_dicts_of_dicts_are_joined_by_dots_and_the_rest_is_left_out(tmp_path):
    path = tmp_path / "last.ckpt"
    run = {"epoch": 3, "name": "x", "rates": [0.1], "state": {0: Tensor(values())}}
    torch_save(path, {"model": state_dict(), "run": run})
    report = eqxshard.compare_weights(path, LIKE, rename={"^": "model."})
    assert not report.missing and report.unused == {"run.state.0": "float32[4,6]"}
    loaded = eqxshard.load_weights(path, LIKE, rename={"^": "model."}, partial=True)
    assert_loaded(loaded)


@pytest.mark.parametrize("dtype", STORAGES)
def test_every_type_is_read(tmp_path, dtype):
    path = tmp_path / "x.pt"
    torch_save(path, {"x": Tensor(values(dtype))})
    loaded = eqxshard.load_weights(path, {"x": jax.ShapeDtypeStruct((4, 6), dtype)})
    assert np.asarray(loaded["x"]).tobytes() == values(dtype).tobytes()


def test_newer_types_are_read(tmp_path):
    path = tmp_path / "x.pt"
    dtype = jnp.dtype("float8_e4m3fn")
    storage = Storage(values(dtype).view(np.uint8).reshape(-1), "bytes")
    name = Named("torch", "float8_e4m3fn")
    torch_save(path, {"x": Tensor(storage, (4, 6), (6, 1), 0, name)})
    loaded = eqxshard.load_weights(path, {"x": jax.ShapeDtypeStruct((4, 6), dtype)})
    assert np.asarray(loaded["x"]).tobytes() == values(dtype).tobytes()


def test_views_of_one_storage_are_read(tmp_path):
    path = tmp_path / "x.pt"
    storage = Storage(np.arange(24, dtype=np.float32))
    tree = {
        "transposed": Tensor(storage, (6, 4), (1, 6)),
        "row": Tensor(storage, (6,), (1,), 12),
        "scalar": Tensor(storage, (), (), 23),
        "empty": Tensor(storage, (0, 4), (4, 1)),
        "expanded": Tensor(storage, (3, 2), (0, 1), 4),
    }
    torch_save(path, tree)
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = {
        "transposed": whole.T,
        "row": whole[2],
        "scalar": whole[3, 5],
        "empty": whole[:0, :4],
        "expanded": np.broadcast_to(whole[0, 4:6], (3, 2)),
    }
    like = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in expected.items()}
    loaded = eqxshard.load_weights(path, like)
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_files_of_torch_itself_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    path = tmp_path / "model.pt"
    half = {k: x.bfloat16() if x.ndim > 1 else x for k, x in model.state_dict().items()}
    torch.save({**half, "t": half["0.weight"].T}, path)
    like = {
        "0": {"weight": jax.ShapeDtypeStruct((4, 6), jnp.float32)},
        "t": jax.ShapeDtypeStruct((6, 4), jnp.float32),
    }
    loaded = eqxshard.load_weights(path, like, partial=True)
    expected = half["0.weight"].float().numpy()
    np.testing.assert_array_equal(loaded["0"]["weight"], expected)
    np.testing.assert_array_equal(loaded["t"], expected.T)


# Files that are refused


def test_pickles_cannot_grow(tmp_path):
    """They are refused at once, or take no more than their bytes."""
    for name, content in GROWING.items():
        with zipfile.ZipFile(tmp_path / f"{name}.pt", "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\2" + content + b".")
    code = f"""
import pathlib
import eqxshard
for path in pathlib.Path({str(tmp_path)!r}).iterdir():
    try:
        eqxshard.load_weights(path, {{}})
    except ValueError as error:
        print(error)
"""
    lines = in_little_memory(code).splitlines()
    assert len(lines) == len(GROWING) - 1 and all("; " in line for line in lines)


class Call:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


HOSTILE = {
    "posix.system": lambda path: Call(Named("posix", "system"), f"touch {path}"),
    "builtins.eval": lambda path: Call(
        Named("builtins", "eval"), f"open({str(path)!r}, 'w').close()"
    ),
    "builtins.getattr": lambda path: Call(Named("builtins", "getattr"), [], "append"),
    "torch.load": lambda path: Call(Named("torch", "load"), str(path)),
    "torch._utils.__import__": lambda path: Call(Named("torch._utils", "__import__"), "os"),
    "collections.OrderedDict.update": lambda path: Call(
        Named("collections", "OrderedDict.update"), {}
    ),
    "pathlib.Path": lambda path: Call(Named("pathlib", "Path"), str(path)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_asks_for_anything_else_is_refused(tmp_path, name):
    path, touched = tmp_path / "hostile.pt", tmp_path / "touched"
    torch_save(path, {**state_dict(), "x": HOSTILE[name](touched)})
    refused(path, rf"hostile\.pt' asks for {name}, which is not called, because files can")
    assert not touched.exists()


def test_what_is_refused_would_have_run(tmp_path):
    """So the test above can fail."""
    touched = tmp_path / "touched"
    data = io.BytesIO()
    Pickler(data).dump(HOSTILE["posix.system"](touched))
    subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.loads({data.getvalue()!r})"],
        check=True,
    )
    assert touched.exists()


def test_a_pickle_that_changes_what_it_names_changes_nothing(file, tmp_path):
    from eqxshard.checkpoint import _torch_files

    before = dict(vars(_torch_files._rebuild_tensor))
    for name in ("torch._utils _rebuild_tensor_v2", "collections OrderedDict"):
        path = tmp_path / "hostile.pt"
        # BUILD with a dict, and with the attributes of slots.
        for state in ({"x": 1}, (None, {"__defaults__": (1, 2), "x": 1})):
            data = io.BytesIO()
            pickler = Pickler(data)
            pickler.write(pickle.PROTO + bytes([2]))
            pickler.save(Named(*name.split()))
            pickler.save(state)
            pickler.write(pickle.BUILD + pickle.STOP)
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", data.getvalue())
            with pytest.raises(ValueError, match=r"hostile\.pt"):
                eqxshard.load_weights(path, LIKE)
    assert vars(_torch_files._rebuild_tensor) == before
    assert _torch_files._rebuild_tensor.__defaults__ is None
    assert not hasattr(OrderedDict, "x")
    assert_loaded(eqxshard.load_weights(file, LIKE))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((5, 6), (6, 1), 0),
        ((4, 6), (6, 1), 1),
        ((4, 6), (-6, 1), 23),
        ((4, 6), (2**61, 1), 0),
        ((-4, 6), (6, 1), 0),
        ((4,), (6, 1), 0),
        ((4, 6), (6, 1), -1),
        ((4.0, 6), (6, 1), 0),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(tmp_path, shape, strides, offset):
    path = tmp_path / "x.pt"
    storage = Storage(np.zeros(24, np.float32))
    torch_save(path, {"x": Tensor(storage, shape, strides, offset)})
    refused(path, r"x\.pt' cannot be read \(ValueError: a tensor (of|has)", {"x": None})


def test_tensors_that_are_views_in_other_ways_are_refused(tmp_path):
    path = tmp_path / "x.pt"
    storage = Storage(np.zeros(2, np.float32))
    torch_save(path, {"x": Tensor(storage, (2,), (1,), 0, {"conj": True})})
    refused(path, r"x\.pt' has a tensor with a pending conjugation")


def test_other_archives_are_refused(file, tmp_path):
    path = tmp_path / "x.pt"
    torch_save(path, state_dict(), compress=zipfile.ZIP_DEFLATED)
    refused(path, r"x\.pt' is compressed; write it")
    torch_save(path, state_dict(), order=b"big")
    refused(path, r"x\.pt' was written on a big-endian machine")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", b"")
    refused(path, r"x\.pt' is a zip archive, but not one of torch\.save; give")
    path.write_bytes(file.read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/constants.pkl", b"")
    refused(path, r"x\.pt' is a TorchScript program; write its")


def test_the_format_before_1_6_is_refused(tmp_path):
    path = tmp_path / "x.pt"
    # Its magic number.
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + bytes(99))
    refused(path, r"x\.pt' has the format of torch before 1\.6; load it with torch")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_keeps_its_shapes(file, tmp_path_factory, data):
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    path = tmp_path_factory.mktemp("damaged") / "x.pt"
    path.write_bytes(content)
    try:
        loaded = eqxshard.load_weights(path, LIKE)
    except ValueError as error:
        assert "x.pt" in str(error)
    else:
        # A bit of a number, or of what is not used.
        assert loaded["up"]["weight"].shape == (4, 6)
