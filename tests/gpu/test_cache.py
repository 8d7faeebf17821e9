"""Steps that are compiled for GPUs here, to run there."""

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import OPTIM, RULE
from transformer import Transformer, next_token_losses

import eqxshard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.thorough,
    pytest.mark.usefixtures("as_scripts_run"),
]


def test_the_same_step_has_the_same_entry_and_another_another(tmp_path):
    def entries(rows, target):
        eqxshard.plan(
            Transformer,
            next_token_losses,
            OPTIM,
            {"tokens": jax.ShapeDtypeStruct((rows, 17), jnp.int32)},
            mesh_shape={"fsdp": 8},
            rule=RULE,
            target=target,
            backend="gpu",
            cache=tmp_path,
        )
        return {path.name for path in tmp_path.glob("jit_train_step-*-cache")}

    first = entries(16, "h200")
    assert len(first) == 1
    assert entries(16, "h200") == first
    other_target = entries(16, "h100")
    assert len(other_target) == 2 and first < other_target
    assert len(entries(32, "h200")) == 3
