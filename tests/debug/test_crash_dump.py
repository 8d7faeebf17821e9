"""Crash dumps: written, read back, and refused if they are damaged or forged."""

import functools
import json
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal, make_mesh
from hostile_files import HostilePickle
from loop_helpers import OPTIM, Layers, loss_fn, make_loader, nan_loss

import eqxshard
from eqxshard.checkpoint._checksums import write_checksums
from eqxshard.debug._crash_dump import read_crash_dump, write_crash_dump
from eqxshard.debug._replay import replay

KEY = jax.random.key(0)


def write(folder, make_model: Any = Layers, loss_fn: Any = loss_fn, **options):
    """A crash dump of the first step of a run; returns the run's state."""
    where: dict[str, Any] = {"mesh": make_mesh(), "rule": eqxshard.replicate(), **options}
    kept = {name: where[name] for name in where if name != "nonfinite"}
    state = eqxshard.init_state(make_model, OPTIM, key=KEY, **kept)
    train_step = eqxshard.make_train_step(loss_fn, OPTIM, **where)
    loader = make_loader()
    batch = next(iter(loader))
    path = eqxshard.Checkpointer(folder / "checkpoints").directory / "crash_dump"
    write_crash_dump(path, state, [1, 2], batch, train_step, loader)
    return path, state, batch


def written(folder, *args, **options):
    path, state, batch = write(folder, *args, **options)
    return read_crash_dump(path), state, batch


def test_everything_of_a_step_comes_back_on_one_device(tmp_path):
    dump, state, batch = written(tmp_path)
    assert_equal(dump.model, state.model)
    assert_equal(dump.batch, batch)
    assert isinstance(dump.model, Layers) and dump.model.power == 1.0
    assert dump.steps == [1, 2] and dump.rows == list(range(8))
    assert dump.loss_fn is loss_fn
    assert (dump.precision, dump.trainable, dump.model_state) == (None, True, None)
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


def test_a_model_with_state(tmp_path):
    dump, state, _ = written(tmp_path, eqx.nn.make_with_state(Normed), normed_loss)
    assert_equal(dump.model, state.model)
    assert isinstance(dump.model_state, eqx.nn.State)
    ours, theirs = (jax.tree.leaves(each) for each in (dump.model_state, state.model_state))
    for leaf, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(leaf, other)
    assert replay(dump).startswith("the first NaN appears in the loss function, ")


def make_mlp(key):
    return eqx.nn.MLP(4, 1, 8, 1, key=key)


def mlp_loss(model, batch, key):
    return jnp.log(-1 - jax.vmap(model)(batch["x"])[:, 0] ** 2)


def test_a_layer_whose_default_is_a_lambda(tmp_path):
    """As the final activation of Equinox's MLP."""
    dump, state, _ = written(tmp_path, make_mlp, mlp_loss)
    assert dump.model.final_activation is state.model.final_activation
    assert dump.model.activation is jax.nn.relu
    assert replay(dump).startswith("the first NaN appears in the loss function, ")


def make_relu_mlp(key):
    return eqx.nn.MLP(4, 1, 8, 1, jnp.tanh, jax.nn.softplus, key=key)


def test_functions_of_jax_in_a_model(tmp_path):
    dump, _, _ = written(tmp_path, make_relu_mlp, mlp_loss)
    assert dump.model.activation is jnp.tanh
    assert dump.model.final_activation is jax.nn.softplus


def scaled_loss(model, batch, key, *, scale, options):
    return scale * options["sign"] * nan_loss(model, batch, key)


def test_a_partial_loss(tmp_path):
    loss = functools.partial(
        scaled_loss, scale=2.0, options={"sign": -1.0, "names": ("a",)}
    )
    dump, _, _ = written(tmp_path, loss_fn=loss)
    assert isinstance(dump.loss_fn, functools.partial)
    assert dump.loss_fn.func is scaled_loss
    assert dump.loss_fn.keywords == loss.keywords
    assert replay(dump).startswith("the first NaN appears in the loss function, ")


def test_a_precision(tmp_path):
    precision = eqxshard.Precision(compute=jnp.bfloat16)
    dump, _, _ = written(tmp_path, loss_fn=nan_loss, precision=precision)
    assert dump.precision == precision
    assert dump.model.layers[0].weight.dtype == jnp.float32
    assert replay(dump).startswith("the first NaN appears in the loss function, ")


class OnMesh(eqx.Module):
    inner: Layers
    mesh: jax.sharding.Mesh = eqx.field(static=True)
    spec: jax.P = eqx.field(static=True)

    def __call__(self, x):
        sharding = jax.NamedSharding(self.mesh, self.spec)
        return self.inner(jax.lax.with_sharding_constraint(x, sharding))


def make_on_mesh(key):
    return OnMesh(Layers(key), make_mesh(), jax.P(("stage", "tensor")))


def test_a_mesh_in_a_static_field_becomes_one_of_one_device(tmp_path):
    dump, state, _ = written(tmp_path, make_on_mesh, nan_loss)
    assert dump.model.mesh.axis_names == state.model.mesh.axis_names
    assert dump.model.mesh.size == 1 and dump.model.spec == state.model.spec
    assert replay(dump).startswith("the first NaN appears in the loss function, ")


def test_frozen_arrays(tmp_path):
    shapes = eqx.filter_eval_shape(Layers, KEY)
    frozen = jax.tree.map(lambda _: False, shapes)
    trainable = eqx.tree_at(lambda m: m.layers[0], frozen, replace=True)
    dump, _, _ = written(tmp_path, trainable=trainable)
    assert jax.tree.leaves(dump.trainable) == jax.tree.leaves(trainable)
    assert "gradients are finite" in replay(dump)


class Unwritable(eqx.Module):
    inner: Layers
    handle: Any = eqx.field(static=True)

    def __call__(self, x):
        return self.inner(x)


def make_unwritable(key):
    return Unwritable(Layers(key), frozenset({1}))


def test_a_part_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(TypeError) as error:
        write(tmp_path, make_unwritable)
    assert str(error.value) == (
        "model.handle is a frozenset, which a crash dump cannot hold; make it a field of "
        "plain values, arrays, dataclasses or importable functions."
    )


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


def forge(folder, change):
    """Change a dump, and make its checksums right again."""
    path = folder / "crash_dump.json"
    dump = json.loads(path.read_text())
    change(dump)
    path.write_text(json.dumps(dump))
    write_checksums(folder)


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_a_damaged_dump_is_refused(copy, damage):
    if damage == "added":
        (copy / "more").write_text("x")
    else:
        file = next(path for path in copy.iterdir() if path.name == "crash_dump.json")
        file.write_text("{}")
        if damage == "missing":
            file.unlink()
    kind = FileNotFoundError if damage == "missing" else ValueError
    says = {
        "changed": "is damaged: crash_dump.json has changed since it was written",
        "missing": "is not a crash dump; give the folder that the run named",
        "added": "is damaged: more is not in checksums.txt",
    }
    with pytest.raises(kind, match=says[damage]):
        read_crash_dump(copy)


def test_an_unfinished_dump_is_refused(copy):
    (copy / "checksums.txt").unlink()
    with pytest.raises(FileNotFoundError, match="is not a crash dump; give the folder"):
        read_crash_dump(copy)


@pytest.mark.parametrize(
    "reference",
    [
        "os:system",
        "posix:system",
        "subprocess:run",
        "builtins:exec",
        "shutil:rmtree",
        "importlib:import_module",
        # By way of what other modules have imported.
        "eqxshard.distributed:os.system",
        "eqxshard.launch:subprocess.run",
        "jax:os.system",
    ],
)
@pytest.mark.parametrize("where", ["loss", "partial", "object"])
def test_a_forged_dump_cannot_name_the_standard_library(copy, reference, where):
    code: dict[str, Any] = {"code": reference}
    if where == "partial":
        code = {
            "partial": {"fn": code, "args": {"tuple": ["true"]}, "kwargs": {"dict": []}}
        }
    if where == "object":
        code = {"object": reference, "fields": {}}

    forge(copy, lambda dump: dump["code"].update(loss_fn=code))
    message = "which no model needs; use only crash dumps of your own runs"
    if reference == "jax:os.system" and not hasattr(jax, "os"):
        message = "is no longer there"
    with pytest.raises(ValueError, match=message):
        read_crash_dump(copy)


def test_code_that_is_gone_is_named(copy):
    forge(copy, lambda dump: dump["code"].update(loss_fn={"code": "loop_helpers:gone"}))
    with pytest.raises(ValueError, match="loop_helpers:gone is no longer there; check out"):
        read_crash_dump(copy)
    forge(copy, lambda dump: dump["code"].update(loss_fn={"code": "nowhere:gone"}))
    with pytest.raises(ValueError, match=r"nowhere:gone cannot be imported \(No module"):
        read_crash_dump(copy)


@pytest.mark.parametrize("where", ["run", "checkpoints", "dump", "link"])
def test_a_script_that_came_with_the_dump_is_not_run(copy, where, tmp_path):
    folders = {
        "run": copy.parent.parent,
        "checkpoints": copy.parent,
        "dump": copy,
        "link": tmp_path / "link",
    }
    if where == "link":
        (tmp_path / "link").symlink_to(copy.parent.parent)
    script = folders[where] / "script.py"
    script.write_text("raise SystemExit('this was run')")

    def change(dump):
        dump["script"] = str(script)
        dump["code"]["loss_fn"] = {"code": "__main__:loss_fn"}

    forge(copy, change)
    with pytest.raises(ValueError, match="which came with it; move the script out of the"):
        read_crash_dump(copy)


def test_a_module_that_came_with_the_dump_is_not_run(copy, monkeypatch):
    """Folders in the current one can be imported, by names such as `run.checkpoints`."""
    hostile = HostilePickle(copy.parent.parent)
    code = f"import pickle; pickle.loads({hostile.content})"
    (copy.parent / "module.py").write_text(code)
    reference = "run.checkpoints.module:loss_fn"
    forge(copy, lambda dump: dump["code"].update(loss_fn={"code": reference}))
    monkeypatch.syspath_prepend(copy.parent.parent.parent)
    with pytest.raises(ValueError, match=r"which came with it in .*; move it"):
        read_crash_dump(copy)
    assert not hostile.has_run()


def test_a_pickle_is_not_read(copy):
    hostile = HostilePickle(copy.parent)
    (copy / "crash_dump.json").write_bytes(hostile.content)
    write_checksums(copy)
    with pytest.raises(ValueError, match=r"is damaged: crash_dump\.json is not JSON"):
        read_crash_dump(copy)
    assert not hostile.has_run()


def test_a_forged_dump_cannot_have_a_pickle_read(copy, tmp_path):
    """Given what a loss function is given, `numpy.load` reads pickles."""
    hostile = HostilePickle(tmp_path)
    (tmp_path / "file").write_bytes(hostile.content)
    path = {"tuple": [str(tmp_path / "file")]}
    parts = {"fn": {"code": "numpy:load"}, "args": path, "kwargs": {"dict": []}}
    forge(copy, lambda dump: dump["code"].update(loss_fn={"partial": parts}))
    with pytest.raises(ValueError, match="which no model needs"):
        replay(read_crash_dump(copy))
    assert not hostile.has_run()
