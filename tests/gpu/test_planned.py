"""Plans of all recipes by the compiler for GPUs."""

import os
from pathlib import Path

import jax
import pytest
from grades import graded
from plan_recipes import CASES, check_recipe

from eqxshard import testing

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]

LOCKS = Path(__file__).parent / "locks"


@pytest.mark.parametrize("name", graded(CASES, ["lenet", "mlp tensor", "gpt fsdp"]))
def test_recipes_send_what_their_rules_say(name):
    plan = check_recipe(name, backend="gpu")
    file = LOCKS / f"{name.replace(' ', '-')}.jax-{jax.__version__}.txt"
    if not file.exists() and "EQXSHARD_UPDATE_LOCKS" not in os.environ:
        pytest.skip(
            f"there is no {file.name}; write it with EQXSHARD_UPDATE_LOCKS=1 "
            "nox -s gpu_compile -- tests/gpu/test_planned.py, and commit it."
        )
    testing.assert_plan_lock(file, plan)
