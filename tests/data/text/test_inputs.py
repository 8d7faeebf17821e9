"""Through `prepare`, which reads the inputs."""

import json

import numpy as np
import pytest
from hostile_files import deep_json, forbid

from eqxshard.data.text import ByteTokenizer, prepare
from eqxshard.data.text._inputs import pieces


def texts(inputs, output):
    """The documents that were prepared."""
    tokens = prepare(inputs, output, "byte", workers=1)
    starts = [0, *tokens.ends()[:-1]]
    spans = zip(starts, tokens.ends())
    found = [tokens.take(np.arange(start, end)) for start, end in spans]
    assert all(ids[-1] == 256 for ids in found)
    return [ByteTokenizer().decode(ids) for ids in found]


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


def test_documents_are_whole_however_large(tmp_path, piece_bytes):
    words = "a" + "é" * piece_bytes
    long = words[: piece_bytes + 5] + "\r\n" + words + "\n\n" + "x\n" * 9 + words
    lines = ["short", words, "é\n" * 9, words[:piece_bytes]]
    (tmp_path / "long.txt").write_bytes(long.encode())
    (tmp_path / "line.txt").write_text(words)
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in lines)
    )
    (tmp_path / "empty.txt").write_text("")
    found = texts(tmp_path, tmp_path / "out")
    assert found == [words, long.replace("\r\n", "\n"), *lines]


def test_a_text_with_empty_lines_between_all_paragraphs_is_read_in_pieces(
    tmp_path, piece_bytes
):
    path = tmp_path / "x.txt"
    text = "a paragraph\n\n" * (4 * piece_bytes)
    path.write_text(text)
    assert max(len(piece.data) for piece in pieces([path])) < 32 * piece_bytes
    assert texts([path], tmp_path / "out") == [text]


@pytest.mark.parametrize(
    "name, data, says",
    [
        ("x.csv", b"a,b", r"x\.csv is not text; give files \(\.txt, \.jsonl\)"),
        ("x.txt", b"abc\xff", r"x\.txt is not text in UTF-8 \(at byte 3\)"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": 1}\n', r"x\.jsonl .* line at byte 14; give"),
        ("x.jsonl", b'{"text": "a"', r"x\.jsonl .* line at byte 0; give"),
        ("x.jsonl", deep_json().encode(), r"x\.jsonl .* line at byte 0; give"),
        ("x.jsonl", b"[1]", r"x\.jsonl .* line at byte 0; give"),
        ("x.jsonl", b'{"text": 1}', r"x\.jsonl .* line at byte 0; give"),
        ("x.jsonl", b"\xff\xff", r"x\.jsonl .* line at byte 0; give"),
        ("x.txt", b"", "there are no tokens"),
        (
            "x.jsonl",
            b'{"text": "a"}\n{"text": "b\\ud83d"}\n',
            r"x\.jsonl has the lone surrogate '\\ud83d' in the line at byte 14, .*; repl",
        ),
    ],
)
def test_what_is_not_text_is_an_error(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=says):
        prepare(tmp_path / name, tmp_path / "out", "byte")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_not_opened(tmp_path, kind):
    (tmp_path / "in").mkdir()
    forbid(tmp_path / "in" / "x.txt", kind)
    with pytest.raises(ValueError, match=r"x\.txt' is a .*; give a regular file"):
        prepare(tmp_path / "in", tmp_path / "out", "byte")


def test_missing_and_empty_inputs_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no input .*x; give"):
        prepare(tmp_path / "x", tmp_path / "out", "byte")
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="in is not text; give"):
        prepare(tmp_path / "in", tmp_path / "out", "byte")
    with pytest.raises(ValueError, match="there are no inputs"):
        prepare([], tmp_path / "out", "byte")
