"""Plans of steps that are not ours, by the compiler for GPUs."""

import other_steps
import pytest

import eqxshard

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unannotated", "as_scripts_run")]

SENT = other_steps.SENT | {
    "fsdp_by_hand": {("shard", "all-gather"), ("shard", "reduce-scatter")},
}


@pytest.mark.versions
@pytest.mark.parametrize("name", SENT)
def test_steps_that_are_not_ours_compile_for_eight_h200s(name):
    if name == "nnx_mlp":
        pytest.importorskip("flax")
    fn, args = other_steps.STEPS[name]()
    plan = eqxshard.plan_step(fn, *args, target="h200", backend="gpu")
    print(plan)
    traffic = plan.traffic
    sent = {(axes, kind) for axes, kinds in traffic.items() for kind in kinds}
    assert sent >= SENT[name]
    assert plan.time is not None and plan.time.step > 0 and plan.timeline
    assert sum(leaf.bytes_per_device for leaf in plan.leaves) == sum(
        plan.memory.arguments.values()
    )
    assert plan.findings == ()
    if name == "fsdp_by_hand":  # To the byte, of three weights.
        weights = 3 * 512 * 512 * 4 * 7 // 8
        assert traffic["shard"]["all-gather"] == weights
        assert traffic["shard"]["reduce-scatter"] == weights


def test_what_was_lowered_for_cpus_compiles_for_gpus():
    fn, args = other_steps.fsdp_by_hand()
    plan = eqxshard.plan_step(fn.lower(*args), target="h200", backend="gpu")
    assert plan.backend == "gpu" and "reduce-scatter" in plan.traffic["shard"]
    assert any("was lowered before" in note for note in plan.notes)
