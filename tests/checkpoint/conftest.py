import pytest
from checkpoint_helpers import OPTIM, new_state, placed
from helpers import make_loader, squared_errors

import eqxshard


@pytest.fixture(scope="session")
def train_step():
    """A step on eight devices, compiled once for all files."""
    return eqxshard.make_train_step(squared_errors, OPTIM, **placed())


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, train_step):
    """The folder with checkpoints of steps 4, 8 and 10, and the state at the end."""
    folder = tmp_path_factory.mktemp("run")
    checkpointer = eqxshard.Checkpointer(folder, save_every=4)
    state = eqxshard.fit(
        new_state(), train_step, make_loader(), steps=10, checkpointer=checkpointer
    )
    return folder, state
