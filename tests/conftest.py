"""Every test runs on 8 simulated CPU devices, under strict types and warnings."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time of these tests is compilation, and what XLA:CPU does not optimize it
# compiles in half of it. Partitioning, and so what devices send each other, is the same.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook("eqxshard", "beartype.beartype")


@pytest.fixture
def unannotated(monkeypatch):
    """As outside of tests, where annotations refuse nothing."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
