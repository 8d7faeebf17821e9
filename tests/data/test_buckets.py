"""Batches of a few lengths."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import MESHES, flat, loader_of, read, rows, take

import eqxshard
from eqxshard.data import Buckets, RecordSource

BOUNDARIES = (2, 5, 9)
PAD = {"tokens": -1}


class Ragged:
    """Examples i, each with its number as often as it is long."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def gather(self, indices):
        tokens = [np.full(self.lengths[i], i, np.int32) for i in indices]
        return {"x": indices.astype(np.int32), "tokens": tokens}


def records(lengths):
    """The same, as records that are read one by one."""
    examples = [{"x": i, "tokens": [i] * n} for i, n in enumerate(lengths)]
    return RecordSource(examples, lambda x: {k: np.int32(v) for k, v in x.items()})


def padded(lengths, width=9):
    tokens = np.arange(len(lengths), dtype=np.int32)[:, None].repeat(width, 1)
    tokens[np.arange(width) >= np.asarray(lengths)[:, None]] = -1
    x = np.arange(len(lengths), dtype=np.int32)
    return eqxshard.data.ArraySource({"x": x, "tokens": tokens})


def bucketed(lengths, source: Any = Ragged, **options):
    sampler = Buckets(lengths, BOUNDARIES, PAD)
    return loader_of(source(lengths), sampler=sampler, **options)


def check(batch, lengths):
    """Whether a batch is padded as its longest example wants; returns its length."""
    tokens, real = np.asarray(batch["tokens"]), rows(batch)
    bounds = {min(b for b in BOUNDARIES if b >= lengths[i]) for i in real}
    assert bounds == {tokens.shape[1]}
    for i, row in zip(real, tokens):
        assert row.tolist() == [i] * lengths[i] + [-1] * (len(row) - lengths[i])
    return tokens.shape[1]


@settings(deadline=None, max_examples=10)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=30, max_size=70),
    mesh=st.sampled_from(MESHES),
    remainder=st.sampled_from(["pad", "drop"]),
    source=st.sampled_from([Ragged, padded]),
    step=st.integers(0, 12),
)
def test_each_example_comes_once_in_an_epoch_from_any_step(
    lengths, mesh, remainder, source, step
):
    options = {"remainder": remainder, "source": source}
    loader = bucketed(lengths, mesh=mesh, prefetch=0, **options)
    batches = take(loader, 2 * len(loader))
    buckets = np.searchsorted(BOUNDARIES, lengths)
    counts = np.bincount(buckets, minlength=3)
    for batch in batches:
        check(batch, lengths)
    orders = []
    for epoch in (batches[: len(loader)], batches[len(loader) :]):
        seen = [i for batch in epoch for i in rows(batch)]
        expected = counts if remainder == "pad" else counts // 8 * 8
        assert len(seen) == len({*seen})
        assert np.bincount(buckets[seen], minlength=3).tolist() == expected.tolist()
        orders.append([rows(batch) for batch in epoch])
    assert orders[0] != orders[1]
    # From any step, on another mesh.
    step %= 2 * len(loader)
    again = bucketed(lengths, prefetch=0, **options)
    state = json.loads(json.dumps(loader.state() | {"step": step}))
    again.restore(state)
    assert again.steps.ends_epoch(2 * len(loader))
    assert read(again, 2 * len(loader) - step) == flat(orders)[step:]
    assert again.rows(step).tolist() == flat(orders)[step]


LENGTHS = [1, 2, 4, 5, 6, 9, 3, 8] * 9


@pytest.mark.parametrize("options", [{"prefetch": 2}, {"transform": dict}])
def test_records_of_several_lengths_are_padded_ahead(options):
    loader = bucketed(LENGTHS, records, epochs=1, mesh=MESHES[4], **options)
    expected = read(bucketed(LENGTHS, padded, epochs=1))
    batches = take(loader)
    assert {check(batch, LENGTHS) for batch in batches} == {*BOUNDARIES}
    assert [rows(batch) for batch in batches] == expected
    assert loader.shapes()["tokens"].shape == (8, 9)


def test_the_batch_size_changes_between_epochs():
    loader = bucketed(LENGTHS)
    end = len(loader)
    larger = bucketed(LENGTHS, batch_size=16)
    with pytest.raises(ValueError, match=r"make up a batch .* step 3 is within one; go on"):
        larger.restore(loader.state() | {"step": 3}, rebatch=True)
    larger.restore(loader.state() | {"step": end}, rebatch=True)
    assert len(larger) < end and larger.steps.end(2) == end + len(larger)
    assert sorted(flat(read(larger, len(larger)))) == [*range(len(LENGTHS))]
    assert larger.rows(2).tolist() == loader.rows(2).tolist()


@pytest.mark.parametrize(
    "lengths, boundaries, pad, says",
    [
        ([1.5], (2,), PAD, r"lengths is float64 of shape \(1,\); give int"),
        ([], (2,), PAD, r"lengths is float64 of shape \(0,\); give int"),
        ([1], (2, 2), PAD, r"boundaries \[2, 2\] must ascend"),
        ([-1], (2,), PAD, r"no length be negative \(the least is -1\)"),
        ([1, 4, 2], (2, 3), PAD, "example 1 has the length 4, and the last boundary is 3"),
        ([1], (2,), {}, "pad is empty; give"),
    ],
)
def test_invalid_buckets_are_errors(lengths, boundaries, pad, says):
    with pytest.raises(ValueError, match=says):
        Buckets(lengths, boundaries, pad)


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"source": padded([1, 2])},
            "buckets are of 72 lengths, and the source has 2 exam",
        ),
        ({"pad": {"y": 0}}, r"buckets pad 'y', and the examples have \['tokens', 'x'\]"),
        ({"pad": {"x": 0}}, "buckets pad 'x', which has one number per example; leave"),
        ({"lengths": [1] * 72}, "'tokens' has an example of length . in the bucket of len"),
        (
            {"placement": "device"},
            "gathers batches of one shape, and .* use placement='host'",
        ),
        ({"remainder": "error"}, "batches of 8 leave . of 72 examples over"),
        ({"remainder": "drop", "batch_size": 64}, "one batch of 64 in each bucket, and"),
        ({"sampler": None}, r"'tokens' has rows of the shapes \(1,\), .*; pad .*Buckets"),
    ],
)
def test_what_does_not_suit_buckets_is_an_error(options, says):
    options = {"source": Ragged(LENGTHS), "prefetch": 0} | options
    lengths, pad = options.pop("lengths", LENGTHS), options.pop("pad", PAD)
    options.setdefault("sampler", Buckets(lengths, BOUNDARIES, pad))
    with pytest.raises(ValueError, match=says):
        read(loader_of(**options), 1)
