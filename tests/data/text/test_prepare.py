import json

import numpy as np
import pytest
from hostile_files import deep_json, forbid

from eqxshard.data.text import (
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    load_tokenizer,
    prepare,
)
from eqxshard.data.text import _prepare as module


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "_PART_CHARS", 2**10)
    monkeypatch.setattr(module, "_TOGETHER", 3)


def texts(inputs, output, **options):
    """The documents that were prepared."""
    tokens = prepare(inputs, output, "byte", **options)
    starts = [0, *tokens.ends()[:-1]]
    spans = zip(starts, tokens.ends())
    found = [tokens.take(np.arange(start, end)) for start, end in spans]
    assert all(ids[-1] == 256 for ids in found)
    return [ByteTokenizer().decode(ids) for ids in found]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_folders_are_searched_in_the_order_of_names(tmp_path):
    (tmp_path / "in" / "b").mkdir(parents=True)
    for name in ("b/y.txt", "c.txt", "a.txt", "ignored.md"):
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "z.jsonl").write_text(
        '{"text": "1"}\n\n{"text": "", "id": 3}\n{"text":"2"}'
    )
    inputs = [tmp_path / "z.jsonl", tmp_path / "in"]
    expected = ["1", "2", "a.txt", "b/y.txt", "c.txt"]
    assert texts(inputs, tmp_path / "out") == expected


@pytest.mark.parametrize("shard_tokens", [2**11, 2**26])
def test_documents_are_whole_however_large(tmp_path, small_parts, shard_tokens):
    words = "a" + "é" * 2**10
    long = words + "\r\n" + words + "\n\n" + "x\n" * 2**11 + words
    lines = ["short", words, "é\n" * 9, words]
    (tmp_path / "long.txt").write_bytes(long.encode())
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in lines)
    )
    (tmp_path / "empty.txt").write_text("")
    found = texts(tmp_path, tmp_path / "out", shard_tokens=shard_tokens)
    assert found == [long.replace("\r\n", "\n"), *lines]
    assert (len(list((tmp_path / "out").glob("*.ends.npy"))) > 2) == (shard_tokens < 2**26)


def test_a_text_in_parts_has_the_tokens_of_the_whole(tmp_path, small_parts, bpe):
    text = "the cat sat\n\n\n on the mat\nthe cat\n" * 200
    (tmp_path / "x.txt").write_text(text)
    tokens = prepare(tmp_path / "x.txt", tmp_path / "out", bpe)
    saved = load_tokenizer(tmp_path / "out")
    assert isinstance(saved, HFTokenizer) and saved.vocab_size == tokens.vocab_size
    expected = [*saved.encode(text).tolist(), saved.eos_id]
    assert tokens.take(np.arange(len(tokens))).tolist() == expected


def test_characters_are_those_of_all_inputs(tmp_path):
    (tmp_path / "x.txt").write_text("the cat")
    (tmp_path / "y.jsonl").write_text('{"text": "né"}')
    prepare([tmp_path / "x.txt", tmp_path / "y.jsonl"], tmp_path / "out", "char")
    saved = load_tokenizer(tmp_path / "out")
    assert isinstance(saved, CharTokenizer) and saved.chars == " acehnté"


def test_what_was_interrupted_starts_again_and_what_is_done_is_kept(tmp_path, monkeypatch):
    for n in range(4):
        (tmp_path / f"{n}.txt").write_text("text" * n)
    inputs = sorted(tmp_path.glob("*.txt"))
    prepare(inputs, tmp_path / "whole", "byte", shard_tokens=5)

    class Stop(BaseException):
        pass

    def stop(path, *args):
        if path.name == "00001.npy":
            raise Stop
        return write(path, *args)

    write = module._write
    monkeypatch.setattr(module, "_write", stop)
    with pytest.raises(Stop):
        prepare(inputs, tmp_path / "out", "byte", shard_tokens=5)
    monkeypatch.setattr(module, "_write", write)
    prepare(inputs, tmp_path / "out", "byte", shard_tokens=5)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    monkeypatch.setattr(module, "_write", None)
    prepare(inputs, tmp_path / "out", "byte", shard_tokens=5)


@pytest.mark.parametrize(
    "change", [{"tokenizer": "char"}, {"shard_tokens": 7}, {"inputs": "x"}]
)
def test_a_folder_of_other_settings_is_refused(tmp_path, change):
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "y.txt").write_text("other")
    options = {"inputs": "y", "tokenizer": "byte", "shard_tokens": 9}

    def run(inputs, **rest):
        prepare(tmp_path / f"{inputs}.txt", tmp_path / "out", **rest)

    run(**options)
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=f"with other {next(iter(change))}; give"):
        run(**options | change)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    "name, data, says",
    [
        ("x.csv", b"a,b", r"x\.csv is not text"),
        ("x.txt", b"abc\xff", r"x\.txt is not text in UTF-8"),
        ("x.txt", b"", "there are no tokens"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": 1}\n', r"x\.jsonl .* line 2"),
        ("x.jsonl", b'{"text": "a"', r"x\.jsonl .* line 1"),
        ("x.jsonl", deep_json().encode(), r"x\.jsonl .* line 1"),
        ("x.jsonl", b"[1]", r"x\.jsonl .* line 1"),
        ("x.jsonl", b'{"text": 1}', r"x\.jsonl .* line 1"),
        ("x.jsonl", b'{"text": "b\\ud83d"}\n', r"x\.jsonl .* line 1"),
    ],
)
def test_what_is_not_text_is_an_error(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{says}.*; "):
        prepare(tmp_path / name, tmp_path / "out", "byte")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_not_opened(tmp_path, kind):
    (tmp_path / "in").mkdir()
    forbid(tmp_path / "in" / "x.txt", kind)
    with pytest.raises(ValueError, match=r"x\.txt' is not a regular file"):
        prepare(tmp_path / "in", tmp_path / "out", "byte")


def test_missing_and_empty_inputs_are_errors(tmp_path):
    (tmp_path / "in").mkdir()
    for inputs, error in ((tmp_path / "x", FileNotFoundError), ([], ValueError)):
        with pytest.raises(error, match=r"there (is|are) no input"):
            prepare(inputs, tmp_path / "out", "byte")
    with pytest.raises(ValueError, match="in is not text; give"):
        prepare(tmp_path / "in", tmp_path / "out", "byte")
    with pytest.raises(ValueError, match="shard_tokens=0 must be at least 1"):
        prepare(tmp_path, tmp_path / "out", "byte", shard_tokens=0)
