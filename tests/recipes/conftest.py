import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def devices():
    """Start all devices, before a recipe asks for fewer and starts only those."""
    assert jax.device_count() == 8
