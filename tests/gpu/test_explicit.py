"""A model for Explicit axes, compiled for GPUs: the collectives of the plain one."""

import functools
from collections import Counter

import jax
import optax
import pytest
from explicit_model import Model, batches, loss_fn
from helpers import lenient

import eqxshard
from eqxshard import testing
from eqxshard.sharding import batch_sharding

pytestmark = pytest.mark.gpu

SPLIT = eqxshard.by_dim({"mlp": "tensor", "heads": "tensor", "embed": "fsdp"})
MESHES = {
    "fsdp": ({"fsdp": 8}, eqxshard.fsdp(min_size=0)),
    "both": ({"data": 2, "fsdp": 4}, eqxshard.fsdp(min_size=0)),
    "tensor": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        eqxshard.first_match(SPLIT, eqxshard.replicate()),
    ),
}


def collectives(devices, sizes, rule, typed):
    """The bytes of each kind of collective of a step, by the axes that it is over."""
    mesh = eqxshard.make_mesh(**sizes, devices=devices, explicit=typed)
    optim = lenient(optax.adamw(1e-2))
    state = eqxshard.abstract_state(
        lambda key: Model(key, typed), optim, key=jax.random.key(0), mesh=mesh, rule=rule
    )
    step = eqxshard.make_train_step(loss_fn, optim)
    rows = batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        for name, x in batches()[0].items()
    }
    compiled = step.lower(state, batch).compile()
    found = Counter()
    for each in testing.collectives(compiled):
        found[each.kind, each.axes] += each.bytes
    return found


@pytest.mark.parametrize("name", MESHES)
def test_has_the_collectives_of_the_plain_model(gpus, name, as_scripts_run):
    sizes, rule = MESHES[name]
    typed = collectives(gpus, sizes, rule, True)
    assert typed == collectives(gpus, sizes, rule, False)
    assert ("reduce-scatter", ("fsdp",)) in typed


def test_a_plan_is_that_of_the_plain_model(as_scripts_run):
    sizes, rule = MESHES["tensor"]
    found = []
    for typed in (True, False):
        plan = eqxshard.plan(
            functools.partial(Model, typed=typed),
            loss_fn,
            lenient(optax.adamw(1e-2)),
            batches()[0],
            mesh_shape=sizes,
            rule=rule,
            explicit=typed,
        )
        found.append(
            Counter((each.kind, each.axes, each.sent) for each in plan.collectives)
        )
    assert found[0] == found[1]
