import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import loader_of, take

from eqxshard.data.text import PackedDocuments, TokenArray


def documents_of(lengths):
    """Tokens whose numbers are their indices."""
    return TokenArray(np.arange(sum(lengths)), ends=np.cumsum(lengths))


def everything(source):
    return source.gather(np.arange(len(source)))


def test_documents_share_an_example():
    source = PackedDocuments(documents_of([4, 3, 2]), 5)
    example = {k: v[0] for k, v in everything(source).items()}
    assert len(source) == 2
    assert example["tokens"].tolist() == [0, 1, 2, 4, 5]
    assert example["targets"].tolist() == [1, 2, 3, 5, 6]
    assert example["segments"].tolist() == [1, 1, 1, 2, 2]
    assert example["positions"].tolist() == [0, 1, 2, 0, 1]
    assert example["__weight__"] == 5


def test_what_is_left_of_a_block_is_padding():
    source = PackedDocuments(documents_of([4, 3, 2]), 5)
    example = {k: v[1] for k, v in everything(source).items()}
    assert example["tokens"].tolist() == [7, 0, 0, 0, 0]
    assert example["targets"].tolist() == [8, -1, -1, -1, -1]
    assert example["segments"].tolist() == [1, 0, 0, 0, 0]
    assert example["positions"].tolist() == [0, 0, 0, 0, 0]
    assert example["__weight__"] == 1
    dtypes = {name: str(array.dtype) for name, array in everything(source).items()}
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
    "lengths, seq_len, says",
    [([1, 1], 4, "no document of two or more"), ([4], 0, "seq_len=0 must be at least 1")],
)
def test_nothing_to_predict_is_an_error(lengths, seq_len, says):
    with pytest.raises(ValueError, match=says):
        PackedDocuments(documents_of(lengths), seq_len)
