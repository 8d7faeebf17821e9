"""What all tests of examples have in common."""

import jax
import pytest


@pytest.fixture(autouse=True)
def default_promotion():
    """As users have it, for whom the examples are written."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
