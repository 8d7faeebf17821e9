import functools
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import pooch
import pytest
from run_helpers import ROOT, SCRIPT

import eqxshard
from eqxshard.run._planned import plan_script

SIMPLE = """
import functools
import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
import eqxshard

def loss_fn(model, batch, key):
    return jnp.zeros(len(batch["x"]))

def make_optim(steps):
    print("steps", steps)
    return optax.sgd(0.1)

def refuse(*args):
    raise AssertionError("not for a plan")

arrays = {"x": np.zeros((50, 3)), "label": np.zeros(50, np.int64)}
source = eqxshard.data.ArraySource(arrays)
options = dict(epochs=2)
OPTIONS
if __name__ == "__main__":
    try:
        data = (source, source)
        eqxshard.train(refuse, loss_fn, refuse, make_optim, *data, load=refuse, **options)
    except Exception:
        print("caught")
    finally:
        print("cleaned up")
"""
BATCH = {
    "x": jax.ShapeDtypeStruct((10, 3), jnp.float32),
    "label": jax.ShapeDtypeStruct((10,), jnp.int32),
}


@pytest.fixture
def write(tmp_path):
    """Writes a script whose call of train has more options; returns its path."""

    def write_script(options="", text=SIMPLE):
        file = tmp_path / "simple.py"
        file.write_text(text.replace("OPTIONS", options))
        return file

    return write_script


def collected(script, *options, devices=2):
    """The arguments of the plan of a script, and its notes."""
    found = []

    def planner(run, notes):
        found.append((run.for_mesh(devices), tuple(notes)))

    plan_script(script, options, planner)
    return found[0]


def config(**options):
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"options['config'] = eqxshard.RunConfig({given})"


@pytest.fixture
def refuse(capsys):
    """Checks the one line that a script which cannot be planned ends with."""

    def check(message, script, *options, devices=2):
        with pytest.raises((ValueError, SystemExit)) as caught:
            collected(script, *options, devices=devices)
        assert message in capsys.readouterr().err + str(caught.value)

    return check


def test_a_script_runs_up_to_its_call_of_train(write, tmp_path, capsys):
    script = write(config(batch_size=10))
    arguments, notes = collected(script)
    # Not caught: no `except Exception` sees the end.
    assert capsys.readouterr().out == "steps 10\ncleaned up\n"
    assert arguments["batch"] == BATCH and notes == ()
    assert arguments["mesh_shape"]["data"] == arguments["devices"] == 2
    assert arguments["rule"] == eqxshard.replicate()
    assert [path.name for path in tmp_path.iterdir()] == [script.name]


def test_options_of_the_script_reach_the_plan(monkeypatch):
    options = ["--optimizer", "sgd", "--model=wide", "--mesh", "fsdp=-1", "--steps=7"]
    arguments, _ = collected(SCRIPT, *options, devices=8)
    assert arguments["mesh_shape"] == dict.fromkeys(
        ("stage", "data", "context", "expert", "tensor"), 1
    ) | {"fsdp": 8}
    assert isinstance(arguments["make_model"], functools.partial)
    assert arguments["make_model"].args == (16,)
    assert arguments["batch"]["y"].shape == (16, 2)
    params = {"w": jnp.ones(2)}
    assert not jax.tree.leaves(arguments["optim"].init(params))[0].shape


def test_what_train_and_plan_share(write):
    lines = """
options |= dict(accumulate=2, trainable="head", nonfinite="raise", grad_norms=True)
options |= dict(precision=eqxshard.Precision("bfloat16"), rule=eqxshard.fsdp(min_size=7))
"""
    arguments, _ = collected(write(lines + config(batch_size=8)))
    wanted = {"accumulate": 2, "trainable": "head", "nonfinite": "raise"}
    wanted |= {"grad_norms": True, "precision": eqxshard.Precision("bfloat16")}
    wanted |= {"rule": eqxshard.fsdp(min_size=7)}
    assert {name: arguments[name] for name in wanted} == wanted


@pytest.mark.parametrize("options, size", [([], 24), (["--batch-size=36"], 48)])
def test_a_batch_size_that_does_not_divide_is_rounded_up(options, size):
    arguments, (note,) = collected(SCRIPT, *options, devices=24)
    assert arguments["batch"]["x"].shape == (size, 3)
    assert "does not divide into 24 parts, over data=24 x fsdp=1" in note
    assert note.endswith(f"so this is a plan for --batch-size {size}")


def test_a_script_that_makes_its_own_mesh(write, refuse):
    lines = "; import jax; options['mesh'] = eqxshard.make_mesh(fsdp=2, data=4)"
    script = write(config(batch_size=8) + lines)
    arguments, _ = collected(script, devices=8)
    assert arguments["mesh_shape"]["fsdp"] == 2
    refuse("makes its own mesh, of 8 devices; let it give", script, devices=16)
    script = write(config(batch_size=8) + "; options['mesh'] = 'fsdp=4,data=2'")
    refuse("or use another number of devices, by --mesh.", script, devices=16)


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (SCRIPT, ["--fail", "value"], "--fail value is not what you want; use another."),
        (SCRIPT, ["--modell", "wide"], "Did you mean --model? See --help."),
        (ROOT / "recipes" / "parallel_tour.py", [], "asks for devices before it trains"),
    ],
)
def test_mistakes_that_the_script_finds_end_it(script, options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        collected(script, *options)
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No data, and none to download."""

    def refuse_urls(*args, **kwargs):
        raise AssertionError("a plan downloads nothing")

    monkeypatch.setattr(pooch, "retrieve", refuse_urls)
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path))
    yield
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("offline")
def test_images_need_not_be_there():
    recipe = ROOT / "recipes" / "fashion_mnist.py"
    arguments, notes = collected(recipe, "--rule", "fsdp")
    assert notes == () and arguments["mesh_shape"]["fsdp"] == 2
    batch = arguments["batch"]
    assert batch["image"] == jax.ShapeDtypeStruct((256, 28, 28), jnp.uint8)
    assert batch["label"] == jax.ShapeDtypeStruct((256,), jnp.int32)


@pytest.mark.usefixtures("offline")
def test_texts_need_not_be_there():
    recipe = ROOT / "recipes" / "gpt.py"
    arguments, notes = collected(recipe, "--size", "70b", devices=16)
    assert notes == () and arguments["batch"]["tokens"].shape == (16, 8192)
    assert arguments["precision"].compute == "bfloat16"
    arguments, _ = collected(recipe, "--pack")
    assert vocab_of(arguments) == 257 and "segments" in arguments["batch"]
    arguments, (note,) = collected(recipe, "--data", "nowhere.txt")
    assert (
        note == "there is no nowhere.txt, so it counts as a text with a vocabulary of 257"
    )
    assert vocab_of(arguments) == 257
    _, (note,) = collected(recipe, "--data", "/nowhere/prepared")
    assert note.endswith("/nowhere/prepared, so it counts as a text with a vocabulary of 1")


def vocab_of(arguments):
    model = eqx.filter_eval_shape(arguments["make_model"], jax.random.key(0))
    return model.embedding.shape[0]


def test_a_step_of_ones_own_is_refused(write, refuse):
    lines = "; loss_fn = None; options['train_step'] = refuse\n"
    refuse(
        "a step of its own, which is not planned; give",
        write(config(batch_size=10) + lines),
    )


# `--plan` of the script's own command line


@pytest.mark.usefixtures("as_scripts_run")
def test_a_script_plans_itself(script, tmp_path):
    status, out, err = script("--plan", "4xcpu", "--output", tmp_path / "run")
    assert (status, err) == (0, "")
    assert "4 x cpu (data=4), compiled in" in out
    assert not (tmp_path / "run").exists()
