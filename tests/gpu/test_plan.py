"""Plans by the compiler for GPUs."""

import pytest
from plan_theory import MESHES, plan_gpt, state_bytes, theory, traffic

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
