import jax
import pytest
from run_helpers import SCRIPT, call


@pytest.fixture(scope="session", autouse=True)
def devices():
    """The devices of all tests; else a script would simulate one per core."""
    assert jax.device_count() == 8


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Scripts write to the current directory by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)


@pytest.fixture
def script(monkeypatch, capsys):
    """Runs the script in this process; returns its status, stdout and stderr."""
    return lambda *options: call(capsys, monkeypatch, SCRIPT, *options)
