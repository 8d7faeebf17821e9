"""Windows and packed documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import MESHES, loader_of, take

from eqxshard.data import UniformSampler
from eqxshard.data.text import PackedDocuments, TokenArray, Windows


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


# Packing


def documents_of(lengths):
    """Tokens whose numbers are their indices."""
    return TokenArray(np.arange(sum(lengths)), ends=np.cumsum(lengths))


def test_documents_share_an_example_and_the_rest_is_padding():
    source = PackedDocuments(documents_of([4, 3, 2]), 5)
    batch = everything(source)
    assert batch["tokens"].tolist() == [[0, 1, 2, 4, 5], [7, 0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 3, 5, 6], [8, -1, -1, -1, -1]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2], [1, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert batch["__weight__"].tolist() == [5, 1]
    dtypes = {name: str(array.dtype) for name, array in batch.items()}
    assert dtypes.pop("__weight__") == "float32" and set(dtypes.values()) == {"int32"}


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(
        lambda lengths: max(lengths) > 1
    ),
    seq_len=st.integers(1, 24),
)
def test_every_token_with_a_successor_is_in_one_example(lengths, seq_len):
    tokens = documents_of(lengths)
    batch = everything(PackedDocuments(tokens, seq_len))
    real = batch["targets"] >= 0
    np.testing.assert_array_equal(real, batch["segments"] > 0)
    np.testing.assert_array_equal(real.sum(axis=1), batch["__weight__"])
    lasts = tokens.ends() - 1
    expected = np.setdiff1d(np.arange(len(tokens)), lasts)
    assert sorted(batch["tokens"][real].tolist()) == expected.tolist()
    np.testing.assert_array_equal(batch["targets"][real], batch["tokens"][real] + 1)
    # A segment is a part of one document, in order; those that fit are whole.
    owners = np.searchsorted(tokens.ends(), batch["tokens"], side="right")
    for row in range(len(real)):
        for segment in range(1, batch["segments"][row].max() + 1):
            here = batch["segments"][row] == segment
            assert len(set(owners[row][here])) == 1
            assert batch["positions"][row][here].tolist() == list(range(here.sum()))
            assert (np.diff(batch["tokens"][row][here]) == 1).all()
            whole = lengths[owners[row][here][0]] - 1
            assert here.sum() == whole or whole > seq_len


def test_little_is_left_empty():
    lengths = np.random.RandomState(0).randint(2, 200, 500)
    source = PackedDocuments(documents_of(lengths), 256)
    assert len(source) == np.ceil((lengths - 1).sum() / 256)


def test_a_loader_weighs_batches_by_their_targets():
    source = PackedDocuments(documents_of([5] * 9), 8)
    batches = take(loader_of(source, batch_size=4, epochs=1))
    weights = [np.asarray(batch["__weight__"]) for batch in batches]
    assert np.concatenate(weights).sum() == 9 * 4
    assert len(batches) == 2 and (weights[1][1:] == 0).all()


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Windows(np.arange(64), 64), "64 tokens, and seq_len=64 needs 65; use"),
        (lambda: Windows(np.arange(64), 1, limit=0), "limit=0 must be at least 1"),
        (lambda: PackedDocuments(documents_of([1, 1]), 4), "no document of two or more"),
        (lambda: PackedDocuments(documents_of([4]), 0), "seq_len=0 must be at least 1"),
    ],
)
def test_mistakes_are_errors(make, says):
    with pytest.raises(ValueError, match=says):
        make()
