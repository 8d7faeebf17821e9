import pickle

import numpy as np
import pytest
from hostile_files import HostilePickle, deep_json, forbid, in_little_memory
from loader_helpers import flat

from eqxshard.data.text import TokenFiles, Tokens, prepare
from eqxshard.data.text._token_files import write_tokens


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


def write(path, tokens, ends, **header):
    """A token file whose header may lie."""
    write_tokens(path, np.array(tokens, np.uint16), np.array(ends), vocab=9, pieces=1)
    places = {"item_bytes": 16, "vocab": 24, "size": 32, "documents": 40}
    data = bytearray(path.read_bytes())
    for name, value in header.items():
        data[places[name] : places[name] + 8] = value.to_bytes(8, "little")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "ends", [[4, 3], [2, 2, 4], [5], [-1, 4], [4, 2**40], [0, 0], [0, 1, 2, 3, 4, 4]]
)
def test_ends_that_do_not_increase_within_the_file_are_refused(tmp_path, ends):
    path = write(tmp_path / "x.tokens", [1, 2, 3, 4], ends)
    with pytest.raises(ValueError, match=r"x.tokens is damaged: .*; prepare the text"):
        TokenFiles(path).ends()


def test_ends_of_a_file_that_another_file_goes_on(tmp_path):
    path = write(tmp_path / "x.tokens", [1, 2, 3, 4], [0, 3])
    assert TokenFiles(path).ends().tolist() == [0, 3, 4]


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    path = write(tmp_path / "x.tokens", [1, 8, 9], [3])
    for tokens in (TokenFiles(path), TokenFiles([path, path])):
        assert tokens.take(np.arange(2)).tolist() == [1, 8]
        with pytest.raises(ValueError, match=r"has the token 9, .* a vocabulary of 9; it"):
            tokens.take(np.arange(3))


@pytest.mark.parametrize("vocab", [0, 2**16 + 1, 2**62])
def test_a_vocabulary_that_tokens_cannot_reach_is_refused(tmp_path, vocab):
    path = write(tmp_path / "x.tokens", [1], [1], vocab=vocab)
    with pytest.raises(ValueError, match=r"is damaged: its header .*; prepare the text"):
        TokenFiles(path)


def test_more_documents_than_tokens_are_refused_before_they_are_read(tmp_path):
    """Although the file is as long as its header says: it has a hole."""
    path = write(tmp_path / "x.tokens", [1, 2, 3, 4], [4], documents=2**37)
    with path.open("r+b") as file:
        file.truncate(64 + 8 + 8 * 2**37)
    code = f"""
from eqxshard.data.text import TokenFiles
try:
    TokenFiles({str(path)!r}).ends()
except ValueError as error:
    print(error)
"""
    assert "137,438,953,472 documents in 4 tokens" in in_little_memory(code)


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["x.tokens", "x.bin"])
def test_what_is_no_file_is_not_opened(tmp_path, kind, name):
    forbid(tmp_path / name, kind)
    with pytest.raises(ValueError, match=rf"{name}' is a .*; give a regular file"):
        TokenFiles(tmp_path / name)


@pytest.mark.parametrize("kind", ["fifo", "device", "deep"])
def test_a_record_that_never_ends_is_refused(folder, kind):
    path = folder / "prepared.json"
    path.unlink()
    if kind == "deep":
        path.write_text(deep_json())
    else:
        forbid(path, kind)
    # It is no record, and the files are as whole without one.
    if kind == "deep":
        with pytest.raises(ValueError, match=r"prepared\.json is damaged, or .*; delete"):
            TokenFiles(folder)
    else:
        assert len(TokenFiles(folder))


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
