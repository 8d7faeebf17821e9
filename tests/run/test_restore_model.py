"""The model of a run, read for scripts that use it."""

import dataclasses
import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_equal
from run_script import Line
from run_train_helpers import make_sgd, train

import eqxshard
from eqxshard import RunConfig
from eqxshard.run import restore_model

MAKE = partial(Line, 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4, whose loss falls; and its options."""
    output = str(tmp_path_factory.mktemp("restore") / "run")
    config = RunConfig(batch_size=16, devices=2, steps=4, evaluate_every=2, output=output)
    run = train(output, dataclasses.replace(config, save_every=2), make_optim=make_sgd)
    return run, config


def test_the_newest_model_is_read_into_its_shardings(trained):
    run, config = trained
    # On another mesh, by another rule.
    config = dataclasses.replace(config, devices=4, mesh="fsdp=2,tensor=2")
    rule = eqxshard.fsdp(min_size=1)
    model = restore_model(MAKE, config=config, rule=rule)
    assert model.hidden.weight.sharding.spec == jax.P("fsdp")
    assert len(model.hidden.weight.sharding.device_set) == 4
    assert_equal(model, jax.device_get(run.state.model))


@pytest.mark.slow
def test_a_run_that_kept_the_best_wants_to_know_which_to_read(tmp_path):
    output = str(tmp_path / "r")
    config = RunConfig(batch_size=16, devices=1, steps=4, evaluate_every=2, output=output)
    run = train(output, config, make_optim=make_sgd, best="eval/loss", mode="min")
    with pytest.raises(ValueError, match=r"with mode='min', or step= the one"):
        restore_model(MAKE, config=config)
    assert_equal(restore_model(MAKE, config=config, step="newest"), run.state.model)
    # The largest loss is not what the run kept.
    with pytest.raises(ValueError, match=r"kept the min of eval/loss; give best="):
        restore_model(MAKE, config=config, best="eval/loss")
    read = restore_model(MAKE, config=config, best="eval/loss", mode="min")
    assert_equal(read, run.state.model)


def test_the_default_folder_is_the_one_that_train_writes_to(trained, monkeypatch, tmp_path):
    run, config = trained
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "script-small").symlink_to(run.folder)
    config = dataclasses.replace(config, output=None)
    assert_equal(restore_model(MAKE, config=config, name="Small"), run.state.model)


def ones(like):
    """Weights from elsewhere."""
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), like)


@pytest.mark.parametrize("resume, loads", [("no", True), ("auto", False), ("yes", False)])
def test_weights_from_elsewhere_are_used_unless_the_run_is_asked_for(
    trained, resume, loads
):
    run, config = trained
    config = dataclasses.replace(config, resume=resume)
    model = restore_model(MAKE, config=config, load=ones)
    wanted = ones(run.state.model) if loads else run.state.model
    assert_equal(model, jax.device_get(wanted))


def stateful(key):
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")


def test_mistakes_are_one_sentence(trained, tmp_path):
    _, config = trained
    none = dataclasses.replace(config, output=str(tmp_path / "none"))
    with pytest.raises(
        FileNotFoundError, match=r"^there is no checkpoint in .*none/checkp"
    ):
        restore_model(MAKE, config=none, best="eval/loss")
    for best, hint in ("loss", "did you mean 'eval/loss'"), ("rank", "they have eval/a"):
        match = f"has a value of {best}; {hint}.* use another metric, or"
        with pytest.raises(ValueError, match=match):
            restore_model(MAKE, config=config, best=best)
    with pytest.raises(ValueError, match=r"hidden.bias is float32\[8\] there, not"):
        restore_model(partial(Line, 4), config=config)
    with pytest.raises(ValueError, match="restore_model reads models without state; read"):
        restore_model(stateful, config=config)
    with pytest.raises(ValueError, match="9 devices were asked for, and there are 8 x cpu"):
        restore_model(MAKE, config=dataclasses.replace(config, devices=9))
    assert not (tmp_path / "none").exists()
