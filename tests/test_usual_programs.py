"""Usual programs of JAX train and evaluate on meshes as on one device.

XLA splits each program by itself, and has got some wrong without an error. In float64, so
that rounding hides nothing.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from jax.sharding import PartitionSpec as P
from usual_programs import PROGRAMS, make_batch

import eqxshard

#: By name: the sizes of the axes, and the axis that dims of the batch but its rows are
#: split over, from the second on or the last. The others are idle.
MESHES = {
    "data=8": ({"data": 8}, None),
    "data=2, tensor=4": ({"data": 2, "tensor": 4}, None),
    "data=4, tensor=2": ({"data": 4, "tensor": 2}, None),
    "data=2, expert=4": ({"data": 2, "expert": 4}, None),
    "fsdp=2, context=2, tensor=2": ({"fsdp": 2, "context": 2, "tensor": 2}, None),
    "second dim over context": ({"fsdp": 2, "context": 2, "tensor": 2}, 1),
    "last dim over context": ({"data": 2, "context": 2, "tensor": 2}, -1),
    "second dim over one axis": ({"data": 2, "context": 4}, 1),
}
OPTIM = optax.sgd(1.0)


def cases():
    """Each program on three meshes: of idle axes, and of dims that are split, by turns."""
    names = [*MESHES]
    for n, name in enumerate(PROGRAMS):
        yield name, names[1]
        yield name, names[5 + n % 2]
        yield name, names[(0, 2, 3, 4)[n % 4]]
    yield "conv 3d", names[7]


#: One of each kind, and one of each way in which dims that are split were wrong.
SOME = [
    ("conv depthwise", "data=2, tensor=4"),
    ("lookup of all but the last", "data=2, tensor=4"),
    ("gru by example", "data=2, tensor=4"),
    ("sorted rows", "data=2, tensor=4"),
    ("conv 3d", "second dim over one axis"),
    ("conv batch groups", "second dim over context"),
    ("convolve with a row each", "last dim over context"),
]


@pytest.fixture(autouse=True)
def in_float64(as_scripts_run):
    with jax.enable_x64(True):
        yield


def split(batch, dim):
    """Constrain a dim of the arrays of a batch."""

    def constrained(x):
        sizes = [None] * x.ndim
        if dim is None or x.ndim < 2 or x.shape[dim] % 2:
            return x
        sizes[0], sizes[dim] = ("data", "fsdp"), "context"
        return eqxshard.constrain(x, P(*sizes))

    return jax.tree.map(constrained, batch)


def run(name, sizes, dim):
    """A mean loss, the losses by an eval step, and the gradients."""
    program, batch = PROGRAMS[name], make_batch()
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = eqxshard.make_mesh(**sizes, devices=devices)
    where: dict = {"mesh": mesh, "rule": eqxshard.replicate()}
    params = program.params()
    state = eqxshard.init_state(
        lambda key: jax.tree.map(jnp.asarray, params), OPTIM, key=jax.random.key(0), **where
    )
    losses = {
        "metric": float(
            eqxshard.make_eval_step(
                lambda model, batch: {"metric": program.losses(model, split(batch, dim))},
                lint="off",
            )(state.model, batch).compute()["metric"]
        )
    }
    step = eqxshard.make_train_step(
        lambda model, batch, key: program.losses(model, split(batch, dim)),
        OPTIM,
        lint="off",
    )
    state, metrics = step(state, batch)
    losses["loss"] = float(metrics["loss"])
    return losses | {name: params[name] - np.asarray(state.model[name]) for name in params}


@functools.cache
def alone(name):
    return run(name, {"data": 1}, None)


@pytest.mark.parametrize("name, mesh", graded(cases(), slow=SOME))
def test_a_program_is_the_same_on_a_mesh(name, mesh):
    expected = alone(name)
    assert expected["loss"] == pytest.approx(expected["metric"], rel=1e-9)
    for what, value in run(name, *MESHES[mesh]).items():
        off = np.max(np.abs(value - expected[what])) / np.max(np.abs(expected[what]))
        # A whole number says that the parts of devices were counted twice.
        times = np.vdot(value, expected[what]) / np.vdot(expected[what], expected[what])
        assert off < 1e-9, (
            f"{what} is off by {off:.2g}, and {times:.4f} times the right one"
        )
