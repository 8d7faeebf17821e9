import math
import os
import re

import jax
import jax.numpy as jnp
import lint_helpers
import pytest
from gpt_model import flops_per_token
from grades import graded
from plan_helpers import BATCH, OPTIM, RULE, SIZES
from plan_theory import (
    MESHES,
    ROWS,
    SHAPE,
    layer_size,
    plan_gpt,
    state_bytes,
    theory,
    traffic,
)
from transformer import Transformer, next_token_losses

import eqxshard

GIVEN = (Transformer, next_token_losses, OPTIM, BATCH)


def abstract_state():
    mesh = eqxshard.make_mesh(data=2, fsdp=4)
    return eqxshard.abstract_state(
        Transformer, OPTIM, key=jax.random.key(0), mesh=mesh, rule=RULE
    )


def bytes_of(tree):
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.ShapeDtypeStruct)
    )


@pytest.mark.versions
def test_the_state_has_the_bytes_that_it_has_on_devices(plan):
    state, memory = abstract_state(), plan.memory
    assert memory.parameters == bytes_of(state.model)
    assert memory.optimizer == bytes_of(state.opt_state)
    rest = bytes_of((state.step, state.key, state.model_state, state.loss_scale))
    assert memory.other_state == rest
    assert memory.gradients == memory.parameters
    assert memory.batch == 16 * 17 * 4 // 8
    assert memory.device == 151_397_597_184 and plan.fits
    assert memory.peak > memory.temporaries > memory.gradients


@pytest.mark.slow
def test_operations_are_those_counted_by_hand(monkeypatch, tmp_path):
    # A step out of the cache is not compiled, and XLA would say nothing of it.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    plan = eqxshard.plan(
        lint_helpers.MLP,
        lint_helpers.square_losses,
        lint_helpers.OPTIM,
        {"x": jax.ShapeDtypeStruct((512, 64), jnp.float32)},
        mesh_shape={"data": 2},
        rule=eqxshard.replicate(),
        nonfinite="ignore",
        backend="cpu",
    )
    # Two products forward, two for the weights, one for the second layer's input.
    assert plan.flops == {"float32": 5 * 2 * 512 * 64 * 256 / 2}
    assert plan.time is not None and plan.time.compute > 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_the_operations_of_the_model_are_those_of_theory():
    plan = plan_gpt({"fsdp": 8}, backend="cpu")
    tokens = ROWS * SHAPE.seq_len / 8
    norms = (2 * SHAPE.layers + 1) * SHAPE.embed  # They multiply no matrix.
    model = sum(plan.model_flops.values())
    assert model == (flops_per_token(SHAPE) - 6 * norms) * tokens
    # The layers forward once more, but for the last product, which only the output needs.
    again = sum(plan.flops.values()) - model
    layers = SHAPE.layers * (layer_size(SHAPE) - SHAPE.mlp * SHAPE.embed)
    attention = 4 * SHAPE.layers * SHAPE.heads * SHAPE.head_dim * SHAPE.seq_len
    assert again == tokens * (2 * layers + attention)
    assert plan.mfu and plan.hfu and 0 < plan.mfu < plan.hfu < 1


@pytest.mark.versions
def test_layers_are_gathered_in_the_loop_and_named(plan):
    gathers = [each for each in plan.collectives if each.kind == "all-gather"]
    in_loop = [each for each in gathers if each.in_loop]
    assert {each.times for each in in_loop} == {2}
    assert {each.axes for each in in_loop} == {("fsdp",)}
    paths = {path for each in in_loop for path in each.leaves}
    assert {"blocks.mlp.up", "blocks.mlp.down", "blocks.attention.qkv"} <= paths
    assert {each.line for each in in_loop} == {f"transformer.py:{line_of('scan_layers')}"}
    outside = {path for each in gathers if not each.in_loop for path in each.leaves}
    assert "embedding" in outside and not outside & paths


def test_gradients_are_scattered_over_fsdp_and_summed_over_data(plan):
    scatters = [each for each in plan.collectives if each.kind == "reduce-scatter"]
    assert {each.axes for each in scatters} == {("fsdp",)}
    named = {path for each in scatters for path in each.leaves if each.in_loop}
    assert {"blocks.mlp.up", "blocks.mlp.down", "blocks.attention.qkv"} <= named
    lines = {each.line for each in scatters}
    assert f"transformer.py:{line_of('self.down @')}" in lines
    assert plan.traffic["data"].keys() == {"all-reduce"}


def line_of(text):
    file = os.path.join(os.path.dirname(__file__), "..", "transformer.py")
    with open(file) as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line)


def test_the_time_is_what_links_and_arithmetic_take(plan):
    sent = sum(sum(kinds.values()) for kinds in plan.traffic.values())
    assert plan.time.step == pytest.approx(sent / 450e9, rel=1e-6)
    assert plan.time.bound == "fsdp links"
    assert plan.examples_per_second == pytest.approx(16 / plan.time.step)
    assert 0 < plan.mfu < 1


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize("name", graded(MESHES, slow=["data x fsdp x tensor", "context"]))
def test_communication_of_a_language_model_is_what_theory_counts(name):
    plan = plan_gpt(MESHES[name], backend="cpu")
    assert traffic(plan) == pytest.approx(theory(MESHES[name]), rel=0.05)
    assert plan.memory.parameters == state_bytes(MESHES[name])


@pytest.mark.parametrize(
    "word, options",
    [
        ("no target 'h20'; did you mean 'h200'?", {"target": "h20"}),
        ("does not fit the 12 devices", {"devices": 12}),
        ("give devices=", {"mesh_shape": {"fsdp": -1}}),
        ("no mesh axis 'fdsp'", {"mesh_shape": {"fdsp": 2}}),
        ("b200 is not installed; run", {"target": "b200", "backend": "gpu"}),
        ("batch size 16", {"backend": "cpu", "mesh_shape": {"data": 6, "fsdp": 2}}),
    ],
)
def test_bad_input_is_refused(word, options, monkeypatch, tmp_path):
    monkeypatch.setenv("EQXSHARD_PLAN_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(word)):
        eqxshard.plan(*GIVEN, **{"mesh_shape": SIZES, "rule": RULE, **options})
