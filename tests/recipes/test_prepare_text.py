"""Preparation of text, and the language model recipe on what it writes."""

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
    # A published one may cut what it encodes.
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
    assert len(open_corpus("prepared", valid=0.1).valid) == ends[2] - ends[1]
    # Once.
    assert_refused(prepare(capsys, monkeypatch), "there is a prepared")


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
    assert_refused(refused, "a.txt is not a tokenizer of Hugging Face")
    assert {*Path().iterdir()} == before
    # A blank line is no document.
    assert prepare(capsys, monkeypatch, more=["c.jsonl"])[0] == 0
