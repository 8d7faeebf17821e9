"""Flags of XLA for GPUs with which gradients have the same bits each time."""

import jax
import jax.numpy as jnp
import pytest

import eqxshard

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "option",
    [
        "enable_scatter_determinism_expander",
        "exclude_nondeterministic_ops",
        "deterministic_ops",
    ],
)
def test_gradients_of_tables_are_sums_in_a_fixed_order_if_asked_for(gpus, option):
    placed = jax.NamedSharding(eqxshard.make_mesh(devices=gpus), jax.P())

    def gradient(table, tokens):
        return jax.grad(lambda table: jnp.sum(table[tokens] ** 3))(table)

    table = jax.ShapeDtypeStruct((50257, 768), jnp.float32, sharding=placed)
    tokens = jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=placed)
    lowered = jax.jit(gradient).lower(table, tokens)
    asked = lowered.compile(compiler_options={f"xla_gpu_{option}": True})
    # Rows that repeat are sorted, and added one by one, rather than by atomics.
    sorts = [" sort(" in (each.as_text() or "") for each in (asked, lowered.compile())]
    assert sorts == [True, False]
