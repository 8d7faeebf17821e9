"""Plans of the recipes for eight devices, compared with theory."""

import math
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import eqxshard
from eqxshard.planning import Plan
from eqxshard.planning._targets import Compiler

RECIPES = Path(__file__).parents[1] / "recipes"

#: The options of a recipe, and the kinds of collectives along each axis.
FSDP = {"all-gather", "reduce-scatter"}
CASES = {
    "regression": ("regression.py", "", {"data": {"all-reduce"}}),
    "lenet": ("fashion_mnist.py", "--data synthetic", {"data": {"all-reduce"}}),
    "cnn fsdp": (
        "fashion_mnist.py",
        "--data synthetic --model cnn --rule fsdp",
        {"fsdp": FSDP},
    ),
    "mlp tensor": (
        "fashion_mnist.py",
        "--data synthetic --model mlp --rule tensor",
        {"tensor": {"all-reduce"}},
    ),
    "gpt fsdp": ("gpt.py", "--data synthetic", {"fsdp": FSDP}),
    "gpt tensor": (
        "gpt.py",
        "--data synthetic --mesh data=2,fsdp=2,tensor=2 --vocab-size 258",
        {"data": {"all-reduce"}, "fsdp": FSDP, "tensor": {"all-reduce"}},
    ),
    "gpt packed": (
        "gpt.py",
        "--data synthetic --mesh data=8 --pack --accumulate 2",
        {"data": {"all-reduce"}},
    ),
}


def plan_recipe(name: str, backend: Compiler) -> tuple[Plan, int]:
    """The plan of a case, and the bytes of its state on one of eight real devices."""
    recipe, options, _ = CASES[name]
    found: list[tuple[Plan, int]] = []

    def plan(make_model: Any, loss_fn: Any, optim: Any, batch: Any, **options: Any) -> Plan:
        made = eqxshard.plan(make_model, loss_fn, optim, batch, backend=backend, **options)
        state = eqxshard.abstract_state(
            make_model,
            optim,
            key=jax.random.key(0),
            mesh=eqxshard.make_mesh(**options["mesh_shape"]),
            rule=options["rule"],
            precision=options["precision"],
        )
        leaves = jax.tree.leaves(state)
        arrays = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
        shards = [math.prod(x.sharding.shard_shape(x.shape)) for x in arrays]
        found.append((made, sum(x.dtype.itemsize * n for x, n in zip(arrays, shards))))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eqxshard.run._plan_run.plan", plan)
        patch.syspath_prepend(str(RECIPES))
        patch.setattr(sys, "argv", [recipe, "--plan", "8xh200", *options.split()])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(RECIPES / recipe), run_name="__main__")
    assert stop.value.code == 0
    return found[0]


def check_recipe(name: str, backend: Compiler) -> Plan:
    """Check a recipe's state to the byte, and its communication; return its plan."""
    plan, state = plan_recipe(name, backend)
    print(plan)
    memory = plan.memory
    assert memory.parameters + memory.optimizer + memory.other_state == state
    found = {axes: set(kinds) for axes, kinds in plan.traffic.items() if "," not in axes}
    wanted = CASES[name][2]
    assert found.keys() == wanted.keys()
    for axes, kinds in wanted.items():
        assert kinds <= found[axes]
    data_only = wanted.keys() == {"data"}
    # Under data alone, nothing but gradients: nothing is gathered.
    assert not data_only or set().union(*map(set, plan.traffic.values())) == {"all-reduce"}
    return plan
