import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from loader_helpers import MESHES, flat, loader_of, numbers, read, take

from eqxshard.data import UniformSampler, _order


class Half:
    """The first or the second half of the examples, in turn."""

    def __init__(self, shift=0):
        self.shift = shift

    def __len__(self) -> int:
        return 12

    def rows(self, examples, seed, epoch):
        return np.arange(12) + 12 * ((epoch + self.shift) % 2)


def test_an_epoch_is_what_the_sampler_says():
    loader = loader_of(numbers(24), sampler=Half(), epochs=3)
    assert len(loader) == 2
    assert flat(read(loader)) == [*range(12), *range(12, 24), *range(12)]
    loader.seek(3)
    assert read(loader, 1) == [list(range(20, 24))]
    assert loader.rows(2).tolist() == list(range(12, 20))
    assert len(loader_of(numbers(24), sampler=Half(), remainder="drop")) == 1


def test_batches_are_the_same_on_every_mesh_and_on_the_device():
    options = {"sampler": UniformSampler(24), "epochs": 2}
    expected = read(loader_of(numbers(24), **options))
    for mesh in MESHES[1:4]:
        assert read(loader_of(numbers(24), mesh=mesh, **options)) == expected
    assert read(loader_of(numbers(24), placement="device", **options)) == expected


def test_a_sampler_decides_the_order():
    with pytest.raises(ValueError, match="shuffle=False has no meaning with a sampler"):
        loader_of(numbers(24), sampler=Half(), shuffle=False)


def test_the_state_tells_samplers_apart():
    state = json.loads(json.dumps(loader_of(numbers(24), sampler=Half()).state()))
    loader_of(numbers(24), sampler=Half()).restore(state)
    options: list[dict[str, Any]] = [{"sampler": Half(1)}, {}]
    for other in options:
        with pytest.raises(ValueError, match=r"other examples: sampler was '.*' and is"):
            loader_of(numbers(24), **other).restore(state)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_order_can_be_entered_anywhere_however_long_it_is(prefetch, monkeypatch):
    batches = read(loader_of(numbers(61), epochs=2))
    # Shorter than a batch, so that each batch takes its rows from two or more.
    monkeypatch.setattr(_order, "_STRETCH", 7)
    loader = loader_of(numbers(61), epochs=2, prefetch=prefetch)
    assert read(loader) == batches
    first, second = (flat(part) for part in (batches[:8], batches[8:]))
    assert sorted(first) == sorted(second) == list(range(61))
    assert first != second
    for step in (1, 7, 8, 11):
        loader.seek(step)
        assert read(loader) == batches[step:]
        assert loader.rows(step).tolist() == batches[step]
    assert read(loader_of(numbers(61), mesh=MESHES[4], epochs=2)) == batches


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_ten_million_examples_takes_little_memory(shuffle):
    class Many:
        def __len__(self):
            return 10_000_000

        def gather(self, indices):
            return {"x": indices.astype(np.int32)}

    tracemalloc.start()
    try:
        loader = loader_of(Many(), batch_size=256, shuffle=shuffle, prefetch=0)
        for step in (0, len(loader) - 2):
            loader.seek(step)
            take(loader, 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The whole order would take 80 MB.
    assert peak < 8 * 2**20


class Wrong(Half):
    def __init__(self, rows):
        self.wrong = rows

    def rows(self, examples, seed, epoch):
        return self.wrong


@pytest.mark.parametrize(
    "rows", [np.zeros(12), np.arange(11), np.arange(12) * 3, np.arange(12) - 1]
)
def test_wrong_rows_are_an_error(rows, unannotated):
    with pytest.raises(ValueError, match=r"for epoch 0, .*; return 12 int"):
        loader_of(numbers(24), sampler=Wrong(rows))


class Empty(Half):
    def __len__(self):
        return 0

    def rows(self, examples, seed, epoch):
        return np.arange(0)


@pytest.mark.parametrize(
    "sampler, error, says",
    [
        ([1, 2, 3], TypeError, "a list is not a sampler; give something with"),
        (Empty(), ValueError, "an epoch has no examples; give"),
    ],
)
def test_unsuitable_samplers_are_errors(unannotated, sampler, error, says):
    with pytest.raises(error, match=says):
        loader_of(numbers(24), sampler=sampler)


# All alike


def test_examples_are_drawn_alike_and_again_in_an_epoch():
    sampler = UniformSampler(6000)
    first, second = (sampler.rows(3, seed=5, epoch=epoch) for epoch in range(2))
    assert len(sampler) == len(first) == 6000 and (first != second).any()
    assert np.bincount(first).tolist() == pytest.approx([2000] * 3, rel=0.1)
    assert sampler.rows(2**40, seed=5, epoch=0).max() > 2**39
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        UniformSampler(0)
