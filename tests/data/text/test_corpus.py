import numpy as np
import pytest

from eqxshard.data.text import (
    ByteTokenizer,
    CharTokenizer,
    TokenFiles,
    open_corpus,
    prepare,
)

TEXT = "the cat sat on the mat\n" * 10


def all_of(tokens):
    return tokens.take(np.arange(len(tokens)))


def test_a_text_is_split_as_nanogpt_does(tmp_path):
    (tmp_path / "cats.txt").write_text(TEXT)
    corpus = open_corpus(tmp_path / "cats.txt")
    assert corpus.name == "cats" and corpus.vocab_size == len(set(TEXT))
    assert isinstance(corpus.tokenizer, CharTokenizer)
    cut = int(0.9 * len(TEXT))
    assert corpus.tokenizer.decode(all_of(corpus.train)) == TEXT[:cut]
    assert corpus.tokenizer.decode(all_of(corpus.valid)) == TEXT[cut:]
    # The end of the text is known to the vocabulary, and the model of the largest token.
    assert corpus.train.vocab_size == corpus.valid.vocab_size == corpus.vocab_size


def test_a_text_with_another_tokenizer_and_split(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT)
    for tokenizer in ("byte", ByteTokenizer()):
        corpus = open_corpus(tmp_path / "x.txt", tokenizer=tokenizer, valid=0.5)
        assert len(corpus.train) == len(corpus.valid) == len(TEXT) // 2
        assert corpus.vocab_size == 257


@pytest.mark.parametrize(
    "sizes, valid, expected",
    [
        # The cut is between the two documents that are nearest to it, ...
        ([10, 10, 10, 10], 0.3, 30),
        ([10, 20, 10], 0.5, 10),
        # ... or within the only one.
        ([40], 0.25, 30),
    ],
)
def test_a_prepared_folder_is_split_between_documents(tmp_path, sizes, valid, expected):
    for n, size in enumerate(sizes):
        (tmp_path / f"{n}.txt").write_text("x" * (size - 1))
    prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "out", "byte")
    corpus = open_corpus(tmp_path / "out", valid=valid)
    assert len(corpus.train) == expected and len(corpus.valid) == sum(sizes) - expected
    assert corpus.name == "out"
    assert isinstance(corpus.tokenizer, ByteTokenizer)


@pytest.mark.parametrize("sizes, valid", [([11, 991], 0.1), ([11, 991], 0.9)])
def test_a_split_that_is_far_from_what_was_asked_is_refused(tmp_path, sizes, valid):
    for n, size in enumerate(sizes):
        (tmp_path / f"{n}.txt").write_text("x" * (size - 1))
    prepare(sorted(tmp_path.glob("*.txt")), tmp_path / "out", "byte")
    if valid == 0.9:
        # A bit less than what the documents allow is near enough, ...
        assert len(open_corpus(tmp_path / "out", valid=0.98).train) == 11
    with pytest.raises(
        ValueError, match=r"would hold out 98.9%; ask for valid=0.9890"
    ) as e:
        open_corpus(tmp_path / "out", valid=valid)
    # ... and what the error says to ask for.
    assert f"the last {valid:.1%} of its tokens" in str(e.value)
    assert len(open_corpus(tmp_path / "out", valid=0.9890).train) == 11


def test_a_folder_of_two_prepared_folders(tmp_path):
    (tmp_path / "x.txt").write_text("a cat")
    (tmp_path / "y.txt").write_text("the mat")
    prepare(tmp_path / "x.txt", tmp_path / "train", "byte")
    prepare(tmp_path / "y.txt", tmp_path / "valid", "byte")
    corpus = open_corpus(tmp_path)
    assert isinstance(corpus.train, TokenFiles)
    assert (len(corpus.train), len(corpus.valid), corpus.vocab_size) == (6, 8, 257)
    assert isinstance(corpus.tokenizer, ByteTokenizer)


def test_a_folder_of_nanogpt(tmp_path):
    np.array([1, 2, 3], np.uint16).tofile(tmp_path / "train.bin")
    np.array([4, 5], np.uint16).tofile(tmp_path / "val.bin")
    corpus = open_corpus(tmp_path)
    assert corpus.tokenizer is None and corpus.vocab_size == 6
    assert all_of(corpus.train).tolist() == [1, 2, 3]
    assert all_of(corpus.valid).tolist() == [4, 5]
    assert open_corpus(tmp_path, tokenizer="byte").vocab_size == 257


def test_what_is_not_a_corpus_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*x; give"):
        open_corpus(tmp_path / "x")
    (tmp_path / "x.md").write_text("words")
    (tmp_path / "train.bin").write_bytes(b"12")
    for path in (tmp_path, tmp_path / "x.md"):
        with pytest.raises(ValueError, match=r"is not a corpus; give a \.txt file, a"):
            open_corpus(path)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match=r"the text x is empty; give"):
        open_corpus(tmp_path / "x.txt")
    (tmp_path / "x.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"x\.txt is not text in UTF-8"):
        open_corpus(tmp_path / "x.txt")
    for valid in (0.0, 1.0):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            open_corpus(tmp_path / "x.txt", valid=valid)


def test_an_unfinished_preparation_is_not_opened(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    prepare(tmp_path / "x.txt", tmp_path / "out", "byte")
    (tmp_path / "out" / "prepared.json").unlink()
    with pytest.raises(ValueError, match="out is not a corpus"):
        open_corpus(tmp_path / "out")
