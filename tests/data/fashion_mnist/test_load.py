import gzip
import hashlib
import re
from pathlib import Path

import numpy as np
import platformdirs
import pytest
from helpers import REAL, needs_real_data

from eqxshard.data import fashion_mnist
from eqxshard.data._fashion_mnist import _load

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


@pytest.fixture
def tiny(monkeypatch):
    """Replace the training split by six examples."""

    def entry(name: str, shape: tuple[int, ...]) -> _load._File:
        digest = hashlib.sha256(FILES[name]).hexdigest()
        return _load._File(name, shape, digest)

    split = {"image": entry(IMAGES, (6, 28, 28)), "label": entry(LABELS, (6,))}
    monkeypatch.setitem(_load._FILES, "train", split)


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or FILES:
        (folder / name).write_bytes(FILES[name])
    return folder


def assert_is_tiny(source):
    batch = source.gather(np.arange(len(source)))
    assert set(batch) == {"image", "label"}
    assert batch["image"].dtype == np.uint8
    assert batch["label"].dtype == np.int32
    np.testing.assert_array_equal(batch["image"], IMAGE)
    np.testing.assert_array_equal(batch["label"], LABEL.astype(np.int32))


def message_of(error: type[Exception], **options) -> str:
    with pytest.raises(error) as caught:
        fashion_mnist("train", **options)
    return str(caught.value)


@needs_real_data
@pytest.mark.parametrize(
    ("split", "count", "first"),
    [("train", 60_000, [9, 0, 0, 3, 0]), ("test", 10_000, [9, 2, 1, 1, 6])],
)
def test_the_real_data(split, count, first, monkeypatch):
    monkeypatch.setenv("EQXSHARD_DATA_DIR", REAL)
    source = fashion_mnist(split, download=False)
    assert len(source) == count
    image, label = source.arrays["image"], source.arrays["label"]
    assert image.shape == (count, 28, 28)
    assert image.dtype == np.uint8
    assert label.dtype == np.int32
    np.testing.assert_array_equal(label[:5], first)
    np.testing.assert_array_equal(np.bincount(label), [count // 10] * 10)
    assert image.mean() / 255 == pytest.approx(0.2860, abs=1e-3)


@needs_real_data
def test_the_real_data_through_a_mirror(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", mirror.url)
    assert REAL
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        folders = (Path(REAL) / "fashion_mnist", Path(REAL))
        path = next(folder / name for folder in folders if (folder / name).exists())
        mirror.files[f"/{name}"] = path.read_bytes()
    assert len(fashion_mnist("test", data_dir=tmp_path / "data")) == 10_000
    assert len(mirror.requests) == 2


@pytest.mark.parametrize("folder", ["fashion_mnist", "."])
def test_files_in_data_dir(tiny, tmp_path, folder):
    put(tmp_path / "data" / folder)
    assert_is_tiny(fashion_mnist("train", data_dir=tmp_path / "data"))
    assert_is_tiny(fashion_mnist("train", data_dir=str(tmp_path / "data")))


@pytest.mark.parametrize("folder", ["fashion_mnist", "."])
def test_files_in_the_environment_variable(tiny, tmp_path, monkeypatch, folder):
    put(tmp_path / "data" / folder)
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path / "data"))
    assert_is_tiny(fashion_mnist("train"))


@pytest.mark.parametrize("folder", ["fashion_mnist", "."])
def test_files_in_the_cache_directory(tiny, tmp_path, folder):
    put(tmp_path / "eqxshard" / folder)
    assert_is_tiny(fashion_mnist("train"))


def test_each_file_may_be_in_either_folder(tiny, tmp_path):
    put(tmp_path / "data" / "fashion_mnist", LABELS)
    put(tmp_path / "data", IMAGES)
    assert_is_tiny(fashion_mnist("train", data_dir=tmp_path / "data"))


def test_data_dir_comes_before_the_environment_variable_and_that_before_the_cache(
    tiny, tmp_path, monkeypatch
):
    """The files of every directory are damaged, and the error names the first."""
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path / "variable"))
    for directory in ("argument", "variable", "eqxshard"):
        put(tmp_path / directory)
        (tmp_path / directory / IMAGES).write_bytes(b"")
    message = message_of(ValueError, data_dir=tmp_path / "argument")
    assert str(tmp_path / "argument" / IMAGES) in message
    assert str(tmp_path / "variable" / IMAGES) in message_of(ValueError)
    monkeypatch.delenv("EQXSHARD_DATA_DIR")
    assert str(tmp_path / "eqxshard" / IMAGES) in message_of(ValueError)


def test_the_folder_comes_before_the_directory_itself(tiny, tmp_path):
    put(tmp_path / "data" / "fashion_mnist")
    put(tmp_path / "data")
    (tmp_path / "data" / IMAGES).write_bytes(b"")
    assert_is_tiny(fashion_mnist("train", data_dir=tmp_path / "data"))


@pytest.mark.parametrize("source", ["argument", "variable", "cache"])
def test_missing_files_are_downloaded_to_the_directory(
    tiny, tmp_path, mirror, monkeypatch, source
):
    mirror.files = {f"/base/{name}": data for name, data in FILES.items()}
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", f"{mirror.url}/base/")
    folder = tmp_path / ("eqxshard" if source == "cache" else "data")
    if source == "variable":
        monkeypatch.setenv("EQXSHARD_DATA_DIR", str(folder))
    elif source == "argument":
        monkeypatch.setenv("EQXSHARD_DATA_DIR", str(put(tmp_path / "another")))
    options = {"data_dir": folder} if source == "argument" else {}
    assert_is_tiny(fashion_mnist("train", **options))
    assert {path.name for path in (folder / "fashion_mnist").iterdir()} == set(FILES)
    assert_is_tiny(fashion_mnist("train", **options))
    assert len(mirror.requests) == len(FILES)


def test_only_missing_files_are_downloaded(tiny, tmp_path, mirror, monkeypatch):
    mirror.files = {f"/{name}": data for name, data in FILES.items()}
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", mirror.url)
    put(tmp_path / "data", IMAGES)
    assert_is_tiny(fashion_mnist("train", data_dir=tmp_path / "data"))
    assert mirror.requests == [(f"/{LABELS}", None)]


def test_the_official_mirrors_are_tried_in_turn(
    tiny, tmp_path, mirror, dead_mirror, monkeypatch
):
    monkeypatch.delenv("EQXSHARD_FASHION_MNIST_URL")
    monkeypatch.setattr(_load, "_MIRRORS", (dead_mirror, f"{mirror.url}/"))
    mirror.files = {f"/{name}": data for name, data in FILES.items()}
    assert_is_tiny(fashion_mnist("train", data_dir=tmp_path))


def test_missing_files_without_download_are_an_error(tmp_path):
    directory = tmp_path / "data"
    assert message_of(FileNotFoundError, data_dir=directory, download=False) == (
        f"{IMAGES} is neither in {directory / 'fashion_mnist'} nor in {directory}; set "
        "data_dir or $EQXSHARD_DATA_DIR to its directory, or pass download=True."
    )
    assert not directory.exists()


def test_offline_the_error_names_all_mirrors(tmp_path, dead_mirror, monkeypatch):
    monkeypatch.delenv("EQXSHARD_FASHION_MNIST_URL")
    monkeypatch.setattr(_load, "_MIRRORS", (dead_mirror, f"{dead_mirror}/two/"))
    message = message_of(FileNotFoundError, data_dir=tmp_path)
    assert f"{dead_mirror}/{IMAGES}: " in message
    assert f"{dead_mirror}/two/{IMAGES}: " in message
    assert message.count("refused") == 2
    assert "put the official file there" in message


def test_a_mirror_without_the_files_is_an_error(tmp_path, mirror, monkeypatch):
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", mirror.url)
    message = message_of(FileNotFoundError, data_dir=tmp_path)
    assert f"{mirror.url}/{IMAGES}: HTTP status 404 (Not Found)" in message


def test_other_files_from_a_mirror_are_not_kept(tmp_path, mirror, monkeypatch):
    mirror.files = {f"/{name}": data for name, data in FILES.items()}
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", mirror.url)
    assert "the file has SHA-256" in message_of(FileNotFoundError, data_dir=tmp_path)
    assert list((tmp_path / "fashion_mnist").iterdir()) == []


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    directory = tmp_path / "data"
    directory.write_text("a file in place of a folder")
    message = message_of(FileNotFoundError, data_dir=directory)
    folder = directory / "fashion_mnist"
    assert f"{IMAGES} is neither in {folder} nor in {directory}" in message
    assert "could not be downloaded" in message


def test_a_file_that_cannot_be_read_is_an_error(tiny, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    put(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    message = message_of(FileNotFoundError, data_dir=tmp_path)
    assert f"{tmp_path / IMAGES} cannot be read (Permission denied)" in message


@pytest.mark.parametrize("url", ["ftp://example.org/", "example.org", "/data/mirror"])
def test_a_mirror_must_be_a_url(tmp_path, monkeypatch, url):
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", url)
    message = message_of(ValueError, data_dir=tmp_path)
    assert f"$EQXSHARD_FASHION_MNIST_URL is {url!r}" in message


def repacked(name: str, header: bytes | None = None, cut: int | None = None) -> bytes:
    content = gzip.decompress(FILES[name])
    header = HEADER[name] if header is None else header
    return gzip.compress((header + content[len(HEADER[name]) :])[:cut], mtime=0)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (IMAGES, b"", "it is empty"),
        (IMAGES, b"<html>Not found</html>", "it is not a gzip file"),
        (IMAGES, FILES[IMAGES][:1000], "its gzip data end after 1,000 bytes"),
        (IMAGES, FILES[IMAGES] + b"more", "its gzip data are corrupt"),
        (LABELS, FILES[LABELS][:-6] + b"xx" + FILES[LABELS][-4:], "are corrupt (CRC"),
        (
            IMAGES,
            FILES[LABELS],
            "its IDX magic number is 0x00000801, not 0x00000803",
        ),
        (
            LABELS,
            repacked(LABELS, header=HEADER[LABELS][:-1] + b"\7"),
            "its IDX header gives the shape (7,), not (6,)",
        ),
        (
            IMAGES,
            repacked(IMAGES, cut=10),
            "its IDX header ends after 10 of 16 bytes",
        ),
        (
            LABELS,
            repacked(LABELS, cut=-1),
            "it holds 5 bytes of data, but its IDX header promises 6",
        ),
        (
            LABELS,
            gzip.compress(HEADER[LABELS] + bytes(6), mtime=0),
            f", not {hashlib.sha256(FILES[LABELS]).hexdigest()}",
        ),
    ],
)
def test_damaged_files_are_errors(tiny, tmp_path, name, data, message):
    put(tmp_path)
    path = tmp_path / name
    path.write_bytes(data)
    pattern = f"^{re.escape(str(path))} is damaged: .*{re.escape(message)}.*; delete it to"
    with pytest.raises(ValueError, match=pattern):
        fashion_mnist("train", data_dir=tmp_path)
    assert path.read_bytes() == data


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="split='validation' is not 'train' or 'test'"):
        fashion_mnist("validation")
