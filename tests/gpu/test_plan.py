"""Plans by the compiler for GPUs."""

import dataclasses

import gpt
import pytest
from grades import graded
from helpers import needs_new_jax
from plan_theory import (
    MESHES,
    MICROBATCHES,
    PIPELINE,
    SHAPE,
    plan_gpt,
    state_bytes,
    theory,
    theory_of_experts,
    theory_of_stages,
    traffic,
)

import eqxshard
from eqxshard.planning import Efficiency, Target

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]


@pytest.mark.versions
@pytest.mark.parametrize("name", graded(MESHES, ["data x fsdp x tensor", "context"]))
def test_communication_is_what_theory_counts(name):
    plan = plan_gpt(MESHES[name], backend="gpu")
    print(plan)
    assert plan.backend == "gpu"
    # To the byte, but for the losses and scalars that the compiler sends with gradients.
    assert traffic(plan) == pytest.approx(theory(MESHES[name], backend="gpu"), abs=128)
    memory = plan.memory
    assert memory.parameters == state_bytes(MESHES[name])
    assert 2 * memory.parameters <= memory.optimizer <= 2 * memory.parameters + 8
    arrays = memory.parameters + memory.optimizer + memory.other_state + memory.batch
    assert arrays + memory.temporaries <= memory.peak <= arrays + memory.temporaries + 2000


def test_tokens_travel_to_experts_and_nothing_of_experts_is_gathered():
    shape = dataclasses.replace(SHAPE, experts=8, top_k=2)
    plan = plan_gpt({"expert": 8}, shape, backend="gpu")
    print(plan)
    assert traffic(plan) == pytest.approx(theory_of_experts(8, shape), abs=64)
    moved = [each for each in plan.collectives if each.kind == "all-to-all"]
    assert all(each.in_loop for each in moved)
    # Each device has one of the experts.
    experts = [leaf for leaf in plan.leaves if ".experts." in leaf.path]
    expert = 4 * shape.layers * 3 * shape.mlp * shape.embed
    assert sum(leaf.bytes_per_device for leaf in experts) == expert


@pytest.mark.parametrize("name", graded(["fsdp", "data x fsdp"], ["data x fsdp"]))
def test_tokens_stay_on_their_devices_where_these_have_all_experts(name):
    shape = dataclasses.replace(SHAPE, experts=8, top_k=2)
    plan = plan_gpt(MESHES[name], shape, backend="gpu")
    print(plan)
    # Weights and their gradients, as without experts. Beyond that, in each layer whether
    # any device needs further rounds: one number.
    sent, wanted = traffic(plan), theory(MESHES[name], shape, backend="gpu")
    assert {key: sent.get(key) for key in wanted} == pytest.approx(wanted, abs=128)
    assert sum(size for key, size in sent.items() if key not in wanted) < 128


@pytest.mark.parametrize("microbatches", graded(MICROBATCHES, [8]))
def test_stages_pass_microbatches_on_in_each_tick(microbatches):
    plan = plan_gpt(PIPELINE, microbatches=microbatches, backend="gpu")
    print(plan)
    assert traffic(plan) == pytest.approx(theory_of_stages(microbatches), abs=64)


def test_communication_in_the_layers_is_hidden_and_has_causes():
    plan = plan_gpt(MESHES["fsdp"], backend="gpu")
    in_layers = [each for each in plan.collectives if each.in_loop]
    assert {each.times for each in in_layers} == {4}
    assert all(each.hidden is not None and each.line for each in in_layers)
    for kind in ("all-gather", "reduce-scatter"):
        named = {x for each in in_layers if each.kind == kind for x in each.leaves}
        assert {"blocks.attention.qkv", "blocks.mlp.down", "blocks.mlp.up"} <= named
        # No array outside the loop has the dims of a layer's array.
        assert {path.split(".")[0] for path in named} == {"blocks"}
    assert plan.time is not None and plan.time.waiting is not None
    assert plan.time.links["fsdp"] > plan.time.waiting["fsdp"] > 0
    assert plan.timeline is not None
    spans = [x for x in plan.timeline if x.kind in ("compute", "memory", "waiting")]
    whole = sum((span.end - span.start) * span.times for span in spans)
    assert whole == pytest.approx(plan.time.step)
    loops = [span.times for span in plan.timeline if span.kind == "loop"]
    assert loops.count(4) >= 2


@pytest.mark.parametrize("name", graded(["h200", "b300", "gb200"], ["h200"]))
def test_what_to_expect_is_longer_than_the_least(name):
    plan = plan_gpt({"fsdp": 8}, backend="gpu", target=name)
    least, about = plan.time, plan.time and plan.time.about
    assert least is not None and about is not None
    assert about.step == pytest.approx(sum(about.parts.values()))
    assert (about.memory or 0) > (least.memory or 0) > 0 and about.step > least.step


@needs_new_jax
def test_offloaded_state_is_in_the_memory_of_the_host():
    here = plan_gpt({"fsdp": 8}, backend="gpu")
    rule = eqxshard.offload(gpt.make_rule(SHAPE))
    there = plan_gpt({"fsdp": 8}, backend="gpu", rule=rule)
    # All but the numbers of the step.
    assert 2 * there.memory.parameters == there.memory.host
    assert there.memory.optimizer == here.memory.optimizer - there.memory.host <= 8
    # It is fetched for the update.
    assert there.memory.temporaries >= here.memory.temporaries
    assert there.memory.peak < here.memory.peak + there.memory.host
    arrays = there.memory.parameters + there.memory.optimizer + there.memory.other_state
    rest = there.memory.peak - there.memory.temporaries - arrays - there.memory.batch
    assert 0 <= rest <= 2000
    assert traffic(there) == pytest.approx(traffic(here), abs=64)
    assert "│ of the host's memory " in str(there)


@pytest.mark.parametrize("reached", [None, Efficiency(link=0.5), "h200"])
def test_a_plan_for_a_calibrated_target_takes_what_was_measured(reached):
    # Widths as small as these leave most of a GPU idle.
    target = Target.named("h200")
    if reached != "h200":
        target = dataclasses.replace(target, efficiency=reached)
    plan = plan_gpt({"fsdp": 8}, backend="gpu", target=target)
    again = plan_gpt({"fsdp": 8}, backend="gpu", target=plan.calibrate(0.25))
    assert again.time is not None and again.time.about is not None
    assert again.time.about.step == pytest.approx(0.25)
