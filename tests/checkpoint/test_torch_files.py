"""Files of torch.save, which torch reads if it is there."""

import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, part
from hostile_files import HostilePickle

import eqxshard


def test_without_torch_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "model.pt").touch()
    with pytest.raises(ValueError, match=r"import of torch halted.*; .* convert it to saf"):
        eqxshard.load_weights(tmp_path / "model.pt", {})


def test_files_of_torch_itself_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    half = {k: x.bfloat16() if x.ndim > 1 else x for k, x in model.state_dict().items()}
    small = torch.arange(3).to(torch.float8_e4m3fn)
    more = {"t": half["0.weight"].T, "deep": {"x": small}, "name": "x"}
    path = tmp_path / "model.pt"
    torch.save({**half, **more}, path)
    columns = jax.NamedSharding(make_mesh("fsdp=2"), jax.P(None, "fsdp"))
    like = {
        "0": {"weight": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=columns)},
        "t": jax.ShapeDtypeStruct((6, 4), jnp.float32),
        "deep": {"x": jax.ShapeDtypeStruct((3,), jnp.float8_e4m3fn)},
    }
    loaded = eqxshard.load_weights(path, like, partial=True)
    expected = half["0.weight"].float().numpy()
    np.testing.assert_array_equal(loaded["0"]["weight"], expected)
    assert part(loaded["0"]["weight"]) == (4, 3)
    np.testing.assert_array_equal(loaded["t"], expected.T)
    np.testing.assert_array_equal(loaded["deep"]["x"].astype(jnp.float32), [0, 1, 2])


def test_what_torch_does_not_read_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    path, hostile = tmp_path / "x.pt", HostilePickle(tmp_path)

    def refused():
        with pytest.raises(ValueError, match=r"x\.pt' cannot be read .*; fetch it again"):
            eqxshard.load_weights(path, {})

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", hostile.content)
        archive.writestr("archive/version", b"3\n")
    refused()
    assert not hostile.has_run()
    torch.save(torch.nn.Linear(2, 2), path)
    refused()
    torch.save({"x": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:-900])
    refused()
