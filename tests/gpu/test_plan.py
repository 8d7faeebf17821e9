"""Plans by the compiler for GPUs."""

import dataclasses

import gpt
import pytest
from plan_theory import MESHES, ROWS, SHAPE, plan_gpt, state_bytes, theory, traffic

import eqxshard

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]


@pytest.mark.parametrize("name", MESHES)
def test_communication_is_what_theory_counts(name):
    plan = plan_gpt(MESHES[name], backend="gpu")
    print(plan)
    assert plan.backend == "gpu"
    # To the byte, but for scalars that the compiler sends with arrays.
    assert traffic(plan) == pytest.approx(theory(MESHES[name]), abs=64)
    memory = plan.memory
    assert memory.parameters == state_bytes(MESHES[name])
    assert 2 * memory.parameters <= memory.optimizer <= 2 * memory.parameters + 8
    arrays = memory.parameters + memory.optimizer + memory.other_state + memory.batch
    assert arrays + memory.temporaries <= memory.peak <= arrays + memory.temporaries + 2000


def test_tokens_travel_to_experts_and_back():
    shape = dataclasses.replace(SHAPE, experts=8, top_k=2)
    plan = plan_gpt({"expert": 8}, shape, backend="gpu")
    # Of each sequence a device has 8 tokens, whose 16 choices have room for 4 in each
    # expert in each round.
    once = 7 / 8 * 2 * (ROWS * 8 * 4) * shape.embed
    moved = [each for each in plan.collectives if each.kind == "all-to-all"]
    assert {(each.axes, each.sent) for each in moved} == {(("expert",), once)}
    assert all(each.in_loop for each in moved)


def test_communication_in_the_layers_is_hidden_and_has_causes():
    plan = plan_gpt(MESHES["fsdp"], backend="gpu")
    in_layers = [each for each in plan.collectives if each.in_loop]
    assert {each.times for each in in_layers} == {4}
    assert all(each.hidden is not None and each.line for each in in_layers)
    for kind in ("all-gather", "reduce-scatter"):
        named = {x for each in in_layers if each.kind == kind for x in each.leaves}
        assert {"blocks.attention.qkv", "blocks.mlp.down", "blocks.mlp.up"} <= named
    assert plan.time is not None and plan.time.waiting is not None
    assert plan.time.links["fsdp"] > plan.time.waiting["fsdp"] > 0
    assert plan.timeline is not None
    spans = [x for x in plan.timeline if x.kind in ("compute", "memory", "waiting")]
    whole = sum((span.end - span.start) * span.times for span in spans)
    assert whole == pytest.approx(plan.time.step)
    loops = [span.times for span in plan.timeline if span.kind == "loop"]
    assert loops.count(4) >= 2


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
