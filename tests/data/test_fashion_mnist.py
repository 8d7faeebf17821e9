import gzip
import hashlib

import numpy as np
import platformdirs
import pytest
from helpers import REAL, needs_real_data

from eqxshard.data import _fashion_mnist as module
from eqxshard.data import fashion_mnist, load_fashion_mnist

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
IMAGE = np.random.default_rng(0).integers(0, 256, (6, 28, 28), np.uint8)
LABEL = np.array([9, 0, 3, 1, 2, 9], np.uint8)
HEADER = {
    IMAGES: bytes([0, 0, 8, 3, 0, 0, 0, 6, 0, 0, 0, 28, 0, 0, 0, 28]),
    LABELS: bytes([0, 0, 8, 1, 0, 0, 0, 6]),
}
FILES = {
    IMAGES: gzip.compress(HEADER[IMAGES] + IMAGE.tobytes(), mtime=0),
    LABELS: gzip.compress(HEADER[LABELS] + LABEL.tobytes(), mtime=0),
}


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Keep tests away from the user's own cache and settings, and from the internet."""
    monkeypatch.delenv("EQXSHARD_DATA_DIR", raising=False)
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: str(tmp_path / app))
    small = module.synthetic_fashion
    monkeypatch.setattr(module, "synthetic_fashion", lambda split: small(split, size=20))


@pytest.fixture
def tiny(monkeypatch):
    """Replace the training split by six examples."""

    def entry(name, shape):
        return module._File(name, shape, hashlib.sha256(FILES[name]).hexdigest())

    split = {"image": entry(IMAGES, (6, 28, 28)), "label": entry(LABELS, (6,))}
    monkeypatch.setitem(module._FILES, "train", split)


def put(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or FILES:
        (folder / name).write_bytes(FILES[name])
    return folder


def assert_is_tiny(source):
    batch = source.gather(np.arange(len(source)))
    assert set(batch) == {"image", "label"}
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    np.testing.assert_array_equal(batch["image"], IMAGE)
    np.testing.assert_array_equal(batch["label"], LABEL.astype(np.int32))


@needs_real_data
def test_the_real_data():
    train, test = load_fashion_mnist("auto", data_dir=REAL)
    for source, first in ((train, [9, 0, 0, 3, 0]), (test, [9, 2, 1, 1, 6])):
        assert (source.name, source.unit, source.warning) == ("fashion_mnist", "images", "")
        image, label = source.arrays["image"], source.arrays["label"]
        count = len(source)
        assert image.shape == (count, 28, 28) and image.dtype == np.uint8
        np.testing.assert_array_equal(label[:5], first)
        np.testing.assert_array_equal(np.bincount(label), [count // 10] * 10)
        assert image.mean() / 255 == pytest.approx(0.2860, abs=2e-3)
    assert (len(train), len(test)) == (60_000, 10_000)


@pytest.mark.parametrize("where", ["argument", "variable", "cache"])
@pytest.mark.parametrize("folder", ["fashion_mnist", "."])
def test_files_are_found_where_they_may_be(tiny, tmp_path, monkeypatch, where, folder):
    """The argument comes before the variable, and that before the cache."""
    directories = {"argument": "data", "variable": "variable", "cache": "eqxshard"}
    for other in list(directories)[list(directories).index(where) + 1 :]:
        (put(tmp_path / directories[other]) / IMAGES).write_bytes(b"")
    if where != "cache":
        monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path / "variable"))
    directory = tmp_path / directories[where]
    put(directory / folder, LABELS)
    put(directory, IMAGES)
    options = {"data_dir": directory} if where == "argument" else {}
    assert_is_tiny(fashion_mnist("train", **options))


def test_missing_files_are_downloaded_once(tiny, tmp_path, mirror, monkeypatch):
    mirror.files = {f"/base/{name}": data for name, data in FILES.items()}
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", f"{mirror.url}/base/")
    put(tmp_path / "data", IMAGES)
    for _ in range(2):
        assert_is_tiny(fashion_mnist("train", data_dir=tmp_path / "data"))
    assert mirror.requests == [f"/base/{LABELS}"]
    assert (tmp_path / "data" / "fashion_mnist" / LABELS).read_bytes() == FILES[LABELS]


@pytest.mark.parametrize("download", [True, False])
def test_missing_files_are_errors_that_say_what_to_do(tmp_path, download):
    says = r"there is no .*images.*; put the official file there, or set data_dir"
    with pytest.raises(FileNotFoundError, match=says) as caught:
        fashion_mnist("train", data_dir=tmp_path, download=download)
    assert ("refused" in str(caught.value)) == download


def test_a_damaged_file_is_an_error_and_is_kept(tiny, tmp_path):
    path = put(tmp_path) / IMAGES
    path.write_bytes(FILES[IMAGES][:-1])
    for read in (fashion_mnist, lambda _, **options: load_fashion_mnist("auto", **options)):
        with pytest.raises(ValueError, match=rf"{IMAGES} is damaged: its SHA-256 .*; del"):
            read("train", data_dir=tmp_path)
    assert path.read_bytes() == FILES[IMAGES][:-1]


@pytest.mark.parametrize("data", ["auto", "synthetic"])
def test_generated_images_come_with_a_warning(tmp_path, data):
    train, test = load_fashion_mnist(data, data_dir=tmp_path)
    for source in (train, test):
        assert (source.name, source.unit) == ("synthetic", "images")
        assert source.warning.startswith("Training on generated images, NOT on Fashion-MN")
        assert ("could not be downloaded" in source.warning) == (data == "auto")
    assert (train.arrays["image"] != test.arrays["image"]).any()


def test_mistakes_are_errors(tmp_path, monkeypatch, unannotated):
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        load_fashion_mnist("fashion_mnist", data_dir=tmp_path)
    with pytest.raises(ValueError, match="data='mnist' is unknown; use 'auto'"):
        load_fashion_mnist("mnist")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="split='validation' is not 'train' or 'test'"):
        fashion_mnist("validation")
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", "ftp://example.org/")
    with pytest.raises(ValueError, match=r"\$EQXSHARD_FASHION_MNIST_URL is 'ftp:.*; make"):
        fashion_mnist("train", data_dir=tmp_path)
