"""The command; `test_prepare.py` kills it."""

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
    words = [*inputs, "--output", folder, "--tokenizer", "byte"]
    assert main([*words, "--shard-tokens", "3", "--workers", "1"]) == 0
    printed = capsys.readouterr()
    expected = f"{folder} has 15 tokens of 2 documents, vocabulary 257\n"
    assert printed.out == expected and printed.err == ""
    tokens = TokenFiles(folder)
    decoded = load_tokenizer(folder).decode(tokens.take(np.arange(len(tokens))))
    assert len(tokens.paths) == 2 and decoded == "a textanother"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"inputs": "nothing"}, "error: there is no input nothing; give"),
        ({"--tokenizer": "gpt2.json"}, "error: there is no tokenizer gpt2.json; give"),
        ({"--tokenizer": "x.txt"}, "error: x.txt is not a tokenizer: it is not JSON"),
        ({"--workers": "0"}, "error: workers=0 must be at least 1."),
        ({"--output": "x.txt"}, "error: [Errno 17] File exists: '"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, change, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("a text")
    options = {"inputs": "x.txt", "--output": "out", "--tokenizer": "byte"} | change
    words = [options.pop("inputs"), *(w for pair in options.items() for w in pair)]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(says) and printed.count("\n") == 1


def test_a_missing_option_is_an_error_of_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["x.txt"])
    assert stop.value.code == 2
    assert "--output, --tokenizer" in capsys.readouterr().err
