import json
import sys

import numpy as np
import pytest
from hostile_files import deep_json, forbid

from eqxshard.data.text import (
    ByteTokenizer,
    CharTokenizer,
    HFTokenizer,
    Tokenizer,
    load_tokenizer,
)

TEXT = "The cat sat\n\n on the naïve mat. 🐈\n"


def test_bytes_are_those_of_utf_8():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("né").tolist() == [110, 195, 169]
    assert tokenizer.encode(TEXT).dtype == np.int32
    assert tokenizer.decode([*tokenizer.encode(TEXT), tokenizer.eos_id]) == TEXT
    assert tokenizer.decode([195]) == "\N{REPLACEMENT CHARACTER}"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_characters_are_in_the_order_of_their_code_points():
    tokenizer = CharTokenizer(TEXT)
    assert tokenizer.chars == "".join(sorted(set(TEXT)))
    assert tokenizer.vocab_size == len(set(TEXT)) and tokenizer.eos_id is None
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert CharTokenizer("cabac").encode("abc").tolist() == [0, 1, 2]
    assert CharTokenizer("abc").encode("").tolist() == []
    # A model's vocabulary may be larger.
    assert CharTokenizer("abc").decode([0, 3]) == "a\N{REPLACEMENT CHARACTER}"


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match=r"has 'z', which .*; make"):
        CharTokenizer("aby").encode("abz")
    with pytest.raises(ValueError, match="needs characters; give"):
        CharTokenizer("")


@pytest.mark.versions
def test_a_tokenizer_of_hugging_face(bpe, tmp_path):
    tokenizer = HFTokenizer(bpe)
    assert tokenizer.vocab_size == 270
    assert tokenizer.eos_id == 0
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32 and len(ids) < len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    # A text is only text.
    assert tokenizer.eos_id not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode([0]) == "<|endoftext|>"
    # The lengths that a model's file asks for are not those of a text.
    saved = json.loads(bpe.read_text())
    saved["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "short.json").write_text(json.dumps(saved))
    tokenizer = HFTokenizer(tmp_path / "short.json")
    assert tokenizer.encode(TEXT).tolist() == ids.tolist()


def test_tokenizers_are_read_back_from_their_files(bpe, tmp_path):
    for tokenizer in (ByteTokenizer(), CharTokenizer(TEXT + "\ud800"), HFTokenizer(bpe)):
        assert isinstance(tokenizer, Tokenizer)
        tokenizer.save(tmp_path / "tokenizer.json")
        # By its folder, too.
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            again = load_tokenizer(path)
            assert type(again) is type(tokenizer)
            assert again.vocab_size == tokenizer.vocab_size
            assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_tokenizers_by_name(tmp_path):
    assert load_tokenizer("byte").vocab_size == 257
    assert load_tokenizer("char", text="abba").vocab_size == 2
    with pytest.raises(ValueError, match="give text="):
        load_tokenizer("char")
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer .*gpt2; give"):
        load_tokenizer(tmp_path / "gpt2")


@pytest.mark.parametrize(
    "data, says",
    [
        (b"not JSON", r"x\.json. is not JSON"),
        (b"\xff", r"x\.json. is not JSON"),
        (deep_json().encode(), r"x\.json. is not JSON \(it nests too deep"),
        (b'{"eqxshard_tokenizer": "char", "chars": []}', "needs characters; give"),
        (b'{"model": 3}', r"x\.json is not a tokenizer of Hugging Face"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_an_error(tmp_path, data, says):
    pytest.importorskip("tokenizers")
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ValueError, match=says) as caught:
        load_tokenizer(tmp_path / "x.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_not_opened(tmp_path, kind):
    forbid(tmp_path / "tokenizer.json", kind)
    with pytest.raises(ValueError, match=r"tokenizer\.json' is not a regular file"):
        load_tokenizer(tmp_path)


def test_hugging_face_without_its_package_says_what_to_install(bpe, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxshard\[text\]'"):
        load_tokenizer(bpe)
