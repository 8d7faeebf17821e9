"""The model of a run, read for scripts that use it."""

import dataclasses
import sys
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
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
    # The run did not keep the largest loss.
    with pytest.raises(
        ValueError, match=r"kept the checkpoint with the min of eval/loss; give best="
    ):
        restore_model(MAKE, config=config, best="eval/loss", mode="max")
    assert_equal(restore_model(MAKE, output, best="eval/loss"), run.state.model)


def constant(model, batch):
    return {"accuracy": jnp.ones(len(batch["x"]))}


@pytest.mark.parametrize(
    "best",
    graded(["eval/accuracy", "train/loss"], quick=["eval/accuracy"], slow=["train/loss"]),
)
def test_the_best_that_is_announced_is_on_disk(tmp_path, best):
    """Also if all are equal, after a resume; and if reports between may be better."""
    options: dict = {"metric_fn": constant, "make_optim": make_sgd, "best": best}
    kept: dict = {"batch_size": 16, "devices": 1, "log_every": 1, "save_every": 3}
    for resume, epochs in (("no", 1), ("auto", 6)):
        kept["resume"] = resume
        config = RunConfig(**kept)
        run = train(tmp_path / "r", config, epochs=epochs, **options)
        found = eqxshard.Checkpointer(run.folder / "checkpoints", best=best)
        said = run.summary["best"]["step"]
        assert said == found.best_step() and said in found.steps()
        assert f" at step {said} | " in str(run)
        value = found.description(said)["metrics"][best]
        assert run.summary["best"]["value"] == value
        if best == "eval/accuracy":
            assert said == 6
        model = restore_model(MAKE, run.folder, best=best)
        assert_equal(model, restore_model(MAKE, run.folder, step=said))


def test_the_default_folder_is_the_one_that_train_writes_to(trained, monkeypatch, tmp_path):
    run, config = trained
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
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


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


make_normed = eqx.nn.make_with_state(Normed)


def apply(pair, x):
    model, state = pair
    call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return call(x, state)


@pytest.mark.slow
def test_a_model_with_a_state_comes_with_it(tmp_path):
    """The statistics are those of the checkpoint; on any mesh, and of its best step."""
    rng = np.random.default_rng(0)
    source = eqxshard.data.ArraySource(
        {"x": rng.normal(2.0, 3.0, (32, 3)).astype(np.float32)}
    )
    scores = iter([3.0, 1.0, 2.0])
    seen = []

    class Keeps(eqxshard.callbacks.Callback):
        def after_evaluation(self, loop):
            loop.log({"sample/score": next(scores)})
            seen.append(jax.device_get(loop.state))

    def loss_fn(pair, batch, key):
        y, state = apply(pair, batch["x"])
        return ((y - batch["x"][:, :1]) ** 2).mean(-1), state

    run = eqxshard.train(
        make_normed,
        loss_fn,
        lambda pair, batch: {"first": apply(pair, batch["x"])[0][:, 0]},
        optax.sgd(0.1),
        source,
        source,
        config=RunConfig(output=str(tmp_path / "r"), batch_size=16, devices=2),
        epochs=3,
        best="sample/score",
        mode="min",
        callbacks=[Keeps()],
    )
    assert run.summary["best"] == {"metric": "sample/score", "value": 1.0, "step": 4}
    options: dict
    for at, options in ((1, {"best": "sample/score"}), (2, {"step": "newest"})):
        wanted = seen[at].model, seen[at].model_state
        there: dict = {"mesh": "fsdp=4", "rule": eqxshard.fsdp(min_size=1)}
        config = RunConfig(devices=4)
        pair = restore_model(make_normed, run.folder, config=config, **there, **options)
        assert isinstance(pair[1], eqx.nn.State)
        assert_equal(pair, wanted)
        config = RunConfig(output=str(run.folder))
        assert_equal(restore_model(make_normed, config=config, **options), wanted)


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
            restore_model(MAKE, config=config, best=best, mode="min")
    with pytest.raises(ValueError, match=r"hidden.bias is float32\[8\] there, not"):
        restore_model(partial(Line, 4), config=config)
    with pytest.raises(ValueError, match="was given two folders, 'r' and that of config, "):
        restore_model(MAKE, "r", config=config)
    with pytest.raises(ValueError, match="9 devices were asked for, and there are 8 x cpu"):
        restore_model(MAKE, config=dataclasses.replace(config, devices=9))
    assert not (tmp_path / "none").exists()
