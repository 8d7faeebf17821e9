import equinox as eqx
import jax
import numpy as np
import pytest
from helpers import RULES, assert_equal, compiles, make_batch, make_mesh
from step_helpers import SPLITS, WEIGHTS, mean_of_x, setup

import eqxshard


@pytest.mark.parametrize("mesh, rule", SPLITS)
def test_an_eval_step_measures_compiles_once_and_donates_nothing(mesh, rule):
    state, _ = setup(mesh, rule)
    eval_step = eqxshard.make_eval_step(mean_of_x, mesh=make_mesh(mesh), rule=RULES[rule])
    weight = WEIGHTS["uneven"]
    batch = make_batch(weight=weight)
    with compiles("eval_step") as events:
        metrics = eval_step(state.model, batch)
        again = eval_step(state.model, batch)
    assert len(events) == 3  # It is traced, lowered and compiled once.
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if eqx.is_array(x))
    assert_equal(metrics, again)
    means = metrics.compute()
    assert means["x"] == pytest.approx(
        np.average(batch["x"][:, 0], weights=weight), rel=1e-4
    )
    assert means["scalar"] == pytest.approx(3)
    # In inference mode there is no dropout.
    quiet = eqx.nn.inference_mode(jax.device_put(state.model, jax.devices()[0]))
    expected = np.average(jax.vmap(quiet)(batch["x"])[:, 0], weights=weight)
    assert means["out"] == pytest.approx(expected, rel=1e-4)
