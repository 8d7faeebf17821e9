import numpy as np
import pytest
from loader_helpers import MESHES, loader_of, take

from eqxshard.data import UniformSampler
from eqxshard.data.text import TokenArray, Windows


def starts(source):
    return source.gather(np.arange(len(source)))["tokens"][:, 0].tolist()


def test_every_offset_is_an_example():
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
    targets = source.gather(np.arange(len(source)))["targets"]
    assert targets.reshape(-1).tolist() == list(range(1, 3 * len(expected) + 1))


def test_a_limit_spreads_examples_over_the_text():
    assert starts(Windows(np.arange(101), 10, stride=10, limit=4)) == [0, 20, 50, 70]
    assert starts(Windows(np.arange(31), 10, stride=10, limit=4)) == [0, 10, 20]


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="has 64 tokens, and seq_len=64 needs 65; use"):
        Windows(np.arange(64), 64)


@pytest.mark.parametrize("options", [{"seq_len": 0}, {"seq_len": 1, "limit": 0}])
def test_numbers_are_positive(options):
    with pytest.raises(ValueError, match="=0 must be at least 1"):
        Windows(np.arange(64), **options)


def test_a_loader_draws_the_same_windows_on_any_mesh_and_goes_on_from_any_step():
    source = Windows(np.random.RandomState(0).randint(0, 50, 5000), 16)

    def batches(mesh, start=0):
        loader = loader_of(source, mesh=mesh, sampler=UniformSampler(24))
        loader.seek(start)
        return [np.asarray(batch["targets"]) for batch in take(loader, 6 - start)]

    expected = batches(MESHES[0])
    np.testing.assert_array_equal(batches(MESHES[3]), expected)
    np.testing.assert_array_equal(batches(MESHES[4], start=4), expected[4:])
    assert len(np.unique(expected, axis=0)) == 6
