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


def test_a_text_keeps_its_bytes_but_for_a_byte_order_mark(tmp_path):
    lines = b"caf\xc3\xa9\r\nold\rend\n"
    (tmp_path / "dos.txt").write_bytes(b"\xef\xbb\xbf" + lines)
    corpus = open_corpus(tmp_path / "dos.txt", valid=0.5)
    found = [*all_of(corpus.train), *all_of(corpus.valid)]
    assert bytes(found) == lines


@pytest.mark.parametrize(
    "sizes, valid, train_ends, valid_ends",
    [
        # Within the second of two documents, whatever their sizes, ...
        ([10, 990], 0.1, [10, 900], [100]),
        ([500, 500], 0.1, [500, 900], [100]),
        ([990, 10], 0.1, [900], [90, 100]),
        # ... in the only one, ...
        ([40], 0.25, [30], [10]),
        # ... and where one ends, if that is where the cut is.
        ([10, 10, 10, 10], 0.25, [10, 20, 30], [10]),
        ([3, 4], 0.1, [3, 6], [1]),
    ],
)
def test_a_prepared_folder_is_split_by_tokens(
    tmp_path, sizes, valid, train_ends, valid_ends
):
    tokens = np.arange(sum(sizes)) % 9
    write_prepared(tmp_path / "out", tokens, np.cumsum(sizes))
    corpus = open_corpus(tmp_path / "out", valid=valid)
    assert corpus.train.ends().tolist() == train_ends
    assert corpus.valid.ends().tolist() == valid_ends
    assert len(corpus.train) == int(len(tokens) * (1 - valid))
    assert [*all_of(corpus.train), *all_of(corpus.valid)] == tokens.tolist()
    assert corpus.name == "out"


@pytest.mark.parametrize("valid, train", [(0.5, 0), (1e-20, 1)])
def test_a_split_without_tokens_is_refused(tmp_path, valid, train):
    write_prepared(tmp_path / "out", [1], [1])
    (tmp_path / "x.txt").write_text("a")
    says = rf"has 1 tokens, of which valid={valid} would leave {train} to train on and "
    for name in ("out", "x.txt"):
        with pytest.raises(ValueError, match=rf"{says}{1 - train} to evaluate on; give"):
            open_corpus(tmp_path / name, valid=valid)


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
