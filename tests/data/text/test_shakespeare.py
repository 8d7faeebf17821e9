import hashlib
import os
import sys
from pathlib import Path

import pytest

from eqxshard.data.text import shakespeare

TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A shorter text stands for the real one."""
    module = sys.modules[shakespeare.__module__]
    monkeypatch.setattr(module, "_SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.delenv("EQXSHARD_DATA_DIR", raising=False)
    return module


def written(folder):
    (folder / "shakespeare").mkdir()
    (folder / "shakespeare" / "input.txt").write_bytes(TEXT)
    return folder


def check(corpus):
    assert corpus.name == "shakespeare" and corpus.vocab_size == len(set(TEXT))
    assert len(corpus.train) == int(0.9 * len(TEXT))
    assert len(corpus.train) + len(corpus.valid) == len(TEXT)


def test_it_is_found_in_a_folder(tmp_path, monkeypatch):
    check(shakespeare(written(tmp_path)))
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path))
    check(shakespeare())


def test_it_is_downloaded_once(tmp_path, monkeypatch, mirror):
    mirror.files["/input.txt"] = TEXT
    monkeypatch.setenv("EQXSHARD_SHAKESPEARE_URL", f"{mirror.url}/input.txt")
    check(shakespeare(tmp_path))
    check(shakespeare(tmp_path))
    assert len(mirror.requests) == 1


def test_without_a_download_it_says_where_to_put_it(tmp_path, monkeypatch, mirror):
    monkeypatch.setenv("EQXSHARD_SHAKESPEARE_URL", f"{mirror.url}/input.txt")
    says = r"there is no .*input\.txt, and it could not be downloaded \(.*404.*; put"
    with pytest.raises(FileNotFoundError, match=says):
        shakespeare(tmp_path)


REAL = Path(os.environ.get("EQXSHARD_DATA_DIR", "")) / "shakespeare" / "input.txt"


@pytest.mark.skipif(not REAL.is_file(), reason="$EQXSHARD_DATA_DIR has no Shakespeare")
def test_the_real_text(monkeypatch):
    monkeypatch.undo()
    corpus = shakespeare(REAL.parent.parent)
    assert (len(corpus.train), len(corpus.valid)) == (1_003_854, 111_540)
    assert corpus.vocab_size == 65
