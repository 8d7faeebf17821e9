"""Crash dumps: written, read back, and refused if they are damaged or forged."""

import json
import math
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal, make_mesh
from hostile_files import FORBIDDEN, forbid
from loop_helpers import OPTIM, Layers, loss_fn, make_loader, nan_loss

import eqxshard
from eqxshard.checkpoint._checksums import write_checksums
from eqxshard.debug._crash_dump import read_crash_dump, write_crash_dump
from eqxshard.debug._replay import replay

KEY = jax.random.key(0)


def write(folder, make_model: Any = Layers, loss_fn: Any = loss_fn, **options):
    """A crash dump of the first step of a run; returns the run's state."""
    where: dict[str, Any] = {"mesh": make_mesh(), "rule": eqxshard.replicate(), **options}
    state = eqxshard.init_state(make_model, OPTIM, key=KEY, **where)
    train_step = eqxshard.make_train_step(loss_fn, OPTIM, **where)
    loader = make_loader()
    batch = next(iter(loader))
    path = eqxshard.Checkpointer(folder / "checkpoints").directory / "crash_dump"
    write_crash_dump(path, state, [1, 2], batch, train_step, loader)
    return path, state, batch


def written(folder, make_model: Any = Layers, *args, **options):
    path, state, batch = write(folder, make_model, *args, **options)
    return read_crash_dump(path, make_model), state, batch


def test_everything_of_a_step_comes_back_on_one_device(tmp_path):
    dump, state, batch = written(tmp_path)
    assert_equal(dump.model, state.model)
    assert_equal(dump.batch, batch)
    assert isinstance(dump.model, Layers) and dump.model.power == 1.0
    assert dump.steps == [1, 2] and dump.rows == list(range(8))
    assert (dump.loss_name, dump.compute, dump.model_state) == ("loss_fn", None, None)
    assert jax.tree.leaves(dump.trainable) == [True] * 6
    assert len(dump.model.layers[0].weight.devices()) == 1
    # Of the first of the steps.
    expected = jax.random.key_data(jax.random.fold_in(state.key, 0))
    np.testing.assert_array_equal(jax.random.key_data(dump.key), expected)


# Models and losses of many kinds


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.last = eqx.nn.Linear(4, 1, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.last(x)[0], state


def normed_loss(pair, batch, key):
    model, state = pair
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    out, state = run(batch["x"], state)
    return jnp.log(-1 - out**2), state


@pytest.mark.slow
def test_a_model_with_state(tmp_path):
    dump, state, _ = written(tmp_path, eqx.nn.make_with_state(Normed), normed_loss)
    assert_equal(dump.model, state.model)
    assert isinstance(dump.model_state, eqx.nn.State)
    ours, theirs = (jax.tree.leaves(each) for each in (dump.model_state, state.model_state))
    for leaf, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(leaf, other)
    assert replay(dump, normed_loss).startswith(
        "the first NaN appears in the loss function, "
    )


@pytest.mark.slow
def test_a_precision(tmp_path):
    precision = eqxshard.Precision(jnp.bfloat16, compute_except=(r"layers\.0\.bias",))
    dump, _, _ = written(tmp_path, loss_fn=nan_loss, precision=precision)
    assert dump.compute == jnp.bfloat16 and dump.loss_name == "nan_loss"
    assert dump.model.layers[0].weight.dtype == jnp.float32

    def loss(model, batch, key):
        weight, bias = model.layers[0].weight, model.layers[0].bias
        raise KeyError(weight.dtype, batch["x"].dtype, bias.dtype)

    with pytest.raises(KeyError) as error:
        replay(dump, loss)
    assert error.value.args == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_frozen_arrays(tmp_path):
    shapes = eqx.filter_eval_shape(Layers, KEY)
    frozen = jax.tree.map(lambda _: False, shapes)
    trainable = eqx.tree_at(lambda m: m.layers[0], frozen, replace=True)
    dump, _, _ = written(tmp_path, trainable=trainable)
    assert jax.tree.leaves(dump.trainable) == [True, True] + [False] * 4
    assert "gradients are finite" in replay(dump, loss_fn)


def test_a_batch_that_is_no_dict_is_refused(tmp_path):
    where = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(Layers, OPTIM, key=KEY, **where)
    train_step = eqxshard.make_train_step(loss_fn, OPTIM)
    for batch in ((np.ones(8),), {"x": {"y": np.ones(8)}}):
        with pytest.raises(TypeError, match="a batch that is a dict of arrays; train"):
            write_crash_dump(tmp_path, state, [1], batch, train_step, make_loader())


# Damaged and forged dumps


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    return write(tmp_path_factory.mktemp("dumped"), loss_fn=nan_loss)[0]


@pytest.fixture
def copy(dumped, tmp_path):
    """The folder of a crash dump, in a run's folder of its own."""
    folder = tmp_path / "run" / "checkpoints" / "crash_dump"
    shutil.copytree(dumped, folder)
    return eqxshard.Checkpointer(folder).directory


def forge(folder, **changes):
    """Change a dump, and make its checksums right again."""
    path = folder / "crash_dump.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    write_checksums(folder)


def refused(folder, says, kind: Any = ValueError, make_model: Any = Layers):
    with pytest.raises(kind, match=says) as error:
        read_crash_dump(folder, make_model)
    assert "; " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["changed", "missing", "unfinished"])
def test_a_damaged_dump_is_refused(copy, damage):
    file = copy / "crash_dump.json"
    if damage == "changed":
        file.write_text("{}")
        refused(copy, "is damaged: crash_dump.json has changed since it was written")
    else:
        (file if damage == "missing" else copy / "checksums.txt").unlink()
        refused(copy, "is not a crash dump; give the folder", FileNotFoundError)


@pytest.mark.parametrize(
    "forged",
    [
        {"steps": []},
        {"steps": "x"},
        {"steps": [math.inf]},
        {"rows": {"x": 1}},
        {"leaves": []},
        {"leaves": {"model": {"shape": [-1], "dtype": "x"}}},
        {"leaves": {"batch.x": {"shape": [8, 4], "dtype": "object"}}},
        {"compute": "os.system"},
        {"compute": "object"},
        {"trained": None},
    ],
    ids=json.dumps,
)
def test_a_forged_dump_is_refused(copy, forged):
    forge(copy, **forged)
    refused(copy, "crash dump .*(cannot be read|does not fit)")


def test_a_forged_dump_cannot_ask_for_more_memory_than_there_is(copy):
    leaves = json.loads((copy / "crash_dump.json").read_text())["leaves"]
    leaves["batch.x"] = {"shape": [2**40], "dtype": "float32", "spec": []}
    forge(copy, leaves=leaves)
    refused(copy, r"batch\.x .*its shape is \[8, 4\]")


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_no_file_is_refused(copy, name):
    forbid(copy / "odd", name)
    refused(copy, "is damaged: .*odd is not a regular file")
