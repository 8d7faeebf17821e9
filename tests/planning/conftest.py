"""One plan by the compiler for CPUs, which many tests read."""

import pytest
from plan_helpers import BATCH, OPTIM, RULE, SIZES
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard.planning import Plan


@pytest.fixture(scope="session")
def plan() -> Plan:
    """The plan of a transformer of two layers, on eight devices."""
    return eqxshard.plan(
        Transformer,
        next_token_losses,
        OPTIM,
        BATCH,
        mesh_shape=SIZES,
        rule=RULE,
        backend="cpu",
    )
