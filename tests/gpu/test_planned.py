"""Plans of all recipes by the compiler for GPUs."""

import pytest
from plan_recipes import CASES, check_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]


@pytest.mark.parametrize("name", CASES)
def test_recipes_send_what_their_rules_say(name):
    check_recipe(name, backend="gpu")
