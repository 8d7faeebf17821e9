"""Plans by the compiler for TPUs, where it is installed."""

import pytest
from plan_theory import MESHES, plan_gpt, state_bytes, theory, traffic

from eqxshard.planning import Target
from eqxshard.planning._backends import find_backend, install

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_scripts_run")]


@pytest.fixture(autouse=True)
def libtpu():
    if find_backend(Target.named("tpu-v5p"), None) != "tpu":
        pytest.skip(f"libtpu is not installed; run `{install('tpu')}`")


def plan_on(target, name):
    plan = plan_gpt(MESHES[name], target=target)
    print(plan)
    assert plan.backend == "tpu" and plan.fits
    memory = plan.memory
    assert memory.parameters == state_bytes(MESHES[name])
    arrays = memory.parameters + memory.optimizer + memory.other_state + memory.batch
    # Small arrays are padded to tiles.
    assert arrays + memory.temporaries <= memory.peak < 2 * arrays + memory.temporaries
    assert memory.temporaries < 10e6
    text = str(plan)
    assert f"8 x {plan.target.kind} " in text and "by the backend tpu" in text
    assert plan.time is not None and 0 < plan.time.step < 1e-3
    return plan


@pytest.mark.parametrize("target", ["tpu-v4", "tpu-v6e"])
def test_gradients_are_all_that_is_sent_under_data(target):
    plan = plan_on(target, "data")
    wanted = theory(MESHES["data"])["data", "all-reduce"]
    assert traffic(plan) == {("data", "all-reduce"): pytest.approx(wanted, abs=64)}
    in_loop = {path for x in plan.collectives if x.in_loop for path in x.leaves}
    assert {"blocks.attention.qkv", "blocks.mlp.up", "blocks.mlp.down"} <= in_loop


def test_parameters_are_gathered_in_their_layers_under_fsdp():
    plan = plan_on("tpu-v5p", "fsdp")
    sent, wanted = traffic(plan), theory(MESHES["fsdp"])
    for kind in ("all-gather", "all-to-all"):
        assert sent["fsdp", kind] == wanted["fsdp", kind]
    # Gradients as small as these are reduced whole, which sends twice as much.
    reduced = [sent.get(("fsdp", kind), 0) for kind in ("reduce-scatter", "all-reduce")]
    least = wanted["fsdp", "reduce-scatter"]
    assert least <= sum(reduced) <= 2 * least + wanted["fsdp", "all-reduce"] + 64
    gathers = [x for x in plan.collectives if x.kind == "all-gather" and x.in_loop]
    assert {x.times for x in gathers} == {4}
    named = {path for x in gathers for path in x.leaves}
    assert {"blocks.attention.qkv", "blocks.mlp.up", "blocks.mlp.down"} <= named
