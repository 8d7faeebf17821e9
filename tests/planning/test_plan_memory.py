import plan_memory
import pytest
from grades import graded

#: Of those that `python tests/plan_memory.py` measures, which takes minutes.
NAMES = [
    "MLP, tensor",
    "MLP, zero1, accumulate",
    "CNN, data x fsdp",
    "LeNet, replicate, accumulate",
    "mixture of experts, data x expert, no remat",
    "GPT, context, ring attention",
    "GPT, stage x fsdp",
]


@pytest.mark.parametrize("name", graded(NAMES, slow=NAMES[:1]))
def test_a_plan_for_cpus_says_what_steps_on_them_take(name, monkeypatch):
    # As users run them: these tests compile without optimizations.
    monkeypatch.setenv("XLA_FLAGS", "")
    for variable, value in plan_memory.MALLOC.items():
        monkeypatch.setenv(variable, value)
    found = plan_memory.measure(name)
    assert found.state > 9e6
    assert found.is_near(plan_memory.CASES[name]), f"off by {found.error:+.1%}: {found}"


def test_plans_that_are_off_by_a_third_are_not_near():
    for case in plan_memory.CASES.values():
        assert plan_memory.Measured(0, 100, 100).is_near(case)
        assert not plan_memory.Measured(0, 133, 100).is_near(case)
        assert not plan_memory.Measured(0, 67, 100).is_near(case)
