import numpy as np
import pytest
from token_helpers import write_prepared

from eqxshard.data.text import ByteTokenizer, TokenFiles, open_corpus

TEXT = "the cat sat on the mat\n" * 10


def all_of(tokens):
    return tokens.take(np.arange(len(tokens)))


def test_a_text_is_split_as_nanogpt_does(tmp_path):
    (tmp_path / "cats.txt").write_text(TEXT)
    corpus = open_corpus(tmp_path / "cats.txt")
    assert corpus.name == "cats"
    assert corpus.train.vocab_size == corpus.valid.vocab_size == corpus.vocab_size == 257
    cut = int(0.9 * len(TEXT))
    assert ByteTokenizer().decode(all_of(corpus.train)) == TEXT[:cut]
    assert ByteTokenizer().decode(all_of(corpus.valid)) == TEXT[cut:]
    halves = open_corpus(tmp_path / "cats.txt", valid=0.5)
    assert len(halves.train) == len(halves.valid) == len(TEXT) // 2


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
    write_prepared(tmp_path / "out", np.zeros(sum(sizes)), np.cumsum(sizes))
    corpus = open_corpus(tmp_path / "out", valid=valid)
    assert len(corpus.train) == expected and len(corpus.valid) == sum(sizes) - expected
    assert corpus.name == "out"


@pytest.mark.parametrize("sizes, valid", [([11, 991], 0.1), ([11, 991], 0.9)])
def test_a_split_that_is_far_from_what_was_asked_is_refused(tmp_path, sizes, valid):
    write_prepared(tmp_path / "out", np.zeros(sum(sizes)), np.cumsum(sizes))
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
    write_prepared(tmp_path / "train", range(6), [6])
    write_prepared(tmp_path / "valid", range(8), [8], vocab_size=12)
    corpus = open_corpus(tmp_path)
    assert isinstance(corpus.train, TokenFiles)
    assert (len(corpus.train), len(corpus.valid), corpus.vocab_size) == (6, 8, 12)


def test_a_folder_of_nanogpt(tmp_path):
    np.array([1, 2, 3], np.uint16).tofile(tmp_path / "train.bin")
    np.array([4, 5], np.uint16).tofile(tmp_path / "val.bin")
    corpus = open_corpus(tmp_path)
    assert corpus.vocab_size == 6
    assert all_of(corpus.train).tolist() == [1, 2, 3]
    assert all_of(corpus.valid).tolist() == [4, 5]


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
    for valid in (0.0, 1.0):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            open_corpus(tmp_path / "x.txt", valid=valid)


def test_an_unfinished_preparation_is_not_opened(tmp_path):
    write_prepared(tmp_path / "out", range(6), [6])
    (tmp_path / "out" / "prepared.json").unlink()
    with pytest.raises(ValueError, match="out is not a corpus"):
        open_corpus(tmp_path / "out")
