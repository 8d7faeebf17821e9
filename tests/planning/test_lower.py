"""A plan is made of the step that training runs: both lower the same program."""

from typing import Any

import explicit_model
import jax
import jax.numpy as jnp
import lint_helpers
import numpy as np
import optax
import pytest
from grades import graded
from helpers import lenient, needs_new_jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from plan_helpers import BATCH, OPTIM, RULE
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard._jax import ir, make_ir_context
from eqxshard.planning import Target
from eqxshard.planning._lower import Place, find_place, lower_ours
from eqxshard.sharding._mesh import AXES

TRANSFORMER = dict(
    make_model=Transformer, loss_fn=next_token_losses, optim=OPTIM, batch=BATCH, rule=RULE
)
MLP = dict(
    make_model=lint_helpers.MLP,
    loss_fn=lint_helpers.square_losses,
    optim=lenient(optax.sgd(1e-3, 0.9)),
    batch={"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)},
    rule=lint_helpers.FSDP,
)


def convolve(model, batch, key):
    """A convolution with a kernel for each channel, which XLA does not split by itself."""
    x = batch["x"].reshape(-1, 8, 8, 1) * jnp.ones(4)
    kernel = model.up[:9, :4].reshape(3, 3, 1, 4)
    dims = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=4
    )
    return jnp.sum(out**2, axis=(1, 2, 3)) + jnp.sum(model.down) ** 2


#: The step, the mesh, and the arguments of `init_state`, `make_train_step` and `make_mesh`.
CASES: dict[str, Any] = {
    "scanned layers": (TRANSFORMER, {"data": 2, "fsdp": 4}, {}, {}, {}),
    "one device": (TRANSFORMER, {"data": 1}, {}, {}, {}),
    "bfloat16, accumulated": (
        TRANSFORMER,
        {"fsdp": 8},
        {"precision": eqxshard.Precision("bfloat16")},
        {"accumulate": 2, "grad_norms": True},
        {},
    ),
    "convolution": (
        {**MLP, "loss_fn": convolve},
        {"data": 4, "tensor": 2},
        {},
        {"nonfinite": "ignore"},
        {},
    ),
    "Explicit axes": (
        dict(
            make_model=lambda key: explicit_model.Model(key, True),
            loss_fn=explicit_model.loss_fn,
            optim=lenient(optax.adamw(1e-2)),
            batch=jax.eval_shape(lambda: explicit_model.batches()[0]),
            rule=eqxshard.fsdp(min_size=0),
        ),
        {"data": 2, "fsdp": 4},
        {},
        {},
        {"explicit": True},
    ),
}


def text_of(module: bytes) -> str:
    with make_ir_context():
        return str(ir.Module.parse(module))


@needs_new_jax
@pytest.mark.parametrize(
    "name", graded(CASES, ["bfloat16, accumulated", "Explicit axes"], CASES)
)
def test_the_step_is_that_of_training(name, as_scripts_run):
    step, sizes, of_state, of_step, of_mesh = CASES[name]
    make_model, loss_fn, optim, batch, rule = step.values()
    mesh = eqxshard.make_mesh(**{"data": 1, **sizes, **of_mesh, "devices": here(sizes)})
    state = eqxshard.abstract_state(
        make_model, optim, key=jax.random.key(0), mesh=mesh, rule=rule, **of_state
    )
    train_step = eqxshard.make_train_step(loss_fn, optim, **of_step)
    expected = train_step.lower(state, batch).as_text()
    options = {
        "trainable": True,
        "precision": None,
        "accumulate": 1,
        "compiler_options": None,
        **of_state,
        **of_step,
        **of_mesh,
    }
    place = find_place(sizes, "h200", None, "cpu")
    request = lower_ours(place, make_model, loss_fn, optim, batch, rule=rule, **options)
    assert text_of(request.module) == expected


def here(sizes):
    return jax.devices()[: int(np.prod([*sizes.values()]))]


def lower_for_gpus(loss_fn, sizes):
    batch = {"x": jax.ShapeDtypeStruct((512, 64), jnp.float32)}
    place = Place(Target.named("h200"), "gpu", {axis: sizes.get(axis, 1) for axis in AXES})
    options: dict[str, Any] = {"accumulate": 1, "compiler_options": None}
    options |= {"batch": batch, "trainable": True, "precision": None}
    return lower_ours(place, **{**MLP, "loss_fn": loss_fn, **options})


def test_devices_may_be_more_than_there_are_here():
    request = lower_for_gpus(lint_helpers.square_losses, {"data": 8, "fsdp": 64})
    assert request.devices == 512
    assert request.known is not None
    # The second dim of each matrix over fsdp, momentum too.
    size = 2 * 4 * 256 * 64 // 64
    arguments = request.known.arguments
    assert arguments["parameters"] == arguments["optimizer state"] == size


def test_a_loss_that_calls_the_host_is_refused_for_other_devices():
    def loss_fn(model, batch, key):
        jax.debug.print("a step")
        return lint_helpers.square_losses(model, batch, key)

    with pytest.raises(eqxshard.UsageError, match="calls the host"):
        lower_for_gpus(loss_fn, {"fsdp": 8})


def test_what_only_the_process_that_lowers_can_compile_is_refused():
    @custom_partitioning
    def double(x):
        return 2 * x

    double.def_partition(partition=None, sharding_rule="i -> i")
    with pytest.raises(eqxshard.UsageError, match="plan it with jax"):
        eqxshard.plan_step(jax.jit(double), jnp.ones(8), target="cpu")


def abstract(*sizes, **device):
    return AbstractMesh(sizes, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, **device)


def test_abstract_meshes_are_for_shapes_alone(unannotated):
    device = AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu")
    key = jax.random.key(0)
    options: dict[str, Any] = {"rule": lint_helpers.FSDP}
    given = lint_helpers.MLP, lint_helpers.OPTIM
    mesh: Any = abstract(4, 16, abstract_device=device)
    state = eqxshard.abstract_state(*given, key=key, mesh=mesh, **options)
    assert state.model.up.sharding.shard_shape(state.model.up.shape) == (16, 64)
    assert "on 64 x cpu" in str(eqxshard.explain(state.model, mesh, **options))
    with pytest.raises(TypeError, match="has no devices; make one that has"):
        eqxshard.init_state(*given, key=key, mesh=mesh, **options)
    with pytest.raises(ValueError, match="for which devices it is; give"):
        eqxshard.abstract_state(*given, key=key, mesh=abstract(4, 16), **options)


@pytest.mark.parametrize("explicit", [False, True])
def test_the_mesh_of_the_caller_does_not_matter(explicit):
    alone = lower_for_gpus(lint_helpers.square_losses, {"fsdp": 8})
    with jax.set_mesh(eqxshard.make_mesh(data=2, fsdp=4, explicit=explicit)):
        found = lower_for_gpus(lint_helpers.square_losses, {"fsdp": 8})
    assert text_of(found.module) == text_of(alone.module)
    assert found.linted.batch_axes == ("data", "fsdp")


@pytest.mark.parametrize(
    "batch, says",
    [
        ({}, "entries of a batch have the shapes"),
        ({"x": jax.ShapeDtypeStruct((64, 64), jnp.float32), "n": 3}, "'n'|n is"),
        ({"x": jax.ShapeDtypeStruct((5, 64), jnp.float32)}, "5 does not divide over"),
    ],
)
def test_a_batch_that_no_step_takes_is_refused(batch, says):
    with pytest.raises((eqxshard.UsageError, TypeError), match=says):
        eqxshard.plan(**{**MLP, "batch": batch}, mesh_shape={"fsdp": 8}, target="cpu")


def test_options_that_only_the_compiler_for_tpus_knows_are_left_to_it():
    tpus = Place(Target.named("tpu-v5p"), "tpu", dict.fromkeys(AXES, 1))
    options: dict[str, Any] = {"xla_tpu_enable_async_collective_fusion": True}
    given: dict[str, Any] = {**MLP, "trainable": True, "precision": None, "accumulate": 1}
    request = lower_ours(tpus, **given, compiler_options=options)
    assert request.compiler_options == options
