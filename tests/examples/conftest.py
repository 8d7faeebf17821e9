"""What all tests of examples have in common."""

import pytest


@pytest.fixture(autouse=True)
def default_promotion(as_scripts_run):
    """As users have it, for whom the examples are written."""
