import pickle

import numpy as np
import pytest
from hostile_files import deep_json, forbid
from loader_helpers import flat
from token_helpers import write_prepared

from eqxshard.data.text import TokenArray, TokenFiles, Tokens


def test_tokens_in_memory():
    tokens = TokenArray(np.array([3, 1, 2], np.uint16), vocab_size=10)
    assert isinstance(tokens, Tokens)
    assert len(tokens) == 3 and tokens.vocab_size == 10 and tokens.ends().tolist() == [3]
    found = tokens.take(np.array([[2, 0], [1, 1]]))
    assert found.dtype == np.int32 and found.tolist() == [[2, 3], [1, 1]]
    assert TokenArray([3, 1]).vocab_size == 4


@pytest.mark.parametrize(
    "tokens, options, says",
    [
        ([0.5], {}, r"float64 of shape \(1,\); give one row of integers"),
        ([1, 7], {"vocab_size": 7}, "from 1 to 7, and the vocabulary has 7; give .* to 6"),
        ([1, -1], {}, "from -1 to 1"),
        ([1, 2, 3], {"ends": []}, "ends must increase up to"),
    ],
)
def test_what_are_not_tokens_is_refused(tokens, options, says):
    with pytest.raises(ValueError, match=says):
        TokenArray(tokens, **options)


# Files

DOCUMENTS = [[*range(n + 1), 200] for n in range(10)]


@pytest.fixture
def folder(tmp_path):
    """Ten documents."""
    ends = np.cumsum([len(document) for document in DOCUMENTS])
    return write_prepared(tmp_path / "out", flat(DOCUMENTS), ends, vocab_size=201)


def test_files_are_one_row_of_tokens(folder):
    data = pickle.dumps(TokenFiles(folder))
    assert len(data) < 4000
    # Other processes map them again.
    for tokens in (TokenFiles(folder), pickle.loads(data)):
        found = tokens.take(np.arange(len(tokens)))
        assert isinstance(tokens, Tokens) and tokens.vocab_size == 201
        assert found.dtype == np.int32 and found.tolist() == flat(DOCUMENTS)
        assert tokens.ends().tolist() == np.cumsum([len(x) for x in DOCUMENTS]).tolist()
        indices = np.random.RandomState(0).randint(0, len(tokens), (7, 5))
        np.testing.assert_array_equal(tokens.take(indices), found[indices])


def test_a_range_cuts_documents(tmp_path):
    folder = write_prepared(tmp_path / "x", range(10), [2, 5, 6, 10], vocab_size=10)
    part = pickle.loads(pickle.dumps(TokenFiles(folder, start=1, stop=8)))
    assert len(part) == 7 and part.vocab_size == 10
    assert part.take(np.arange(7)).tolist() == list(range(1, 8))
    assert part.ends().tolist() == [1, 4, 5, 7]
    assert TokenFiles(folder, start=-5, stop=6).ends().tolist() == [1]
    assert TokenFiles(folder, start=2, stop=5).ends().tolist() == [3]
    # The ends in a range do not change those in the file.
    assert TokenFiles(folder).ends().tolist() == [2, 5, 6, 10]
    with pytest.raises(ValueError, match="there are no tokens from 5 to 5"):
        TokenFiles(folder, start=5, stop=5)


def test_a_file_of_nanogpt(tmp_path):
    ids = np.array([5, 50256, 7, 8, 50256, 9], np.uint16)
    ids.tofile(tmp_path / "train.bin")
    tokens = pickle.loads(pickle.dumps(TokenFiles(tmp_path / "train.bin")))
    assert tokens.take(np.arange(6)).tolist() == ids.tolist()
    assert tokens.vocab_size == 50257 and tokens.ends().tolist() == [6]


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x[:-2], lambda x: b"12"])
@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin"])
def test_a_damaged_file_is_an_error(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{name} is truncated .*; prepare") as caught:
        TokenFiles(folder).ends()
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"there is no .*{name}; give"):
        TokenFiles(folder).ends()


@pytest.mark.parametrize(
    "ends", [[4, 3], [2, 2, 4], [5], [2], [], [4, 2**40], [2**64 - 1, 4], [1, 2, 3, 4, 4]]
)
def test_ends_that_do_not_increase_up_to_the_last_token_are_refused(tmp_path, ends):
    tokens = TokenFiles(write_prepared(tmp_path / "x", [1, 2, 3, 4], ends))
    with pytest.raises(ValueError, match=r"ends\.bin is damaged: .*; prepare"):
        tokens.ends()


def test_ends_are_checked_everywhere(tmp_path):
    # More than are compared at once.
    count = 2**20 + 3
    folder = write_prepared(tmp_path / "x", np.zeros(count), np.arange(1, count + 1))
    assert len(TokenFiles(folder, stop=9).ends()) == 9
    for place in (0, 1, 2**20 - 1, 2**20, 2**20 + 1):
        ends = np.arange(1, count + 1)
        ends[place] -= 1
        ends.astype(np.uint64).tofile(folder / "ends.bin")
        with pytest.raises(ValueError, match=r"ends\.bin is damaged: .*; prepare"):
            TokenFiles(folder, stop=9).ends()


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    tokens = TokenFiles(write_prepared(tmp_path / "x", [1, 8, 9], [3]))
    assert tokens.take(np.arange(2)).tolist() == [1, 8]
    with pytest.raises(ValueError, match="has the token 9, and the vocabulary has 9; it"):
        tokens.take(np.arange(3))


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["tokens.bin", "prepared.json", "x.bin"])
def test_what_is_no_file_is_not_opened(folder, kind, name):
    (folder / name).unlink(missing_ok=True)
    forbid(folder / name, kind)
    with pytest.raises(ValueError, match=r"(is .*damaged|is not a regular file)"):
        TokenFiles(folder / name if name == "x.bin" else folder)


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", deep_json(), '{"vocab_size": 3, "tokens": -1}']
)
def test_a_damaged_record_is_an_error(folder, record):
    (folder / "prepared.json").write_text(record)
    with pytest.raises(ValueError, match=r"prepared\.json is damaged, or not from eqx"):
        TokenFiles(folder)
    (folder / "prepared.json").unlink()
    with pytest.raises(ValueError, match="its preparation did not finish; prepare"):
        TokenFiles(folder)


def test_no_tokens_and_other_files_are_errors(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"there are no tokens .* in .*x\.bin; give"):
        TokenFiles(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"x\.bin is truncated .* 3 bytes.*; prepare"):
        TokenFiles(tmp_path / "x.bin")
    with pytest.raises(FileNotFoundError, match=r"there is no .*y; give"):
        TokenFiles(tmp_path / "y")
    (tmp_path / "y").touch()
    with pytest.raises(ValueError, match=r"y is not a token file; give"):
        TokenFiles(tmp_path / "y")
