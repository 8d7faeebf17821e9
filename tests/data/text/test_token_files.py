import json
import pickle

import numpy as np
import pytest
from hostile_files import HostilePickle, deep_json, forbid, in_little_memory
from loader_helpers import flat

from eqxshard.data.text import TokenFiles, Tokens, prepare


@pytest.fixture
def folder(tmp_path):
    """Several shards of 13 documents."""
    documents = ["abcdefghij"[: n + 1] for n in range(10)] + ["abc", "abcd", "abcde"]
    lines = [json.dumps({"text": text}) + "\n" for text in documents]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    prepare(tmp_path / "x.jsonl", tmp_path / "out", "byte", shard_tokens=20)
    return tmp_path / "out"


def write(folder, tokens, ends, **record):
    """A folder of one shard, whose parts need not fit each other."""
    folder.mkdir()
    np.save(folder / "00000.npy", np.array(tokens, np.uint16))
    np.save(folder / "00000.ends.npy", np.array(ends))
    content = {"vocab_size": 9, "shards": [len(tokens)]} | record
    (folder / "prepared.json").write_text(json.dumps(content))
    return folder


def test_files_are_one_row_of_tokens(folder):
    tokens = TokenFiles(folder)
    assert isinstance(tokens, Tokens)
    assert len(list(folder.glob("*.ends.npy"))) == 4
    documents = ["abcdefghij"[: n + 1] for n in range(10)] + ["abc", "abcd", "abcde"]
    expected = [[*text.encode(), 256] for text in documents]
    found = tokens.take(np.arange(len(tokens)))
    assert found.dtype == np.int32
    assert found.tolist() == flat(expected)
    assert tokens.ends().tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
    assert tokens.vocab_size == 257
    # In any order and shape, across files.
    indices = np.random.RandomState(0).randint(0, len(tokens), (7, 5))
    np.testing.assert_array_equal(tokens.take(indices), found[indices])


def test_other_processes_map_them_again(folder):
    data = pickle.dumps(TokenFiles(folder))
    assert len(data) < 4000
    np.testing.assert_array_equal(pickle.loads(data).take(np.arange(3)), [97, 256, 97])


def test_the_files_of_nanogpt(tmp_path):
    ids = np.array([5, 50256, 7, 8, 50256, 9], np.uint16)
    ids.tofile(tmp_path / "train.bin")
    tokens = TokenFiles(tmp_path / "train.bin")
    assert tokens.take(np.arange(6)).tolist() == ids.tolist()
    assert tokens.vocab_size == 50257 and tokens.ends().tolist() == [6]
    both = TokenFiles([tmp_path / "train.bin"] * 2, eos_id=50256)
    for read in (both, pickle.loads(pickle.dumps(both))):
        assert read.ends().tolist() == [2, 5, 8, 11, 12]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: data.replace(b"<u2", b"<i2"),
        lambda data: b"words",
        lambda data: b"",
    ],
)
def test_a_damaged_file_is_an_error(folder, change):
    path = folder / "00000.npy"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=r"00000\.npy is .*damaged.*; prepare") as caught:
        TokenFiles(folder)
    assert "\n" not in str(caught.value)


def test_files_that_do_not_belong_together_are_an_error(folder):
    (folder / "00000.npy").write_bytes((folder / "00001.npy").read_bytes())
    with pytest.raises(ValueError, match=r"00000\.npy is damaged: .*; prepare"):
        TokenFiles(folder)
    (folder / "00000.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"00000\.npy.*; prepare"):
        TokenFiles(folder)


@pytest.mark.parametrize(
    "ends", [[4, 3], [2, 2, 4], [5], [-1, 4], [4, 2**40], [0, 0], [0, 1, 2, 3, 4, 4]]
)
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_ends_that_do_not_increase_within_the_file_are_refused(tmp_path, ends, dtype):
    tokens = TokenFiles(write(tmp_path / "x", [1, 2, 3, 4], np.array(ends).astype(dtype)))
    with pytest.raises(ValueError, match=r"00000\.ends\.npy is damaged: .*; prepare"):
        tokens.ends()


def test_a_document_may_go_on_in_the_next_file(tmp_path):
    folder = write(tmp_path / "x", [1, 2, 3, 4], np.array([0, 3], np.uint64))
    assert TokenFiles(folder).ends().tolist() == [0, 3, 4]


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    tokens = TokenFiles(write(tmp_path / "x", [1, 8, 9], [3]))
    assert tokens.take(np.arange(2)).tolist() == [1, 8]
    with pytest.raises(ValueError, match="has the token 9, and the vocabulary has 9; it"):
        tokens.take(np.arange(3))


def test_more_documents_than_tokens_are_refused_before_they_are_read(tmp_path):
    """Although the file is as long as its header says: it has a hole."""
    folder = write(tmp_path / "x", [1, 2, 3, 4], np.array([4], np.uint64))
    header = {"descr": "<u8", "fortran_order": False, "shape": (2**30,)}
    with (folder / "00000.ends.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 8 * 2**30)
    code = f"""
from eqxshard.data.text import TokenFiles
try:
    TokenFiles({str(folder)!r}).ends()
except ValueError as error:
    print(error)
"""
    assert "00000.ends.npy is damaged" in in_little_memory(code, gigabytes=14)


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["00000.npy", "prepared.json", "x.bin"])
def test_what_is_no_file_is_not_opened(folder, kind, name):
    (folder / name).unlink(missing_ok=True)
    forbid(folder / name, kind)
    with pytest.raises(ValueError, match=r"(is .*damaged|is not a regular file)"):
        TokenFiles(folder / name if name == "x.bin" else folder)


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", deep_json(), '{"vocab_size": 3, "shards": 3}']
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
    with pytest.raises(ValueError, match=r"there are no tokens in .*x\.bin; give"):
        TokenFiles(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"x\.bin has 3 bytes and is not.*; give one"):
        TokenFiles(tmp_path / "x.bin")
    with pytest.raises(FileNotFoundError, match=r"there is no token file .*y; give"):
        TokenFiles(tmp_path / "y")


@pytest.mark.parametrize("name", ["00000.npy", "00000.ends.npy", "prepared.json"])
def test_pickles_are_not_read(folder, tmp_path, name):
    hostile = HostilePickle(tmp_path)
    (folder / name).write_bytes(hostile.content)
    with pytest.raises(ValueError, match="damaged"):
        TokenFiles(folder).ends()
    assert not hostile.has_run()
