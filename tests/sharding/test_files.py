"""Paths that are URLs; files that never end, are no files, or nest too deep."""

import os
from pathlib import Path

import pytest
from hostile_files import FORBIDDEN, deep_json, forbid

import eqxshard
from eqxshard.sharding._files import (
    as_text,
    is_remote,
    local_path,
    odd_file,
    open_file,
    parse_json,
    read_bytes,
    read_json,
)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "huge"])
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        forbid(path, kind)
    says = "1,099,511,627,776 bytes" if kind == "huge" else "is not a regular file; give"
    with pytest.raises(ValueError, match=says):
        read_bytes(path)


def test_links_to_files_are_read_and_loops_are_not(tmp_path):
    (tmp_path / "file").write_text("[1]")
    os.symlink("file", tmp_path / "link")
    assert read_json(tmp_path / "link") == [1]
    forbid(tmp_path / "loop", "loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_file(tmp_path / "loop")


@pytest.mark.parametrize(
    "text, says",
    [
        (deep_json(), "it nests too deep"),
        (deep_json(101), "it nests too deep"),
        ("9" * 5000, "Exceeds the limit"),
        (b"\xff\xfe\xfa", ".*codec can't decode"),
    ],
    ids=["deep", "101", "digits", "bytes"],
)
def test_what_is_not_json_is_a_sentence(tmp_path, text, says):
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"x.json' is not JSON \({says}.*; it is damaged"):
        read_json(path)


def test_json_of_moderate_depth_is_read():
    assert parse_json(deep_json(100)) is not None
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_what_is_neither_a_file_nor_a_folder_is_found(tmp_path, kind):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").write_text("x")
    assert odd_file(tmp_path) is None
    forbid(tmp_path / "a" / "b" / "odd", kind)
    assert odd_file(tmp_path) == f"{tmp_path}/a/b/odd is not a regular file"


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


@pytest.mark.parametrize(
    "path, says",
    [
        ("a" * 300, "300 bytes in one name"),
        ("é" * 200 + "/x", "400 bytes in one name"),
        ("/".join(["abcdefghi"] * 500), r"5,0\d\d in all"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        eqxshard.Checkpointer,
        eqxshard.run.RunFolder,
        eqxshard.trackers.JSONLines,
        eqxshard.trackers.Curves,
        eqxshard.trackers.TensorBoard,
    ],
)
def test_paths_that_are_too_long_are_a_sentence(tmp_path, monkeypatch, make, path, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"is too long: .*{says}.*; give a shorter path"):
        make(path)
    assert [*tmp_path.iterdir()] == []


def test_nothing_makes_a_folder_of_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQXSHARD_DATA_DIR", "gs://bucket/data")
    url = Path("gs://bucket/x")
    for make in (
        lambda: eqxshard.run.RunFolder(url),
        lambda: eqxshard.data.load_fashion_mnist("fashion_mnist"),
        lambda: eqxshard.save_weights(url, {}),
    ):
        with pytest.raises(ValueError, match="is a URL; give a path on this machine"):
            make()
    assert [*tmp_path.iterdir()] == []
