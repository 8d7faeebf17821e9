"""Random numbers per example: functions of the seed, the epoch and the row alone.

That they are the same in workers is tested in test_pipeline.py, where there are some.
"""

import jax
import numpy as np
import pytest
from loader_helpers import loader_of, numbers, rows, take

import eqxshard
from eqxshard.data import ExampleRandom, RandomTransform
from eqxshard.data._host import HostBatches
from eqxshard.data._samplers import Shuffled


def draw(batch, random):
    """Numbers of every kind, one or several per example."""
    return {
        "x": batch["x"],
        "key": random.keys,
        "uniform": random.uniform(shape=(3,)),
        "normal": random.normal((2, 2)),
        "integer": random.integers(0, 2**31).astype(np.int32),
    }


DRAW = RandomTransform(draw)


def drawn(batches):
    """What each example drew, by epoch-independent row."""
    found = {}
    for batch in batches:
        examples = rows(batch)
        for name in ("key", "uniform", "normal", "integer"):
            values = np.asarray(batch[name])[: len(examples)]
            found |= {(i, name): v.tobytes() for i, v in zip(examples, values)}
    return found


def keys_of(seed, epoch, examples):
    key = jax.random.fold_in(jax.random.key(seed), epoch)
    keys = [jax.random.fold_in(key, example) for example in examples]
    return np.stack([jax.random.key_data(key) for key in keys])


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_keys_are_those_of_jax(seed):
    loader = loader_of(numbers(20), seed=seed, epochs=3, transform=DRAW)
    loader.seek(7)  # the second batch of the third epoch
    batch = take(loader, 1)[0]
    np.testing.assert_array_equal(batch["key"], keys_of(seed, 2, rows(batch)))
    draws = jax.vmap(jax.random.normal)(jax.random.wrap_key_data(batch["key"]))
    assert draws.shape == (8,)


def test_an_example_draws_the_same_whatever_its_batch():
    options = {"transform": DRAW, "epochs": 1}
    expected = drawn(loader_of(numbers(20), **options))
    assert len(expected) == 4 * 20
    assert drawn(loader_of(numbers(20), batch_size=5, **options)) == expected
    assert drawn(loader_of(numbers(20), prefetch=0, **options)) == expected
    assert drawn(loader_of(numbers(20), shuffle=False, **options)) == expected
    resumed = loader_of(numbers(20), **options)
    resumed.seek(2)
    rest = drawn(resumed)
    assert len(rest) == 4 * 4 and rest.items() <= expected.items()


def test_seeds_and_epochs_draw_anew():
    loader = loader_of(numbers(8), transform=DRAW, epochs=2)
    first, second = (drawn([batch]) for batch in loader)
    other = drawn(loader_of(numbers(8), transform=DRAW, epochs=1, seed=1))
    assert len(set(first.values()) | set(second.values()) | set(other.values())) == 3 * 32


def test_several_processes_draw_what_one_would():
    whole = take(loader_of(numbers(20), transform=DRAW), 3)
    halves = [
        HostBatches(
            numbers(20),
            Shuffled(20),
            batch_size=8,
            seed=0,
            fills=True,
            transform=DRAW,
            positions=np.arange(4) + first,
        ).gather(range(3))
        for first in (0, 4)
    ]
    for batch, *parts in zip(whole, *halves, strict=True):
        for name in ("key", "uniform", "normal", "integer", "x"):
            both = np.concatenate([part.arrays[name] for part in parts])
            np.testing.assert_array_equal(both, batch[name])


def test_an_example_that_comes_again_draws_anew():
    class Twice:
        def __len__(self):
            return 16

        def rows(self, examples, seed, epoch):
            return np.tile(np.arange(examples), 2)

    first, second = loader_of(numbers(8), sampler=Twice(), transform=DRAW, epochs=1)
    assert rows(first) == rows(second)
    np.testing.assert_array_equal(first["key"], keys_of(0, 0, range(8)))
    again = [
        jax.random.key_data(jax.random.fold_in(key, 1))
        for key in jax.random.wrap_key_data(first["key"])
    ]
    np.testing.assert_array_equal(second["key"], np.stack(again))


# Numbers


@pytest.fixture
def random():
    return ExampleRandom(keys_of(0, 0, range(64)))


def test_numbers_follow_their_distributions(random):
    uniform, normal = random.uniform(2, 4, (500,)), random.normal((501,))
    assert uniform.dtype == normal.dtype == np.float32
    assert uniform.min() >= 2 and uniform.max() <= 4
    np.testing.assert_allclose(uniform.mean(), 3, atol=0.02)
    np.testing.assert_allclose(uniform.std(), 2 / 12**0.5, rtol=0.02)
    np.testing.assert_allclose([normal.mean(), normal.std()], [0, 1], atol=0.02)
    np.testing.assert_allclose((normal**4).mean(), 3, rtol=0.05)
    counts = np.bincount(random.integers(-2, 3, (500,)).ravel() + 2)
    np.testing.assert_allclose(counts / 32_000, 0.2, atol=0.01)


def test_calls_draw_anew_and_do_not_depend_on_earlier_shapes(random):
    first, second = random.uniform(shape=(3,)), random.uniform(shape=(3,))
    assert len(np.unique([first, second])) == 2 * 64 * 3
    other = ExampleRandom(random.keys)
    np.testing.assert_array_equal(other.uniform(shape=(5, 2))[:, 0, 0], first[:, 0])
    np.testing.assert_array_equal(other.uniform(shape=(3,)), second)


def test_examples_are_independent_of_their_neighbours(random):
    for shape in ((), (1,), (3,), (5, 7)):
        whole = ExampleRandom(random.keys).normal(shape)
        assert whole.shape == (64, *shape)
        part = ExampleRandom(random.keys[5:8]).normal(shape)
        np.testing.assert_array_equal(part, whole[5:8])


def test_limits_may_be_one_per_example(random):
    high = np.arange(1, 65)
    assert (random.integers(0, high) < high).all()
    assert (random.uniform(0, high) <= high).all()


def test_each_example_may_have_a_generator_of_numpy(random):
    values = [generator.random() for generator in random.generators()]
    assert len(set(values)) == 64
    part = ExampleRandom(random.keys[3:5]).generators()
    assert [generator.random() for generator in part] == values[3:5]


@pytest.mark.parametrize("low, high", [(3, 3), (0, 2**32 + 1)])
def test_empty_and_too_large_ranges_are_errors(random, low, high):
    with pytest.raises(ValueError, match=rf"integers\({low}, {high}\) has no numbers"):
        random.integers(low, high)


def test_random_transforms_need_the_host():
    with pytest.raises(ValueError, match="placement='device' cannot run transform="):
        eqxshard.Loader(
            numbers(8),
            batch_size=8,
            mesh=eqxshard.make_mesh(),
            placement="device",
            transform=DRAW,
        )
