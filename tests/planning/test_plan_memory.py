import plan_memory
import pytest
from grades import graded

NAMES = [*plan_memory.CASES]


@pytest.mark.parametrize("name", graded(NAMES, slow=NAMES[:1]))
def test_a_plan_for_cpus_says_what_steps_on_them_take(name, monkeypatch):
    # As users run them: these tests compile without optimizations.
    monkeypatch.setenv("XLA_FLAGS", "")
    for variable, value in plan_memory.MALLOC.items():
        monkeypatch.setenv(variable, value)
    found = plan_memory.measure(name)
    assert found.state > 9e6
    assert found.is_near(plan_memory.CASES[name]), f"off by {found.error:+.1%}: {found}"
