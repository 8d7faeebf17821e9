import numpy as np
import platformdirs
import pytest
from helpers import REAL, needs_real_data

from eqxshard.data import load_fashion_mnist
from eqxshard.data._fashion_mnist import _choose


@pytest.fixture(autouse=True)
def unavailable(tmp_path, monkeypatch):
    """Without the data and a connection; synthetic data are drawn in a small size."""
    monkeypatch.delenv("EQXSHARD_DATA_DIR", raising=False)
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: str(tmp_path / app))
    draw = _choose.synthetic_fashion
    monkeypatch.setattr(_choose, "synthetic_fashion", lambda split: draw(split, size=20))


def assert_synthetic(sources, reason):
    for source in sources:
        assert (source.name, source.unit) == ("synthetic", "images")
        assert source.warning.startswith("Training on generated images, NOT on Fashion-MN")
        assert reason in source.warning
    train, test = sources
    assert (train.arrays["image"] != test.arrays["image"]).any()


def test_auto_falls_back_to_synthetic_data_with_a_warning(tmp_path):
    reason = f"{tmp_path / 'eqxshard'}, and could not be downloaded"
    assert_synthetic(load_fashion_mnist(), reason)
    reason = f"{tmp_path / 'data'}, and could not be downloaded"
    assert_synthetic(load_fashion_mnist("auto", data_dir=tmp_path / "data"), reason)


def test_fashion_mnist_raises_if_it_is_not_available():
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        load_fashion_mnist("fashion_mnist")


def test_auto_raises_if_a_file_is_damaged(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged: it is empty"):
        load_fashion_mnist("auto", data_dir=tmp_path)


def test_synthetic_does_not_look_for_the_data(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    sources = load_fashion_mnist("synthetic", data_dir=tmp_path)
    assert_synthetic(sources, "Requested with data='synthetic'.")


@needs_real_data
@pytest.mark.parametrize("data", ["auto", "fashion_mnist"])
def test_the_real_data_have_no_warning(data):
    train, test = load_fashion_mnist(data, data_dir=REAL)
    assert (len(train), len(test)) == (60_000, 10_000)
    for source in (train, test):
        assert (source.name, source.unit, source.warning) == ("fashion_mnist", "images", "")
    np.testing.assert_array_equal(test.arrays["label"][:5], [9, 2, 1, 1, 6])


def test_other_data_are_an_error(unannotated):
    with pytest.raises(ValueError, match="data='mnist' is not 'auto', 'fashion_mnist' or"):
        load_fashion_mnist("mnist")  # pyright: ignore[reportArgumentType]
