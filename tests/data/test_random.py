"""Random numbers per example: functions of the seed, the epoch and the place alone.

That they are the same in workers is tested in test_pipeline.py, where there are some.
"""

import numpy as np
from loader_helpers import loader_of, numbers, rows, take

from eqxshard.data import RandomTransform
from eqxshard.data._host import HostBatches
from eqxshard.data._samplers import Order
from eqxshard.data._steps import Steps


def draw(batch, generators):
    draws = [generator.integers(2**31, size=3) for generator in generators]
    return {"x": batch["x"], "draw": np.stack(draws).astype(np.int32)}


DRAW = RandomTransform(draw)


def drawn(batches):
    """What each example drew."""
    found = {}
    for batch in batches:
        found |= {
            i: values.tobytes() for i, values in zip(rows(batch), np.asarray(batch["draw"]))
        }
    return found


def test_an_example_draws_the_same_whatever_its_batch():
    options = {"transform": DRAW, "epochs": 1}
    expected = drawn(loader_of(numbers(20), **options))
    assert len(set(expected.values())) == 20
    assert drawn(loader_of(numbers(20), batch_size=5, **options)) == expected
    assert drawn(loader_of(numbers(20), prefetch=0, **options)) == expected
    resumed = loader_of(numbers(20), **options)
    resumed.seek(2)
    rest = drawn(resumed)
    assert len(rest) == 4 and rest.items() <= expected.items()


def test_seeds_epochs_and_repeated_rows_draw_anew():
    class Twice:
        def __len__(self):
            return 16

        def rows(self, examples, seed, epoch):
            return np.tile(np.arange(examples), 2)

    options = {"transform": DRAW, "sampler": Twice()}
    batches = take(loader_of(numbers(8), epochs=2, **options))
    batches += take(loader_of(numbers(8), epochs=1, seed=1, **options))
    assert all(rows(batch) == list(range(8)) for batch in batches)
    draws = np.concatenate([batch["draw"] for batch in batches])
    assert len(np.unique(draws, axis=0)) == 6 * 8


def test_several_processes_draw_what_one_would():
    whole = take(loader_of(numbers(20), transform=DRAW), 3)
    halves = [
        HostBatches(
            numbers(20),
            Order(20),
            Steps.of(8, 20),
            transform=DRAW,
            positions=np.arange(4) + first,
        ).gather(range(3))
        for first in (0, 4)
    ]
    for batch, *parts in zip(whole, *halves, strict=True):
        for name in ("draw", "x"):
            both = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(both, batch[name])
