"""Paths: local ones stay where they are, and URLs do not become folders."""

from pathlib import Path

import pytest

import eqxshard
from eqxshard.sharding._paths import as_text, is_remote, local_path


@pytest.mark.parametrize("path", ["gs://bucket/run", Path("gs://bucket/run"), "s3:/b/x"])
def test_urls_are_known_also_without_a_slash_that_pathlib_took(path):
    assert is_remote(path)
    assert as_text(path) == str(path).replace(":/b", "://b")
    with pytest.raises(ValueError, match=r"--output '(gs|s3)://.*' is a URL; give a path"):
        local_path(path, "--output")


@pytest.mark.parametrize("path", ["runs/a", "/runs/a:b", "a:b/c", "C:/runs"])
def test_what_is_not_a_url_is_a_local_path(path):
    assert not is_remote(path) and as_text(path) == path


def test_local_paths_do_not_depend_on_where_the_program_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path("runs/../x", "--output") == tmp_path / "x"
    assert local_path("~/x", "--output") == Path("/home/me/x")
    with pytest.raises(ValueError, match="--output ' ' is blank; give"):
        local_path(" ", "--output")


def test_nothing_makes_a_folder_of_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.setenv("EQXSHARD_DATA_DIR", "gs://bucket/data")
    url = Path("gs://bucket/x")
    for make in (
        lambda: eqxshard.run.RunFolder(url),
        lambda: eqxshard.data.load_fashion_mnist("fashion_mnist"),
        lambda: eqxshard.save_weights(url, {}),
        lambda: eqxshard.data.text.prepare("text.txt", url, "tokenizer.json"),
    ):
        with pytest.raises(ValueError, match="is a URL; give a path on this machine"):
            make()
    assert [*tmp_path.iterdir()] == [tmp_path / "text.txt"]
