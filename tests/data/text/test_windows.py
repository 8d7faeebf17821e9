"""Windows, with and without regard to documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import MESHES, loader_of, take

from eqxshard.data import UniformSampler
from eqxshard.data.text import TokenArray, Windows


def everything(source):
    return source.gather(np.arange(len(source)))


def starts(source):
    return everything(source)["tokens"][:, 0].tolist()


def test_every_offset_is_a_window():
    source = Windows(TokenArray(np.arange(10), vocab_size=20), 3)
    assert len(source) == 7
    batch = source.gather(np.array([6, 0]))
    assert batch["tokens"].tolist() == [[6, 7, 8], [0, 1, 2]]
    assert batch["targets"].tolist() == [[7, 8, 9], [1, 2, 3]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize("size, expected", [(10, [0, 3, 6]), (12, [0, 3, 6]), (4, [0])])
def test_with_a_stride_no_token_is_a_target_twice(size, expected):
    source = Windows(np.arange(size), 3, stride=3)
    assert starts(source) == expected
    targets = everything(source)["targets"]
    assert targets.reshape(-1).tolist() == list(range(1, 3 * len(expected) + 1))


def test_a_limit_spreads_windows_over_the_text():
    assert starts(Windows(np.arange(101), 10, stride=10, limit=4)) == [0, 20, 50, 70]
    assert starts(Windows(np.arange(31), 10, stride=10, limit=4)) == [0, 10, 20]


def test_a_loader_draws_the_same_windows_on_any_mesh_and_goes_on_from_any_step():
    source = Windows(np.random.RandomState(0).randint(0, 50, 5000), 16)

    def batches(mesh, start=0):
        loader = loader_of(source, mesh=mesh, sampler=UniformSampler(24))
        loader.seek(start)
        return [np.asarray(batch["targets"]) for batch in take(loader, 6 - start)]

    expected = batches(MESHES[0])
    np.testing.assert_array_equal(batches(MESHES[4], start=4), expected[4:])
    assert len(np.unique(expected, axis=0)) == 6


# Documents


def documents_of(lengths):
    """Tokens whose numbers are their indices."""
    return TokenArray(np.arange(sum(lengths)), ends=np.cumsum(lengths))


def windows_by_hand(lengths, seq_len, stride):
    """The examples of windows with documents, one after another."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    first = 0
    while first + seq_len < len(owners):
        window = owners[first : first + seq_len + 1]
        tokens = list(range(first, first + seq_len))
        same = [window[i + 1] == window[i] for i in range(seq_len)]
        yield {
            "tokens": tokens,
            "targets": [t + 1 if goes_on else -1 for t, goes_on in zip(tokens, same)],
            "segments": [len(set(window[: i + 1])) for i in range(seq_len)],
            "positions": [list(window[:i]).count(window[i]) for i in range(seq_len)],
            "__weight__": sum(same),
        }
        first += stride


def test_documents_share_a_window_and_do_not_see_each_other():
    # One goes on in the next window, one is a single token, one ends with the window.
    source = Windows(documents_of([3, 4, 1, 4, 1]), 4, stride=4, documents=True)
    batch = everything(source)
    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batch["targets"].tolist() == [[1, 2, -1, 4], [5, 6, -1, -1], [9, 10, 11, -1]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2], [1, 1, 1, 2], [1, 1, 1, 1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["__weight__"].tolist() == [3, 2, 3]
    dtypes = {name: str(array.dtype) for name, array in batch.items()}
    assert dtypes.pop("__weight__") == "float32" and set(dtypes.values()) == {"int32"}


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(
        lambda lengths: max(lengths) > 1
    ),
    seq_len=st.integers(1, 24),
    stride=st.integers(1, 30),
    data=st.data(),
)
def test_windows_of_documents_are_those_by_hand(lengths, seq_len, stride, data):
    seq_len = min(seq_len, sum(lengths) - 1)
    source = Windows(documents_of(lengths), seq_len, stride=stride, documents=True)
    expected = list(windows_by_hand(lengths, seq_len, stride))
    assert len(source) == len(expected)
    # In any order, and again.
    rows = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9))
    batch = source.gather(np.array(rows, np.int64))
    for name, array in batch.items():
        assert array.tolist() == [expected[row][name] for row in rows]


def test_one_document_is_one_segment():
    plain = everything(Windows(np.arange(20), 6, stride=6))
    batch = everything(Windows(np.arange(20), 6, stride=6, documents=True))
    for name, array in plain.items():
        np.testing.assert_array_equal(batch[name], array)
    assert (batch["segments"] == 1).all() and (batch["__weight__"] == 6).all()
    assert batch["positions"].tolist() == [list(range(6))] * 3


def test_a_window_without_a_target_weighs_nothing():
    source = Windows(documents_of([1, 1, 1, 2]), 2, stride=2, documents=True)
    batch = everything(source)
    assert batch["targets"].tolist() == [[-1, -1], [-1, 4]]
    assert batch["__weight__"].tolist() == [0, 1]


def test_an_epoch_has_each_target_once_and_batches_weigh_by_them():
    source = Windows(documents_of([5] * 8 + [1]), 8, stride=8, documents=True)
    batches = take(loader_of(source, batch_size=4, epochs=1))
    targets = np.concatenate([np.asarray(batch["targets"]) for batch in batches])
    weights = np.concatenate([np.asarray(batch["__weight__"]) for batch in batches])
    found = sorted(targets[weights > 0][targets[weights > 0] >= 0].tolist())
    # All but the first of each document.
    assert found == [i for i in range(40) if i % 5]
    assert weights.sum() == 32 and len(batches) == 2 and (weights[5:] == 0).all()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Windows(np.arange(64), 64), "64 tokens, and seq_len=64 needs 65; use"),
        (lambda: Windows(np.arange(64), 1, limit=0), "limit=0 must be at least 1"),
        (lambda: Windows(np.arange(64), 0), "seq_len=0 must be at least 1"),
        (
            lambda: Windows(documents_of([1] * 8), 4, documents=True),
            "each of the 8 documents is a single token, .*; give longer documents",
        ),
    ],
)
def test_mistakes_are_errors(make, says):
    with pytest.raises(ValueError, match=says):
        make()
