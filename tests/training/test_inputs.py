import jax
import numpy as np
import pytest
from helpers import RULES, make_batch, make_loader, make_mesh
from step_helpers import mean_of_x, setup

import eqxshard

SHAPES = {
    "indivisible": (make_batch(12), "batch size 12 does not divide over data=8"),
    "empty": (make_batch(0), "batch size 0 is not positive; use a multiple of 8"),
    "scalar": ({**make_batch(), "z": 3.0}, r"'z': \(1?,?\).* same leading dim"),
    "uneven": (
        {**make_batch(), "y": make_batch(16)["y"]},
        "each the same leading dim",
    ),
    "nothing": ({}, "each the same leading dim"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_that_do_not_fit_are_refused_and_the_state_is_kept(shape):
    batch, message = SHAPES[shape]
    state, train_step = setup()
    eval_step = eqxshard.make_eval_step(
        mean_of_x, mesh=make_mesh(), rule=RULES["replicate"]
    )
    for call in (
        lambda: train_step(state, batch),
        lambda: train_step.many(state, jax.tree.map(lambda x: np.asarray(x)[None], batch)),
        lambda: eval_step(state.model, batch),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    state, _ = train_step(state, make_batch())
    assert int(state.step) == 1


def test_stacked_batches_of_a_loader_are_for_many():
    state, train_step = setup()
    batches = make_loader(placement="device").stacked(2)
    with pytest.raises(TypeError, match="returns batches for several steps; give them"):
        train_step(state, batches)
    other = make_loader(placement="device", mesh=make_mesh("data=4")).stacked(2)
    with pytest.raises(ValueError, match=r"the loader's dataset is on .*data=4\), and th"):
        train_step.many(state, other)
    state, metrics = train_step.many(state, batches)
    assert int(state.step) == 2 and metrics.weight.shape == (2,)


class Foreign:
    """An array of another library, such as a tensor of PyTorch."""

    shape = (32, 8)


def test_arrays_of_other_libraries_are_refused():
    state, step = setup("data=8", "replicate")
    with pytest.raises(TypeError, match=r"batch entry x is a .*\.Foreign; convert it"):
        step(state, {**make_batch(32), "x": Foreign()})
    step(state, make_batch(32))
