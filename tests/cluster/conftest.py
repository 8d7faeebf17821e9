"""Runs on schedulers that the tests start, beside one that needs none."""

import pytest
from cluster_helpers import train_alone


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    return train_alone(tmp_path_factory.mktemp("alone") / "run")


@pytest.fixture
def one_process(trained_alone):
    """The reports of one process, by step."""
    return dict(trained_alone)
