import pickle

import numpy as np
import pytest
from hostile_files import HostilePickle
from loader_helpers import flat

from eqxshard.data.text import TokenFiles, Tokens, prepare


@pytest.fixture
def folder(tmp_path):
    """Three files of 10 documents, of which two are cut by the end of a file."""
    lines = [f'{{"text": "{"abcdefghij"[: n + 1]}"}}\n' for n in range(10)]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    # A file ends where a piece of the input does: there is one for each input here.
    inputs = []
    for n in range(3):
        inputs.append(tmp_path / f"{n}.txt")
        inputs[-1].write_text("abcdefghij"[: 3 + n])
    prepare([tmp_path / "x.jsonl", *inputs], tmp_path / "out", "byte", shard_tokens=2)
    return tmp_path / "out"


def test_files_are_one_row_of_tokens(folder):
    tokens = TokenFiles(folder)
    assert isinstance(tokens, Tokens)
    assert len(list(folder.glob("*.tokens"))) == 4
    documents = ["abcdefghij"[: n + 1] for n in range(10)] + ["abc", "abcd", "abcde"]
    expected = [[*text.encode(), 256] for text in documents]
    found = tokens.take(np.arange(len(tokens)))
    assert found.dtype == np.int32
    assert found.tolist() == flat(expected)
    assert tokens.ends().tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
    assert tokens.vocab == 257
    # In any order and shape, across files.
    indices = np.random.RandomState(0).randint(0, len(tokens), (7, 5))
    np.testing.assert_array_equal(tokens.take(indices), found[indices])


def test_files_may_be_chosen(folder):
    files = sorted(folder.glob("*.tokens"))
    two = TokenFiles(files[2:])
    assert two.take(np.arange(len(two))).tolist() == [*b"abcd", 256, *b"abcde", 256]
    assert two.ends().tolist() == [5, 11]
    assert len(TokenFiles(files[2])) == 5


def test_other_processes_map_them_again(folder):
    data = pickle.dumps(TokenFiles(folder))
    assert len(data) < 4000
    np.testing.assert_array_equal(pickle.loads(data).take(np.arange(3)), [97, 256, 97])


def test_the_files_of_nanogpt_have_no_header(tmp_path):
    ids = np.array([5, 50256, 7, 8, 50256, 9], np.uint16)
    ids.tofile(tmp_path / "train.bin")
    tokens = TokenFiles(tmp_path / "train.bin")
    assert tokens.take(np.arange(6)).tolist() == ids.tolist()
    assert tokens.vocab == 50257 and tokens.ends().tolist() == [6]
    both = TokenFiles([tmp_path / "train.bin"] * 2, end=50256)
    assert both.ends().tolist() == [2, 5, 8, 11, 12]


def bytes_of(path, change):
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda data: data[:-1],
            r"0\.tokens is truncated or damaged: it has \d+ b",
        ),
        (lambda data: data + b"1", "is truncated or damaged"),
        (lambda data: data[:40], "is truncated or damaged"),
        (lambda data: data[:8] + b"\7" + data[9:], "of version 7, and only version 1"),
        (lambda data: b"words", r"0\.tokens is not a token file; give"),
        (lambda data: b"", r"0\.tokens is not a token file; give"),
    ],
)
def test_a_damaged_file_is_an_error(folder, change, says):
    path = bytes_of(folder / "00000.tokens", change)
    with pytest.raises(ValueError, match=says) as caught:
        TokenFiles(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=says):
        TokenFiles(folder)


def test_a_truncated_file_of_nanogpt_is_an_error(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="is truncated: it has 3 bytes"):
        TokenFiles(tmp_path / "x.bin")


def test_no_tokens_are_an_error(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"there are no tokens in .*x\.bin; give"):
        TokenFiles(tmp_path / "x.bin")
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"there are no tokens in .*none; give"):
        TokenFiles(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"there is no token file .*y; give"):
        TokenFiles(tmp_path / "y")


def test_an_unfinished_preparation_is_an_error(folder):
    (folder / "00002.tokens").unlink()
    with pytest.raises(ValueError, match="out did not finish, or files are missing; run"):
        TokenFiles(folder)


@pytest.mark.parametrize(
    "name, says",
    [
        ("x.tokens", "is not a token file; give one"),
        ("x.bin", "is truncated: it has "),
        ("prepared.json", r"prepared\.json is damaged, or not from eqxshard; delete the f"),
    ],
)
def test_pickles_are_not_read(tmp_path, name, says):
    hostile = HostilePickle(tmp_path)
    # An odd number of bytes, as no tokens of two have.
    content = hostile.content + b"." * (1 - len(hostile.content) % 2)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        TokenFiles(tmp_path if name.endswith("json") else tmp_path / name)
    assert not hostile.has_run()
