"""The communication of steps with the layers of Equinox."""

import jax
import pytest
from communication_cases import (
    BY_WORD,
    MESHES,
    MODELS,
    assert_no_activations_of_others,
    step_collectives,
)

QUICK = "data=2,fsdp=4"
#: By mesh, quick and tried on other versions of JAX, or slow.
MARKED = [
    pytest.param(mesh, marks=pytest.mark.versions if mesh == QUICK else pytest.mark.slow)
    for mesh in MESHES
]
TABLES = [name for name in MODELS if "Embedding" in name]


@pytest.mark.parametrize("mesh", MARKED)
@pytest.mark.parametrize("model", MODELS)
def test_no_device_receives_activations_of_other_examples(model, mesh):
    ops = step_collectives(model, mesh, jax.devices())
    assert ops
    assert_no_activations_of_others(ops)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", TABLES)
def test_nor_if_a_table_is_split_by_word(model, mesh, monkeypatch):
    ops = step_collectives(model, mesh, jax.devices(), BY_WORD)
    assert_no_activations_of_others(ops)
    # XLA by itself gathers the activations of the whole batch.
    monkeypatch.setenv("EQXSHARD_REWRITE", "off")
    ops = step_collectives(model, mesh, jax.devices(), BY_WORD)
    with pytest.raises(AssertionError):
        assert_no_activations_of_others(ops)
