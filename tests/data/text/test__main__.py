"""The command."""

import numpy as np
import pytest

from eqxshard.data.text import TokenFiles, load_tokenizer
from eqxshard.data.text.__main__ import main


def test_the_command_prepares_text(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.txt").write_text("a text")
    (tmp_path / "y.jsonl").write_text('{"text": "another"}')
    inputs = [str(tmp_path / "in"), str(tmp_path / "y.jsonl")]
    folder = str(tmp_path / "out")
    assert main([*inputs, "--output", folder, "--tokenizer", "byte"]) == 0
    printed = capsys.readouterr()
    expected = f"{folder} has 15 tokens of 2 documents, vocabulary 257\n"
    assert printed.out == expected and printed.err == ""
    tokens = TokenFiles(folder)
    decoded = load_tokenizer(folder).decode(tokens.take(np.arange(len(tokens))))
    assert decoded == "a textanother"


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
