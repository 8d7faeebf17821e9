"""Preparation of text, and the language model recipe on prepared text."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from run_helpers import ROOT, assert_refused, call
from tokenizers import decoders, models, pre_tokenizers, trainers

from eqxshard.data.text import TokenFiles, open_corpus

DOCUMENTS = ["the cat sat", "on the mat\nthe <|endoftext|> né", "the mat"]
PREPARE, GPT = (ROOT / "recipes" / name for name in ("prepare_text.py", "gpt.py"))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A tokenizer, a file of text, and one of lines of JSON, in the current folder."""
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    # A published tokenizer may cut texts.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save("published.json")
    (tmp_path / "a.txt").write_text(DOCUMENTS[0])
    lines = [json.dumps({"text": text}) + "\n" for text in ("", *DOCUMENTS[1:])]
    (tmp_path / "b.jsonl").write_text("".join(lines))


def prepare(capsys, monkeypatch, *options, more=()):
    words = ("a.txt", "b.jsonl", *more, "--tokenizer", "published.json", *options)
    return call(capsys, monkeypatch, PREPARE, *words)


def test_documents_are_encoded_whole_and_the_recipe_writes_them(files, capsys, monkeypatch):
    status, out, err = prepare(capsys, monkeypatch)
    assert (status, err) == (0, "")
    tokens = TokenFiles("prepared")
    ids, ends = tokens.take(np.arange(len(tokens))), tokens.ends()
    assert out == f"prepared: {len(tokens)} tokens of 3 documents\n"
    tokenizer = tokenizers.Tokenizer.from_file("prepared/tokenizer.json")
    assert tokens.vocab_size == tokenizer.get_vocab_size()
    for start, end, text in zip([0, *ends[:-1]], ends, DOCUMENTS, strict=True):
        assert ids[end - 1] == 0 and 0 not in ids[start : end - 1]
        assert tokenizer.decode(ids[start : end - 1].tolist()) == text
    corpus = open_corpus("prepared", valid=0.1)
    assert len(corpus.train) == int(0.9 * len(tokens))
    assert len(corpus.train) + len(corpus.valid) == len(tokens)
    # Once.
    assert_refused(prepare(capsys, monkeypatch), "there is a prepared")


def decoded(folder):
    """The documents of a prepared folder, as text."""
    tokens = TokenFiles(folder)
    ids = tokens.take(np.arange(len(tokens)))
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    parts = np.split(ids, tokens.ends()[:-1])
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def test_text_keeps_its_line_ends_and_loses_byte_order_marks(files, capsys, monkeypatch):
    mark = b"\xef\xbb\xbf"
    lines = "one\r\ntwo\rthree\u2028four\n"
    Path("c.txt").write_bytes(mark + lines.encode())
    # Lines of JSON end with line feeds only.
    line = json.dumps({"text": "the\u2028cat\u0085"}, ensure_ascii=False).encode()
    Path("d.jsonl").write_bytes(mark + line + b"\r\n" + mark + b'\r\n{"text": "sat"}')
    Path("E.JSONL").write_bytes(b'{"text": "mat"}\n{"text": "on"}\n')
    more = ["c.txt", "d.jsonl", "E.JSONL"]
    assert prepare(capsys, monkeypatch, more=more)[0] == 0
    expected = [lines, "the\u2028cat\u0085", "sat", "mat", "on"]
    assert decoded("prepared")[3:] == expected


def content(folder):
    """The files below a folder, their contents, and the folders."""
    paths = sorted(Path(folder).rglob("*"))
    return [(path, path.is_file() and path.read_bytes()) for path in paths]


def test_what_is_there_is_never_touched(files, capsys, monkeypatch):
    Path("mine").mkdir()
    Path("mine/tokenizer.json").write_text("mine")
    Path("mine/tokens.bin").write_text("mine")
    Path("empty").mkdir()
    Path("link").symlink_to("nowhere")
    Path("bad.jsonl").write_text("{}")
    before = content(".")
    for name in ("mine", "empty", "a.txt", "link"):
        refused = prepare(capsys, monkeypatch, "--output", name)
        assert_refused(refused, f"there is a {name}; delete it, or give another --output")
    refused = prepare(capsys, monkeypatch, "--output", "a.txt/b/out")
    assert_refused(refused, "a.txt is not a folder; give another --output")
    # Also beside the output: a failure leaves no folder behind.
    for name in ("new/folder/out", "mine/out"):
        refused = prepare(capsys, monkeypatch, "--output", name, more=["bad.jsonl"])
        assert_refused(refused, "line 1 of bad.jsonl is not a document")
    assert content(".") == before
    for name in ("new/folder/out", "mine/out"):
        assert prepare(capsys, monkeypatch, "--output", name)[0] == 0
        assert decoded(name) == DOCUMENTS
    assert [x for x in content(".") if x in before] == before


@pytest.mark.slow
def test_the_recipe_trains_on_a_folder_and_writes(files, capsys, monkeypatch):
    Path("a.txt").write_text("the cat sat on the mat\n" * 50)
    assert prepare(capsys, monkeypatch, "--output", "corpus/train")[0] == 0
    assert prepare(capsys, monkeypatch, "--output", "corpus/valid")[0] == 0
    options = ("--data", "corpus", "--devices", 1, "--layers", 1, "--seq-len", 16)
    options += ("--batch-size", 8, "--length", 8, "--output", "run", "--steps", 2)
    status, out, err = call(capsys, monkeypatch, GPT, *options)
    assert status == 0 and "--- sample after step 2 ---" in out, err
    options += ("--resume", "yes", "--sample", "the cat")
    status, out, err = call(capsys, monkeypatch, GPT, *options)
    assert (status, err) == (0, "") and out.startswith("the cat")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert_refused(call(capsys, monkeypatch, GPT, *options), "pip install tokenizers")


MISTAKES = {
    b'{"text": "a"}\n\n{"text": \n': "line 3 of c.jsonl is not a document in UTF-8 (JSOND",
    b'{"text": "a"}\n{"words": "b"}\n': "line 2 of c.jsonl is not a document in UTF-8 (Key",
    b'{"text": null}\n': "line 1 of c.jsonl is not a document",
    b'{"text": "\xff"}\n': "line 1 of c.jsonl is not a document",
    b'{"text": "\\ud800"}\n': "line 1 of c.jsonl is not a document in UTF-8 (UnicodeE",
    b'{"text": "a"}\n' + b"[" * 99_999: "line 2 of c.jsonl is not a document in UTF-8 (Rec",
    '{"text": "a"}\n'.encode("utf-16"): "line 1 of c.jsonl is not a document",
}


def test_a_mistake_is_one_line_and_leaves_nothing(files, capsys, monkeypatch):
    assert_refused(prepare(capsys, monkeypatch, more=["c.txt"]), "there is no file c.txt")
    Path("c.txt").write_bytes(b"a\xff")
    refused = prepare(capsys, monkeypatch, more=["c.txt"])
    assert_refused(refused, "c.txt is not a document in UTF-8 (UnicodeDecodeError")
    Path("c.txt").unlink()
    before = {*Path().iterdir()} | {Path("c.jsonl")}
    for text, sentence in MISTAKES.items():
        Path("c.jsonl").write_bytes(text)
        assert_refused(prepare(capsys, monkeypatch, more=["c.jsonl"]), sentence)
    Path("c.jsonl").write_text("\n")
    only = ("c.jsonl", "--tokenizer", "published.json")
    assert_refused(call(capsys, monkeypatch, PREPARE, *only), "there is no text")
    refused = prepare(capsys, monkeypatch, "--tokenizer", "a.txt")
    assert_refused(refused, "a.txt is not a Hugging Face tokenizer")
    assert {*Path().iterdir()} == before
    # A blank line is no document.
    assert prepare(capsys, monkeypatch, more=["c.jsonl"])[0] == 0
