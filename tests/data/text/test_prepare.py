import json
import sys
import time

import numpy as np
import pytest
from process_helpers import finished, started

from eqxshard.data.text import (
    CharTokenizer,
    HFTokenizer,
    PackedDocuments,
    load_tokenizer,
    prepare,
)


@pytest.fixture
def inputs(tmp_path):
    """Some hundred kilobytes of text, in lines of JSON and in a file of text."""
    random = np.random.RandomState(0)
    words = np.array(["the", "cat", "sat", "\n", "on", "mat", "né"])

    def text(length):
        return " ".join(words[random.randint(0, len(words), length)])

    lines = [json.dumps({"text": text(n % 70)}) + "\n" for n in range(500)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(lines))
    (tmp_path / "in" / "b.txt").write_text(text(20_000).replace(" \n ", "\n"))
    return tmp_path / "in"


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_files_are_the_same_after_an_interruption_anywhere(
    inputs, tmp_path, piece_bytes, monkeypatch
):
    options = {"tokenizer": "byte", "shard_tokens": 4 * piece_bytes, "workers": 1}
    prepare(inputs, tmp_path / "whole", **options)
    expected = contents(tmp_path / "whole")
    shards = [name for name in expected if name.endswith(".tokens")]
    assert len(shards) > 2

    class Stop(BaseException):
        pass

    module = sys.modules["eqxshard.data.text._prepare"]
    count = 0

    def interrupted(*args):
        nonlocal count
        count += 1
        if count % 7 == 0:
            raise Stop
        return encode(*args)

    encode = module.encode
    monkeypatch.setattr(module, "encode", interrupted)
    stops = 0
    while True:
        try:
            prepare(inputs, tmp_path / "parts", **options)
        except Stop:
            stops += 1
            assert stops < 20
        else:
            break
    assert stops > 1
    assert contents(tmp_path / "parts") == expected
    # And nothing is done again.
    monkeypatch.setattr(module, "encode", None)
    prepare(inputs, tmp_path / "parts", **options)


def test_a_lost_file_is_made_again(inputs, tmp_path, piece_bytes):
    options = {"tokenizer": "byte", "shard_tokens": 4 * piece_bytes, "workers": 1}
    prepare(inputs, tmp_path / "out", **options)
    expected = contents(tmp_path / "out")
    (tmp_path / "out" / "00001.tokens").unlink()
    prepare(inputs, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == expected


def command(*words):
    return [sys.executable, "-m", "eqxshard.data.text", *map(str, words)]


@pytest.mark.slow
def test_a_killed_command_resumes_and_workers_change_nothing(inputs, tmp_path, bpe):
    for n in range(200):
        (inputs / f"{n}.txt").write_text(f"the cat sat {n} times on the mat\n" * (n + 1))
    prepare(inputs, tmp_path / "alone", bpe, shard_tokens=2**10, workers=1)
    folder = tmp_path / "several"
    command = [sys.executable, "-m", "eqxshard.data.text", inputs, "--output", folder]
    command += ["--tokenizer", bpe, "--shard-tokens", 2**10, "--workers", 2]
    with started(command) as process:
        while not (folder / "00003.tokens").exists():
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
        # Its workers hold these pipes, and end with it.
        process.communicate(timeout=60)
    assert len(list(folder.glob("*.tokens"))) < len(list((tmp_path / "alone").iterdir()))
    assert finished(command)[0] == 0
    assert contents(folder) == contents(tmp_path / "alone")


def test_the_tokenizer_is_saved_beside_the_tokens(inputs, tmp_path, piece_bytes, bpe):
    tokens = prepare(inputs, tmp_path / "out", bpe, workers=1)
    saved = load_tokenizer(tmp_path / "out")
    assert isinstance(saved, HFTokenizer) and saved.vocab == tokens.vocab
    # A text that was cut into pieces has the tokens of the whole.
    text = (inputs / "b.txt").read_text()
    start = tokens.ends()[-2]
    expected = [*saved.encode(text).tolist(), saved.end]
    assert tokens.take(np.arange(start, len(tokens))).tolist() == expected


def test_characters_are_those_of_all_inputs(inputs, tmp_path):
    tokens = prepare(inputs, tmp_path / "out", "char", workers=1)
    saved = load_tokenizer(tmp_path / "out")
    assert isinstance(saved, CharTokenizer) and saved.chars == "\n acehmnosté"
    # Nothing ends a document here but the record of where it does.
    assert saved.end is None and len(tokens.ends()) == 500 - 500 // 70 - 1 + 1
    assert len(PackedDocuments(tokens, 512)) > 100


@pytest.mark.parametrize(
    "change, says",
    [
        ({"tokenizer": "char"}, r"out was prepared otherwise \(in its tokenizer\); give"),
        ({"shard_tokens": 7}, r"\(in its shard_tokens\)"),
        ({"inputs": "x"}, r"\(in its inputs\)"),
    ],
)
def test_a_folder_of_other_settings_is_refused(tmp_path, change, says):
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "y.txt").write_text("other")
    options = {"inputs": "y", "tokenizer": "byte", "shard_tokens": 9}
    folder = tmp_path / "out"

    def run(inputs, **rest):
        prepare(tmp_path / f"{inputs}.txt", folder, **rest)

    run(**options)
    before = contents(folder)
    with pytest.raises(ValueError, match=says):
        run(**options | change)
    assert contents(folder) == before
    (folder / "prepared.json").unlink()
    with pytest.raises(ValueError, match=r"\(in its inputs\)"):
        run(**options)


@pytest.mark.parametrize("record", ["", "[]", "{", "{}", "[1", "null"])
def test_a_damaged_record_is_an_error(tmp_path, record):
    (tmp_path / "x.txt").write_text("text")
    prepare(tmp_path / "x.txt", tmp_path / "out", "byte")
    (tmp_path / "out" / "prepared.json").write_text(record)
    before = contents(tmp_path / "out")
    says = r"prepared\.json is damaged, or not from eqxshard; delete the folder, and"
    with pytest.raises(ValueError, match=says):
        prepare(tmp_path / "x.txt", tmp_path / "out", "byte")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["shard_tokens", "workers"])
def test_numbers_are_positive(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        prepare(tmp_path, tmp_path / "out", "byte", **{name: 0})
