import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxshard.training import Metrics


def metrics(weight, nonfinite: Any = 0, **totals):
    return Metrics(
        {name: jnp.asarray(total, jnp.float32) for name, total in totals.items()},
        jnp.asarray(weight, jnp.float32),
        jnp.asarray(nonfinite, jnp.int32),
    )


def test_steps_that_were_not_finite_are_counted_and_left_out():
    stacked = metrics([4, 1, 3], [0, 1, 0], loss=[8, math.nan, 6], other=[4, 100, 3])
    assert stacked.compute() == {"loss": 2.0, "other": 1.0, "nonfinite": 1.0}
    with_infinity = metrics([4, 1], [0, 1], loss=[8, math.inf])
    assert with_infinity.compute() == {"loss": 2.0, "nonfinite": 1.0}


def test_a_name_gives_the_mean_of_each_step():
    one = metrics(4, loss=10)
    assert one.compute() == {"loss": 2.5}
    assert isinstance(one["loss"], jax.Array)
    assert one["loss"] == 2.5
    stacked = metrics([4, 1], [0, 1], loss=[8, math.nan])
    np.testing.assert_array_equal(stacked["loss"], [2, math.nan])
    with pytest.raises(KeyError, match="accuracy"):
        one["accuracy"]


def test_stack_puts_steps_one_after_the_other_on_the_host():
    stacked = Metrics.stack(
        [metrics(4, loss=8), metrics([1, 2], [1, 0], loss=[3, 5]), metrics(0, loss=0)]
    )
    assert {type(leaf) for leaf in jax.tree.leaves(stacked)} == {np.ndarray}
    np.testing.assert_array_equal(stacked.totals["loss"], [8, 3, 5, 0])
    np.testing.assert_array_equal(stacked.weight, [4, 1, 2, 0])
    np.testing.assert_array_equal(stacked.nonfinite, [0, 1, 0, 0])
    assert stacked.compute() == {"loss": 13 / 6, "nonfinite": 1.0}
    counts = metrics(4, confusion=[[2, 0], [1, 1]])
    bad = metrics(2, 1, confusion=np.full((2, 2), math.nan))
    means = Metrics.stack([counts, bad, counts]).compute()
    np.testing.assert_array_equal(means["confusion"], [[0.5, 0], [0.25, 0.25]])
    # Stacked metrics can be stacked again.
    assert Metrics.stack([stacked, stacked]).weight.shape == (8,)


def test_stack_needs_something_of_the_same_names():
    with pytest.raises(ValueError, match="no metrics to stack; take at least one step"):
        Metrics.stack([])
    with pytest.raises(ValueError, match="accuracy"):
        Metrics.stack([metrics(1, loss=1), metrics(1, loss=1, accuracy=1)])


def test_join_names_the_metrics_of_several_models():
    joined = Metrics.join(
        generator=metrics(4, loss=8), critic=metrics(2, 1, loss=6, counts=[2.0, 4.0])
    )
    assert joined["critic/loss"] == 3.0
    np.testing.assert_array_equal(joined["critic/counts"], [1.0, 2.0])
    assert joined.nonfinite == 1
    fine = Metrics.join(a=metrics(4, loss=8), b=metrics(4, loss=2))
    assert fine.compute() == {"a/loss": 2.0, "b/loss": 0.5}
    with pytest.raises(ValueError, match="no metrics to join"):
        Metrics.join()
