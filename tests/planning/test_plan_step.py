"""Plans and lint of steps that are not ours."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import other_steps
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.compiled._lowered import read_lowered
from eqxshard.inspect._functions import lower_function

pytestmark = pytest.mark.usefixtures("unannotated", "as_scripts_run")


THREE: Any = 3


def held(args) -> int:
    """The bytes that one device holds of some arguments, but for random keys."""
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(args)
        if x.sharding is not None
    )


def kinds(plan) -> set[tuple[str, str]]:
    return {(axes, kind) for axes, by_kind in plan.traffic.items() for kind in by_kind}


def test_a_step_by_hand_is_planned_as_theory_counts():
    fn, args = other_steps.fsdp_by_hand()
    plan = eqxshard.plan_step(fn, *args, target="h200", backend="cpu")
    assert (plan.mesh, plan.devices, plan.examples) == ({"shard": 8}, 8, 1024)
    assert [*plan.memory.arguments] == ["params", "momentum", "batch"]
    assert sum(plan.memory.arguments.values()) == held(args)
    weights = 3 * 512 * 512 * 4 * 7 // 8
    sent = {"all-gather": weights, "reduce-scatter": weights, "all-reduce": 7}
    assert plan.traffic == {"shard": sent}
    gathers = [each for each in plan.collectives if each.kind == "all-gather"]
    assert {each.leaves for each in gathers} == {(f"params['w{i}']",) for i in range(3)}
    assert all((each.line or "").startswith("other_steps.py:") for each in gathers)
    assert plan.findings == ()
    text = str(plan)
    for word in ("momentum", "params['w0']", "P('shard')", "A step takes at least"):
        assert word in text
    assert "gradients" not in text
    assert not any("donated" in note or "whole" in note for note in plan.notes)
    assert plan.to_json()["memory"]["arguments"]["params"] == 3 * 512 * 512 * 4 // 8


def test_what_a_lowered_function_says_of_itself():
    fn, args = other_steps.easy_lm()
    step = lower_function(fn, args, {}).step
    assert (step.devices, step.sizes) == (8, {"dp": 2, "fsdp": 2, "mp": 2})
    inputs = {each.name: each for each in step.inputs}
    head = inputs["state.params['lm_head']"]
    assert (head.shape, head.dtype) == ((128, 512), "float32")
    assert head.spec == P(("fsdp",), ("mp",)) and head.donated
    # Nothing says that it is split by rows.
    assert inputs["batch['loss_masks']"].spec == P() and step.batch == ()
    fn, args = other_steps.optax_mnist()
    step = lower_function(fn, args, {}).step
    assert [each.name for each in step.batch] == ["batch['image']", "batch['label']"]
    assert step.batch_axes == ("batch",)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int32", "bfloat16", "float8_e4m3fn", "float32", "complex64"]
)
def test_types_are_read_from_what_was_lowered(dtype):
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((3, 2), dtype))
    (found,) = read_lowered(lowered).inputs
    assert (found.dtype, found.shape, found.bytes) == (
        *(dtype, (3, 2)),
        6 * jnp.dtype(dtype).itemsize,
    )


def test_functions_of_any_library_are_lowered():
    x = jnp.ones((8, 4))

    def double(x):
        return 2 * x

    for fn in (
        double,
        jax.jit(double),
        eqx.filter_jit(double),
        eqxshard.filter_jit(double),
    ):
        (array,) = lower_function(fn, (x,), {}).step.inputs
        assert array.shape == (8, 4)
    lowered = jax.jit(double).lower(x)
    assert lower_function(lowered, (), {}).lowered is lowered


def test_a_mesh_may_have_more_devices_than_there_are():
    auto = (AxisType.Auto,) * 2
    mesh = AbstractMesh((16, 4), ("dp", "tp"), axis_types=auto)

    @jax.jit
    def loss(w, x):
        x = jax.lax.with_sharding_constraint(x, P("dp"))
        return jnp.sum(jax.lax.with_sharding_constraint(w, P(None, "tp")) * x[:, :, None])

    shapes = other_steps.floats(32, 8), other_steps.floats(64, 32)
    step = lower_function(loss, shapes, {}, mesh, "cuda").step
    assert (step.devices, step.sizes) == (64, {"dp": 16, "tp": 4})


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: eqxshard.plan_step(THREE), "is not a function"),
        (lambda: eqxshard.plan_step(lambda x: x, 1.0, devices=64), "AbstractMesh"),
        (lambda: eqxshard.plan_step(jax.jit(abs).lower(1.0), 1.0), "has its arguments"),
        (lambda: eqxshard.lint(jax.jit(abs).lower(1.0), 1.0), "has its arguments"),
    ],
)
def test_what_cannot_be_planned_is_refused(call, word):
    with pytest.raises(TypeError, match=word):
        call()


def test_lint_of_functions_that_are_not_ours():
    mesh = other_steps.mesh_of(rows=8)
    table = np.ones((512, 512), np.float32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, batch):
        def loss_fn(w):
            # A loop over examples: XLA gathers the batch for it.
            one = lambda x: jnp.sum(jnp.tanh(table @ (w @ x)))  # noqa: E731
            return jnp.mean(jax.lax.map(one, batch["x"]))

        jax.debug.print("step")
        loss, grad = jax.value_and_grad(loss_fn)(params["w"])
        return {"w": params["w"] - grad}, loss

    params = other_steps.placed({"w": other_steps.floats(512, 512)}, mesh, P())
    batch = other_steps.placed({"x": other_steps.floats(64, 512)}, mesh, P("rows"))
    findings = {each.kind: each for each in eqxshard.lint(step, params, batch)}
    assert findings.keys() == {"constant", "callback", "global-batch"}
    assert "over rows" in findings["global-batch"].message
    assert findings["global-batch"].leaf == "batch['x']"
    # A lowered step has only its text.
    of_text = eqxshard.lint(step.lower(params, batch))
    assert {each.kind for each in of_text} == {"global-batch"}


def test_what_is_most_likely_forgotten_is_noted():
    mesh = other_steps.mesh_of(data=4, model=2)
    w = other_steps.placed(other_steps.floats(64, 64), mesh, P(None, "model"))
    batch = {"x": np.ones((32, 64), np.float32), "scale": np.float32(2)}

    @jax.jit
    def step(w, batch, key):
        noise = jax.random.normal(key, (64,))
        return w - jax.grad(lambda w: jnp.sum(batch["x"] @ w * batch["scale"]))(w) + noise

    plan = eqxshard.plan_step(step, w, batch, jax.random.key(0))
    notes = [note.split(";")[0] for note in plan.notes]
    assert "batch['x'] is whole on each device" in notes
    assert "nothing is split over data=4, so its devices repeat the same work" in notes
    assert any(note.startswith("nothing is donated, so w and ") for note in notes)
    assert plan.repeated == ("data",)


def test_a_loop_of_unknown_length_is_named():
    def until(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9.0, lambda x: x @ x, x)

    def counted(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)

    x = other_steps.floats(64, 64)
    for fn, times in ((until, 1), (counted, 3)):
        plan = eqxshard.plan_step(jax.jit(fn), x, target="h200", backend="cpu")
        assert sum(plan.flops.values()) == times * 2 * 64**3
        line = fn.__code__.co_firstlineno + 1
        said = f"a loop of unknown length (test_plan_step.py:{line}) counts as one"
        assert any(note.startswith(said) for note in plan.notes) == (fn is until)


@pytest.mark.slow
@pytest.mark.parametrize("name", other_steps.SENT)
def test_steps_that_are_not_ours(name):
    if name == "nnx_mlp":
        pytest.importorskip("flax")
    fn, args = other_steps.STEPS[name]()
    plan = eqxshard.plan_step(fn, *args)
    print(plan)
    assert plan.target.name == "cpu" and plan.devices == 8
    assert kinds(plan) >= other_steps.SENT[name]
    assert sum(leaf.bytes_per_device for leaf in plan.leaves) == sum(
        plan.memory.arguments.values()
    )
    assert plan.findings == () == eqxshard.lint(fn, *args)
