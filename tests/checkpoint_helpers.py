"""States, and the checkpoints of a run of ten steps."""

import functools
import shutil
from typing import Any

import jax
import optax
from helpers import RULES, Model, lenient, make_mesh
from helpers import copied as copied_tree

import eqxshard

OPTIM = lenient(optax.adam(1e-2))


def placed(mesh="data=8", rule="replicate") -> dict[str, Any]:
    """A mesh and a rule by name."""
    return {"mesh": make_mesh(mesh), "rule": RULES[rule]}


@functools.cache
def first_state(make_model, optim, seed):
    """The state that tests begin with copies of: making one takes ten programs."""
    return eqxshard.init_state(make_model, optim, key=jax.random.key(seed), **placed())


def new_state(make_model: Any = Model, optim=OPTIM, seed=0, **where):
    """A state at step 0."""
    if not where:
        return copied_tree(first_state(make_model, optim, seed))
    return eqxshard.init_state(make_model, optim, key=jax.random.key(seed), **where)


def like(make_model: Any = Model, optim=OPTIM, **where):
    """The abstract state to restore into."""
    where = where or placed()
    return eqxshard.abstract_state(make_model, optim, key=jax.random.key(1), **where)


def copied(checkpoints, tmp_path):
    """A copy of the folder of checkpoints, to change."""
    folder, _ = checkpoints
    return shutil.copytree(folder, tmp_path / "copy")
