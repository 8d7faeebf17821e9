import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqxshard.data._order import Permutation


def permutation(length, seed=0):
    return Permutation(length, np.random.RandomState(seed))


@settings(deadline=None, max_examples=100)
@given(length=st.integers(1, 3000), data=st.data())
def test_each_row_comes_once_and_parts_are_those_of_the_whole(length, data):
    order = permutation(length)
    whole = order.rows(0, length)
    assert sorted(whole.tolist()) == list(range(length))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    np.testing.assert_array_equal(order.rows(start, stop), whole[start:stop])


def test_the_order_never_changes():
    assert permutation(10).rows(0, 10).tolist() == [2, 1, 3, 5, 7, 0, 6, 4, 9, 8]


@pytest.mark.parametrize("length", [3, 7])
def test_each_row_is_equally_often_at_each_position(length):
    orders = np.array([permutation(length, seed).rows(0, length) for seed in range(1000)])
    counts = [np.bincount(orders[:, i], minlength=length) for i in range(length)]
    expected = 1000 / length
    # 5 standard deviations.
    np.testing.assert_allclose(counts, expected, atol=5 * expected**0.5)


def test_neighbours_are_independent_and_orders_differ():
    length = 100_003
    first, second = (
        permutation(length).rows(0, 20_000),
        permutation(length, 1).rows(0, 20_000),
    )
    position = np.arange(20_000)
    for a, b in ((first[:-1], first[1:]), (first, second), (first, position)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 20_000**0.5
    # Steps from one row to the next are hardly ever the same twice.
    steps = np.diff(first)
    assert len(np.unique(steps)) > 0.85 * len(steps)


def test_a_large_order_takes_little_memory_however_long():
    order = permutation(10**10)
    rows = order.rows(10**10 - 5, 10**10)
    assert ((rows >= 0) & (rows < 10**10)).all()
    assert len(set(rows.tolist())) == 5
