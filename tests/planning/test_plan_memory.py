import plan_memory
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", plan_memory.CASES)
def test_a_plan_for_cpus_says_what_steps_on_them_take(name, monkeypatch):
    # As users run them: these tests compile without optimizations.
    monkeypatch.setenv("XLA_FLAGS", "")
    for variable, value in plan_memory.MALLOC.items():
        monkeypatch.setenv(variable, value)
    found = plan_memory.measure(name)
    assert found.state > 9e6
    assert found.error == pytest.approx(0, abs=plan_memory.CASES[name].allowed), found
