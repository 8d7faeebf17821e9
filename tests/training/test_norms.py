import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import RULES, Model, make_batch, make_mesh
from step_helpers import KEY, make, without_dropout

import eqxshard


def test_norms_of_gradients_are_those_before_the_optimizer():
    groups = {"first": r"^first", "biases": r"bias$"}
    train_step = eqxshard.make_train_step(
        without_dropout, optax.sgd(0.0), grad_norms=groups, accumulate=2
    )
    placed = {"mesh": make_mesh("data=2,fsdp=4"), "rule": RULES["fsdp"]}
    state = eqxshard.init_state(Model, optax.sgd(0.0), key=KEY, **placed)
    params, rest = eqx.partition(Model(KEY), eqx.is_inexact_array)
    batch = make_batch()
    grads = jax.grad(
        lambda params: jnp.mean(without_dropout(eqx.combine(params, rest), batch, KEY))
    )(params)
    values = train_step(state, batch)[1].compute()
    first = optax.tree.norm(grads.first)
    biases = optax.tree.norm([grads.first.bias, grads.last.bias])
    assert values["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
    assert values["grad_norm/first"] == pytest.approx(float(first), rel=1e-5)
    assert values["grad_norm/biases"] == pytest.approx(float(biases), rel=1e-5)


def test_a_group_without_parameters_is_refused():
    norms = {"x": "nowhere"}
    state, train_step = make("data=8", "replicate", without_dropout, grad_norms=norms)
    with pytest.raises(ValueError, match=r"'nowhere'} is found in no path .* first.weight"):
        train_step(state, make_batch())


@pytest.mark.parametrize("groups", [{}, {"head": "last"}])
def test_metrics_of_ones_own_keep_their_names(groups):
    """A name that the step would replace is refused, and no other."""

    def loss_fn(model, batch, key):
        losses = without_dropout(model, batch, key)
        return losses, {name: losses}

    for name in ("grad_norm", *(f"grad_norm/{group}" for group in groups)):
        state, train_step = make("data=8", "replicate", loss_fn, grad_norms=groups)
        with pytest.raises(ValueError, match=f"a metric is named '{name}'"):
            train_step(state, make_batch())
