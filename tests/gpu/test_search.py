"""A search by the compiler for GPUs."""

from functools import partial

import gpt
import jax
import jax.numpy as jnp
import pytest
from gpt_model import GPT, SIZES

import eqxshard

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]


def test_a_model_of_8b_is_fastest_split():
    shape = SIZES["8b"]
    tokens = jax.ShapeDtypeStruct((64, shape.seq_len), jnp.int32)
    search = eqxshard.plan_search(
        partial(GPT, shape=shape, remat="full"),
        gpt.loss_fn,
        gpt.make_optimizer(gpt.Args(), 1000),
        {"tokens": tokens, "targets": tokens},
        devices=64,
        rules=gpt.make_rule(shape),
        meshes=[{"data": 64}, {"fsdp": 64}],
        precision=eqxshard.Precision("bfloat16"),
        backend="gpu",
    )
    print(search)
    assert search.best is not None and search.best.mesh == {"fsdp": 64}
    # Whole it fits, but each device then updates all of its eight billion parameters.
    (whole,) = search.candidates[1:]
    assert whole.needs is not None and 110e9 < whole.needs < 144e9
    memory = [x.plan.time.memory or 0 for x in search.candidates if x.plan and x.plan.time]
    assert memory[1] > 2 * memory[0]
