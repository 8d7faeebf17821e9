"""What gradients are summed over GPUs in, and how often."""

import math

import jax
import optax
import pytest
from communication_cases import dtype_and_dims
from grades import graded
from summed_gradients import loss_fn, make_batch, make_model

import eqxshard
from eqxshard.testing import collectives

pytestmark = [pytest.mark.gpu, pytest.mark.versions]

OPTIM = optax.sgd(1.0)
REPLICATE, FSDP = eqxshard.replicate(), eqxshard.fsdp(min_size=64)
MESHES = {
    "data": ({"data": 8}, REPLICATE),
    "fsdp": ({"data": 1, "fsdp": 8}, FSDP),
    "both": ({"data": 2, "fsdp": 4}, FSDP),
}
CASES = [(mesh, n, each) for mesh in MESHES for n in (1, 2) for each in ("f32", "bf16")]
QUICK = [("data", 1, "f32"), ("both", 2, "f32"), ("both", 1, "bf16")]


def sums(devices, mesh, accumulate, reduce):
    """Of each reduction of arrays: how often, its type, and the elements of each device.

    And the elements of all parameters.
    """
    sizes, rule = MESHES[mesh]
    placed: dict = dict(mesh=eqxshard.make_mesh(**sizes, devices=devices), rule=rule)
    precision = eqxshard.Precision("bfloat16", reduce=reduce)
    state = eqxshard.abstract_state(
        make_model, OPTIM, key=jax.random.key(0), precision=precision, **placed
    )
    step = eqxshard.make_train_step(loss_fn, OPTIM, accumulate=accumulate, **placed)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in make_batch().items()
    }
    found = []
    for op in collectives(step.lower(state, batch).compile()).ops:
        if op.kind in ("all-reduce", "reduce-scatter"):
            for dtype, dims in map(dtype_and_dims, op.shapes):
                # The loss is a number, and may be sent with gradients of its type.
                if math.prod(dims) > 1:
                    found.append((op.times, dtype, math.prod(dims)))
    return found, sum(x.size for x in jax.tree.leaves(state.model))


@pytest.mark.parametrize("mesh, accumulate, dtype", graded(CASES, QUICK))
def test_every_gradient_is_summed_in_the_type_that_was_asked_for(
    gpus, mesh, accumulate, dtype
):
    reduce = {"f32": "float32", "bf16": "bfloat16"}[dtype]
    found, size = sums(gpus, mesh, accumulate, reduce)
    assert {each for _, each, _ in found} == {dtype}
    if mesh == "data":
        # Each parameter once, also one that is both looked up and multiplied.
        total = sum(times * n for times, _, n in found)
        # Of some, XLA adds up the microbatches before the devices.
        assert size <= total <= (size + 1 if accumulate == 1 else 2 * size + 1)
