"""Datasets that are downloaded or generated: Fashion-MNIST and Shakespeare."""

import gzip
import hashlib
import sys

import numpy as np
import platformdirs
import pytest
from helpers import REAL, needs_real_data

from eqxshard.data import _fashion_mnist, fashion_mnist, load_fashion_mnist
from eqxshard.data import synthetic_fashion as synthetic
from eqxshard.data._datasets import read_file
from eqxshard.data.text import _corpus, shakespeare

IMAGES, LABELS = "train-images-idx3", "train-labels-idx1"
IMAGE = np.random.default_rng(0).integers(0, 256, (6, 28, 28), np.uint8)
LABEL = np.array([9, 0, 3, 1, 2, 9], np.uint8)
FILES = {
    IMAGES: gzip.compress(b"header" + IMAGE.tobytes(), mtime=0),
    LABELS: gzip.compress(b"header" + LABEL.tobytes(), mtime=0),
}
TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """Keep tests away from the user's own cache and settings, and from the internet."""
    monkeypatch.delenv("EQXSHARD_DATA_DIR", raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9/")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: str(tmp_path / app))


@pytest.fixture
def tiny(monkeypatch, server):
    """The training split has six examples, and the plays one line."""
    for name, data in FILES.items():
        monkeypatch.setitem(_fashion_mnist._SHA256, name, sha256(data))
        server.files[f"/{name}-ubyte.gz"] = data
    monkeypatch.setitem(_fashion_mnist._SIZES, "train", 6)
    monkeypatch.setattr(_fashion_mnist, "_URL", server.url)
    server.files["/input.txt"] = TEXT
    monkeypatch.setattr(_corpus, "_SHA256", sha256(TEXT))
    monkeypatch.setattr(_corpus, "_URL", f"{server.url}/input.txt")


def put(folder):
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / f"{name}-ubyte.gz").write_bytes(data)


def assert_tiny(source):
    assert source.arrays["label"].dtype == np.int32
    np.testing.assert_array_equal(source.arrays["image"], IMAGE)
    np.testing.assert_array_equal(source.arrays["label"], LABEL.astype(np.int32))


# Files


@pytest.mark.parametrize("failure", [None, "404", "SHA256"])
def test_a_file_is_downloaded_once_and_whole(server, tmp_path, failure):
    content = np.random.default_rng(0).bytes(400_000)
    path, url = tmp_path / "folder" / "images.gz", f"{server.url}/images.gz"
    if failure != "404":
        server.files["/images.gz"] = content[:9] if failure else content
    if failure is None:
        for _ in range(2):
            assert read_file(path, url, sha256(content)) == content
        assert len(server.requests) == 1
        assert list(path.parent.iterdir()) == [path]
    else:
        with pytest.raises(FileNotFoundError, match=rf"{failure}.*; put the file there"):
            read_file(path, url, sha256(content))
        assert not list(path.parent.iterdir())


def test_a_damaged_file_is_an_error_and_is_kept(tiny, tmp_path):
    put(tmp_path / "fashion_mnist")
    path = tmp_path / "fashion_mnist" / f"{IMAGES}-ubyte.gz"
    path.write_bytes(b"damaged")
    for read in (fashion_mnist, lambda split, **options: load_fashion_mnist(**options)):
        with pytest.raises(ValueError, match=r"is damaged: its SHA-256 .*; delete it"):
            read("train", data_dir=tmp_path)
    assert path.read_bytes() == b"damaged"


def test_without_pooch_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'eqxshard\[recipes\]'"):
        fashion_mnist("train", data_dir=tmp_path)


@pytest.mark.parametrize("where", ["data", "variable", "eqxshard"])
def test_files_are_found_where_they_may_be(tiny, tmp_path, monkeypatch, where):
    """The argument comes before the variable, and that before the cache."""
    put(tmp_path / where / "fashion_mnist")
    if where != "eqxshard":
        monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path / "variable"))
    data_dir = tmp_path / "data" if where == "data" else None
    assert_tiny(fashion_mnist("train", data_dir=data_dir))


def test_missing_files_are_downloaded(tiny, tmp_path):
    assert_tiny(fashion_mnist("train", data_dir=tmp_path))
    corpus = shakespeare(tmp_path)
    assert corpus.name == "shakespeare" and corpus.vocab_size == 257
    assert len(corpus.train) == int(0.9 * len(TEXT))
    assert len(corpus.train) + len(corpus.valid) == len(TEXT)


@needs_real_data
def test_the_real_data():
    train, test = load_fashion_mnist("auto", data_dir=REAL)
    for source, first in ((train, [9, 0, 0, 3, 0]), (test, [9, 2, 1, 1, 6])):
        assert (source.name, source.unit, source.warning) == ("fashion_mnist", "images", "")
        image, label = source.arrays["image"], source.arrays["label"]
        assert image.shape == (len(source), 28, 28) and image.dtype == np.uint8
        np.testing.assert_array_equal(label[:5], first)
        np.testing.assert_array_equal(np.bincount(label), [len(source) // 10] * 10)
        assert image.mean() / 255 == pytest.approx(0.2860, abs=2e-3)
    corpus = shakespeare(REAL)
    assert (len(corpus.train), len(corpus.valid)) == (1_003_854, 111_540)
    assert corpus.vocab_size == 257


def test_mistakes_are_errors(tmp_path, unannotated):
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        load_fashion_mnist("fashion_mnist", data_dir=tmp_path)
    for make, says in (
        (lambda: load_fashion_mnist("mnist"), "data='mnist' is unknown"),  # pyright: ignore
        (lambda: fashion_mnist("validation"), "split='validation' is not"),
        (lambda: synthetic("validation"), "split='validation' is not 'train' or 'test'"),
        (lambda: synthetic("train", size=0), "size=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=says):
            make()


# Generated images


@pytest.mark.parametrize("data", ["auto", "synthetic"])
def test_generated_images_come_with_a_warning(tmp_path, monkeypatch, data):
    monkeypatch.setattr(_fashion_mnist, "_SIZES", {"train": 20, "test": 20})
    train, test = load_fashion_mnist(data, data_dir=tmp_path)
    for source in (train, test):
        assert (source.name, source.unit) == ("synthetic", "images")
        assert source.warning.startswith("Training on generated images, NOT on Fashion-MN")
        assert ("could not be downloaded" in source.warning) == (data == "auto")
    assert (train.arrays["image"] != test.arrays["image"]).any()


def test_generated_images_are_like_those_of_fashion_mnist():
    train = synthetic("train", size=5_000)
    image, label = train.arrays["image"], train.arrays["label"]
    assert image.shape == (5_000, 28, 28) and image.dtype == np.uint8
    assert label.dtype == np.int32 and len(set(label[:100])) == 10
    np.testing.assert_array_equal(np.bincount(label), [500] * 10)
    # Means tell some classes apart, but not all.
    means = np.stack([image[label == i].mean(axis=0) for i in range(10)])
    test = synthetic("test", size=500).arrays
    distances = ((test["image"][:, None] - means) ** 2).sum(axis=(2, 3))
    assert 0.5 < (distances.argmin(axis=1) == test["label"]).mean() < 0.99


def test_the_seed_decides():
    first, again, other = (synthetic("train", seed=s, size=23).arrays for s in (1, 1, 2))
    np.testing.assert_array_equal(first["image"], again["image"])
    np.testing.assert_array_equal(first["label"], again["label"])
    assert (first["image"] != other["image"]).any()
