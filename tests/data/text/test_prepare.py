import json

import numpy as np
import pytest
from hostile_files import deep_json, forbid

from eqxshard.data.text import (
    ByteTokenizer,
    HFTokenizer,
    TokenFiles,
    load_tokenizer,
    prepare,
)
from eqxshard.data.text import _prepare as module
from eqxshard.data.text.__main__ import main


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "_PART_CHARS", 2**10)
    monkeypatch.setattr(module, "_TOGETHER", 3)


def texts(inputs, output):
    """The documents that were prepared."""
    tokens = prepare(inputs, output, "byte")
    ends = tokens.ends()
    found = [tokens.take(np.arange(start, end)) for start, end in zip([0, *ends], ends)]
    assert all(ids[-1] == 256 for ids in found)
    return [ByteTokenizer().decode(ids) for ids in found]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_folders_are_searched_in_the_order_of_names(tmp_path):
    (tmp_path / "in" / "b").mkdir(parents=True)
    for name in ("b/y.txt", "c.txt", "a.txt", "ignored.md"):
        (tmp_path / "in" / name).write_text(name)
    lines = '{"text": "1"}\n\n{"text": "", "id": 3}\n{"text":"2"}'
    (tmp_path / "z.jsonl").write_text(lines)
    inputs = [tmp_path / "z.jsonl", tmp_path / "in"]
    expected = ["1", "2", "a.txt", "b/y.txt", "c.txt"]
    assert texts(inputs, tmp_path / "out") == expected


def test_documents_are_whole_however_large(tmp_path, small_parts):
    words = "a" + "é" * 2**10
    long = words + "\r\n" + words + "\n\n" + "x\n" * 2**11 + words
    lines = ["short", words, "é\n" * 9, words]
    (tmp_path / "long.txt").write_bytes(long.encode())
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in lines)
    )
    (tmp_path / "empty.txt").write_text("")
    expected = [long.replace("\r\n", "\n"), *lines]
    assert texts(tmp_path, tmp_path / "out") == expected


def test_a_text_in_parts_has_the_tokens_of_the_whole(tmp_path, small_parts, bpe):
    text = "the cat sat\n\n\n on the mat\nthe cat\n" * 200
    (tmp_path / "x.txt").write_text(text)
    tokens = prepare(tmp_path / "x.txt", tmp_path / "out", bpe)
    saved = load_tokenizer(tmp_path / "out")
    assert isinstance(saved, HFTokenizer) and saved.vocab_size == tokens.vocab_size
    expected = [*saved.encode(text).tolist(), saved.eos_id]
    assert tokens.take(np.arange(len(tokens))).tolist() == expected


def test_what_was_interrupted_starts_again_and_what_is_done_is_kept(tmp_path, monkeypatch):
    for n in range(1, 4):
        (tmp_path / f"{n}.txt").write_text("text" * n)
    inputs = sorted(tmp_path.glob("*.txt"))
    prepare(inputs, tmp_path / "whole", "byte")

    class Stop(BaseException):
        pass

    def stop(tokenizer, texts):
        raise Stop

    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(module, "encode_all", stop)
        prepare(inputs, tmp_path / "out", "byte")
    prepare(inputs, tmp_path / "out", "byte")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"out is prepared already; open it"):
        prepare(inputs[:1], tmp_path / "out", "char")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "name, data, says",
    [
        ("x.csv", b"a,b", r"there is no text at .*x\.csv"),
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
    with pytest.raises((ValueError, FileNotFoundError), match=f"{says}.*; "):
        prepare(tmp_path / name, tmp_path / "out", "byte")


def test_an_empty_text_leaves_no_folder_and_no_files(tmp_path):
    (tmp_path / "x.txt").touch()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"there are no tokens in .*x\.txt; give"):
            prepare(tmp_path / "x.txt", tmp_path / "out", "byte")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_not_opened(tmp_path, kind):
    (tmp_path / "in").mkdir()
    forbid(tmp_path / "in" / "x.txt", kind)
    with pytest.raises(ValueError, match=r"x\.txt' is not a regular file"):
        prepare(tmp_path / "in", tmp_path / "out", "byte")


# The command


def test_the_command_prepares_text(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("a text")
    (tmp_path / "y.jsonl").write_text('{"text": "né"}')
    folder = str(tmp_path / "out")
    inputs = [str(tmp_path / "x.txt"), str(tmp_path / "y.jsonl")]
    assert main([*inputs, "--output", folder, "--tokenizer", "char"]) == 0
    printed = capsys.readouterr()
    expected = f"{folder} has 8 tokens of 2 documents, vocabulary 7\n"
    assert printed.out == expected and printed.err == ""
    tokens = TokenFiles(folder)
    decoded = load_tokenizer(folder).decode(tokens.take(np.arange(len(tokens))))
    assert decoded == "a textné"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"inputs": "nothing"}, "nothing"),
        ({"--tokenizer": "gpt2.json"}, "gpt2.json"),
        ({"--output": "x.txt"}, "exists"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, change, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("a text")
    options = {"inputs": "x.txt", "--output": "out", "--tokenizer": "byte"} | change
    words = [options.pop("inputs"), *(w for pair in options.items() for w in pair)]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and says in printed
