"""Plans of the recipes, for eight devices, and what theory says of them."""

import math
from pathlib import Path

import jax

import eqxshard
from eqxshard.planning._targets import Compiler
from eqxshard.run._planned import plan_script

RECIPES = Path(__file__).parents[1] / "recipes"

#: The options of a recipe, and the kinds of collectives along each axis.
FSDP = {"all-gather", "reduce-scatter"}
CASES = {
    "regression": ("regression.py", "", {"data": {"all-reduce"}}),
    "lenet": ("fashion_mnist.py", "", {"data": {"all-reduce"}}),
    "cnn fsdp": ("fashion_mnist.py", "--model cnn --rule fsdp", {"fsdp": FSDP}),
    "mlp tensor": (
        "fashion_mnist.py",
        "--model mlp --rule tensor",
        {"tensor": {"all-reduce"}},
    ),
    "gpt fsdp": ("gpt.py", "", {"fsdp": FSDP}),
    "gpt tensor": (
        "gpt.py",
        "--mesh data=2,fsdp=2,tensor=2 --vocab-size 258",
        {"data": {"all-reduce"}, "fsdp": FSDP, "tensor": {"all-reduce"}},
    ),
    "gpt packed": (
        "gpt.py",
        "--mesh data=8 --pack --accumulate 2",
        {"data": {"all-reduce"}},
    ),
}


def plan_recipe(name: str, backend: Compiler) -> tuple[eqxshard.Plan, int]:
    """The plan of a case, and the bytes of its state on one of eight real devices."""
    recipe, options, _ = CASES[name]
    found: list[tuple[eqxshard.Plan, int]] = []

    def planner(run, notes):
        assert notes == []
        arguments = run.for_mesh(8)
        plan = eqxshard.plan(**arguments, backend=backend)
        state = eqxshard.abstract_state(
            arguments["make_model"],
            arguments["optim"],
            key=jax.random.key(0),
            mesh=eqxshard.make_mesh(**arguments["mesh_shape"]),
            rule=arguments["rule"],
            precision=arguments["precision"],
        )
        leaves = jax.tree.leaves(state)
        arrays = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
        shards = [math.prod(x.sharding.shard_shape(x.shape)) for x in arrays]
        found.append((plan, sum(x.dtype.itemsize * n for x, n in zip(arrays, shards))))

    plan_script(RECIPES / recipe, options.split(), planner)
    return found[0]


def check_recipe(name: str, backend: Compiler) -> eqxshard.Plan:
    """Its state to the byte, and what goes along each axis; return its plan."""
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
