import hashlib
import sys

import numpy as np
import pytest

from eqxshard.data import _download
from eqxshard.data._download import read_file

CONTENT = np.random.default_rng(0).bytes(400_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "images.gz"


@pytest.fixture
def url(mirror):
    mirror.files = {"/images.gz": CONTENT}
    return f"{mirror.url}/images.gz"


def test_a_file_is_downloaded_once(mirror, url, path):
    for _ in range(2):
        assert read_file(path, [url], SHA256) == CONTENT
    assert mirror.requests == ["/images.gz"]
    assert [file.name for file in path.parent.iterdir()] == ["images.gz"]


@pytest.mark.parametrize("failure", ["refused", "404", "SHA-256", "cut", "silent"])
def test_the_next_mirror_is_tried(mirror, url, dead_mirror, path, monkeypatch, failure):
    bad = f"{mirror.url}/bad.gz"
    if failure == "refused":
        bad = f"{dead_mirror}/bad.gz"
    elif failure == "SHA-256":
        mirror.files["/bad.gz"] = b"<html>Sign in to this network</html>"
    elif failure != "404":
        mirror.files["/bad.gz"] = CONTENT
    if failure == "cut":
        mirror.cut["/bad.gz"] = 150_000
    if failure == "silent":
        monkeypatch.setattr(_download, "_TIMEOUT", 1.0)
        mirror.silent.add("/bad.gz")
    with pytest.raises(FileNotFoundError, match=r"; put the official file") as caught:
        read_file(path, [bad], SHA256)
    says = {"cut": "IncompleteRead", "silent": "timed out"}.get(failure, failure)
    assert says in str(caught.value) and not list(path.parent.iterdir())
    if failure != "silent":
        assert read_file(path, [bad, url], SHA256) == CONTENT


def test_a_damaged_file_is_an_error_and_is_kept(url, path):
    path.parent.mkdir()
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match=f"damaged: its SHA-256 .* not {SHA256}; delete"):
        read_file(path, [url], SHA256)
    assert path.read_bytes() == CONTENT[:-1]


def test_without_a_download_or_pooch_it_says_what_to_do(mirror, url, path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"there is no .*images\.gz; put"):
        read_file(path, [url], SHA256, download=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(FileNotFoundError, match=r"needs pooch.*eqxshard\[recipes\]"):
        read_file(path, [url], SHA256)
    assert not mirror.requests
