import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import lint_helpers
import numpy as np
import optax
import pytest
from helpers import needs_new_jax

import eqxshard
from eqxshard.planning import Target
from eqxshard.planning._child import compile_request
from eqxshard.planning._lower import find_place, lower_ours
from eqxshard.planning._read import read_dump

PARTITIONED = "module_0001.planned_step.0001.after_spmd-partitioning.txt"
H200 = Target.named("h200")


@pytest.fixture
def dump(tmp_path):
    """A folder with a text, as the compiler for CPUs would write that of the step."""
    text = "ENTRY %main () -> f32[] {\n  ROOT %zero = f32[] constant(0)\n}\n"
    (tmp_path / PARTITIONED).write_text(text)
    return tmp_path


def plan_mlp(dump, target=H200, **changes):
    """A plan by this process, with the text in `dump`."""
    given: dict[str, Any] = {
        "make_model": lint_helpers.MLP,
        "loss_fn": lint_helpers.square_losses,
        "optim": lint_helpers.OPTIM,
        "rule": lint_helpers.FSDP,
        "batch": {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)},
        "trainable": True,
        "precision": None,
        "accumulate": 1,
        "compiler_options": None,
    }
    place = find_place({"fsdp": 8}, target, None, "cpu")
    return compile_request(lower_ours(place, **{**given, **changes}), dump)


@needs_new_jax
def test_offloaded_state_is_counted_apart(dump):
    here, there = (
        plan_mlp(dump, optim=optax.sgd(1e-3, 0.9), rule=rule).memory
        for rule in (lint_helpers.FSDP, eqxshard.offload(lint_helpers.FSDP))
    )
    assert here.host == 0 and here.optimizer == here.parameters
    assert there.host == here.optimizer and there.optimizer == 0
    assert there.peak == here.peak - here.optimizer


def losses_with_a_table(model, batch, key):
    table = np.ones((512, 512), np.float32)
    return lint_helpers.square_losses(model, batch, key) + jnp.sum(table * batch["x"][0, 0])


def test_findings_are_those_of_lint(dump):
    batch = {"x": jax.ShapeDtypeStruct((512, 64), jnp.float32)}
    plan = plan_mlp(dump, loss_fn=losses_with_a_table, batch=batch)
    assert [each.kind for each in plan.findings] == ["constant"]
    step = eqxshard.make_train_step(losses_with_a_table, lint_helpers.OPTIM)
    assert plan.findings == eqxshard.lint(step, lint_helpers.make_state(fsdp=8), batch)


@pytest.mark.slow
def test_a_link_that_is_not_known_is_not_free(dump):
    """No time for a sum over two hosts, where nobody said how fast their network is."""
    (dump / PARTITIONED).write_text(
        "ENTRY %main (x: f32[1024]) -> f32[1024] {\n  %x = f32[1024]{0} parameter(0)\n"
        "  ROOT %sum = f32[1024]{0} all-reduce(%x), replica_groups=[1,8]<=[8], a=1\n}\n"
    )

    def plan(**fields):
        return plan_mlp(dump, dataclasses.replace(H200, **fields))

    hosts = plan(per_host=4)
    assert hosts.time is not None and hosts.time.links["fsdp"] > 0
    for name in ("network", "link", "bandwidth"):
        unknown = plan(per_host=4, **{name: None})
        assert unknown.time is None
        assert f"no time is predicted, because the {name} is not known" in unknown.notes
    assert plan(network=None).time is not None


def test_a_step_without_its_text_is_an_error_not_zeros(dump):
    assert "ENTRY" in read_dump(dump, 8, "planned_step")
    (dump / PARTITIONED).unlink()
    with pytest.raises(ValueError, match="nothing can be counted; remove --xla_dump flags"):
        read_dump(dump, 8, "planned_step")


def test_the_arrays_of_a_model_are_all_that_the_plan_counts(plan):
    memory = plan.memory
    assert sum(leaf.bytes_per_device for leaf in plan.leaves) == memory.parameters
    assert sum(leaf.gradient for leaf in plan.leaves) == memory.gradients
    counters = memory.optimizer - sum(leaf.optimizer for leaf in plan.leaves)
    assert 0 <= counters <= 8


def test_forward_and_backward_gathers_of_a_weight_are_two(plan):
    (up,) = (leaf for leaf in plan.leaves if leaf.path == "blocks.mlp.up")
    gathers = [
        (each.bytes, each.times)
        for each in plan.collectives
        if each.kind == "all-gather" and each.leaves == (up.path,)
    ]
    # One whole layer of the two.
    layer = 4 * up.bytes_per_device // 2
    assert gathers == [(layer, 2), (layer, 2)]
