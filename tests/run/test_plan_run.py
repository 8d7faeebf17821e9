"""`--plan 512xh200`: scripts that plan what they would train."""

import functools
import json
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pooch
import pytest
from grades import graded
from plan_helpers import made_by_hand
from plan_recipes import CASES, check_recipe
from run_helpers import ROOT, SCRIPT, assert_refused, call, environment

import eqxshard

RECIPES = ROOT / "recipes"
SIMPLE = """
from dataclasses import dataclass
import jax
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

@dataclass(frozen=True)
class Args:
    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=8)

def main(args):
    arrays = {"x": np.zeros((48, 3)), "label": np.zeros(48, np.int64)}
    data = eqxshard.data.ArraySource(arrays)
    options = dict(loss_fn=loss_fn, metric_fn=refuse, load=refuse, epochs=2)
    options |= dict(OPTIONS)
    eqxshard.train(
        refuse, make_optim=make_optim, train_data=data, eval_data=data,
        config=args.run, **options
    )

if __name__ == "__main__":
    eqxshard.cli(main, Args)
"""
BATCH = {
    "x": jax.ShapeDtypeStruct((8, 3), jnp.float32),
    "label": jax.ShapeDtypeStruct((8,), jnp.int32),
}


@pytest.fixture
def write(tmp_path):
    """Writes a script whose call of train has more options; returns its path."""

    def write_script(options=""):
        file = tmp_path / "simple.py"
        file.write_text(SIMPLE.replace("OPTIONS", options))
        return file

    return write_script


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a script; returns its status, stdout and stderr."""
    return functools.partial(call, capsys, monkeypatch)


@pytest.fixture
def planned(run, monkeypatch):
    """Runs a script with a plan; returns the arguments of the plan, and what it prints."""
    found = {}

    def plan(make_model, loss_fn, optim, batch, **options):
        found.update(options, make_model=make_model, optim=optim, batch=batch)
        return made_by_hand((1, 1, 1, 1, 1, 1, 4, None))

    monkeypatch.setattr("eqxshard.run._plan_run.plan", plan)

    def run_script(script, *options, devices=2):
        monkeypatch.syspath_prepend(str(script.parent))
        status, out, err = run(script, "--plan", f"{devices}xh200", *options)
        assert (status, err) == (0, ""), err
        return found, out

    return run_script


def test_train_plans_and_ends_the_process(write, planned, tmp_path):
    script = write()
    arguments, out = planned(script)
    assert out.startswith("steps 12\n8 x NVIDIA H200") and "Note" not in out
    assert arguments["batch"] == BATCH and arguments["target"] == "h200"
    assert arguments["mesh_shape"]["data"] == 2
    assert arguments["rule"] == eqxshard.replicate()
    assert [path.name for path in tmp_path.iterdir()] == [script.name]


def test_train_plans_without_a_command_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "eqxshard.run._plan_run.plan",
        lambda *given, **options: made_by_hand((1, 1, 1, 1, 1, 1, 4, None)),
    )
    data = eqxshard.data.ArraySource({"x": np.zeros((256, 3))})
    given = (dict, lambda *x: x, None, optax.sgd(0.1), data, None)
    with pytest.raises(SystemExit) as stop:
        eqxshard.train(*given, config=eqxshard.RunConfig(plan="8xh200"), epochs=1)
    assert stop.value.code == 0 and "memory of a device" in capsys.readouterr().out


def test_options_of_the_script_reach_the_plan(planned):
    options = ["--optimizer", "sgd", "--model=wide", "--mesh", "fsdp=-1", "--steps=7"]
    arguments, _ = planned(SCRIPT, *options, devices=16)
    assert arguments["mesh_shape"] == dict.fromkeys(
        ("stage", "data", "context", "expert", "tensor"), 1
    ) | {"fsdp": 16}
    assert isinstance(arguments["make_model"], functools.partial)
    assert arguments["make_model"].args == (16,)
    assert arguments["batch"]["y"].shape == (16, 2)
    params = {"w": jnp.ones(2)}
    assert not jax.tree.leaves(arguments["optim"].init(params))[0].shape


def test_what_train_and_plan_share(write, planned):
    arguments, _ = planned(
        write(
            "accumulate=2, trainable='head', nonfinite='raise', grad_norms=True, "
            "precision=eqxshard.Precision('bfloat16'), rule=eqxshard.fsdp(min_size=7)"
        )
    )
    wanted = {"accumulate": 2, "trainable": "head", "nonfinite": "raise"}
    wanted |= {"grad_norms": True, "precision": eqxshard.Precision("bfloat16")}
    wanted |= {"rule": eqxshard.fsdp(min_size=7)}
    assert {name: arguments[name] for name in wanted} == wanted


@pytest.mark.parametrize("options, size", [([], 24), (["--batch-size=36"], 48)])
def test_a_batch_size_that_does_not_divide_is_rounded_up(planned, options, size):
    arguments, out = planned(SCRIPT, *options, devices=24)
    assert arguments["batch"]["x"].shape == (size, 3)
    assert "does not divide into 24 parts, over data=24 x fsdp=1" in out
    assert out.endswith(f"so this is a plan for --batch-size {size}.\n")


def test_a_script_may_make_the_mesh_before(write, planned, run):
    for mesh in ("args.run.make_mesh('fsdp=2')", "eqxshard.make_mesh(fsdp=2, data=4)"):
        arguments, _ = planned(write(f"mesh={mesh}"), devices=8)
        sizes = arguments["mesh_shape"]
        assert (sizes["data"], sizes["fsdp"], arguments["explicit"]) == (4, 2, [])
    script = write("mesh=eqxshard.make_mesh(fsdp=2, data=4, explicit=['data'])")
    assert planned(script, devices=8)[0]["explicit"] == ["data"]
    refused = run(script, "--plan=16xh200")
    assert_refused(refused, "makes its own mesh, of 8 devices; give eqxshard.train the")


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ("mesh='fsdp=4,data=2'", [], "does not fit the 16 devices"),
        ("", ["--mesh=data=3,fsdp=-1"], "or use another number of devices, by --mesh."),
        ("loss_fn=None, train_step=refuse", [], "of its own, which is not planned; give"),
        ("", ["--plan=8xh20"], "there is no target 'h20'; did you"),
        ("", ["--plan-file=plan.htm"], "cannot be written as 'plan.htm'; give a name that"),
    ],
)
def test_mistakes_are_one_sentence_with_the_remedy(write, run, options, words, message):
    script = write(options)
    status, _, err = run(script, "--plan=16xh200", *words)
    assert_refused((status, "", err), message)


def test_a_script_that_does_not_train_has_nothing_to_plan(tmp_path, run):
    file = tmp_path / "hello.py"
    file.write_text("import eqxshard\neqxshard.cli(print, eqxshard.RunConfig)\n")
    status, _, err = run(file, "--plan=8xh200")
    assert status == 2 and "--plan 8xh200 plans the step of eqxshard.train" in err


# Recipes, on a machine without data


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No data, and none to download."""

    def refuse_urls(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(pooch, "retrieve", refuse_urls)
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_images_need_not_be_there(planned):
    arguments, _ = planned(RECIPES / "fashion_mnist.py", "--rule", "fsdp")
    assert arguments["mesh_shape"]["fsdp"] == 2
    batch = arguments["batch"]
    assert batch["image"] == jax.ShapeDtypeStruct((256, 28, 28), jnp.uint8)
    assert batch["label"] == jax.ShapeDtypeStruct((256,), jnp.int32)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("data", [[], ["--data", "synthetic"]])
def test_texts_need_not_be_there(planned, data):
    recipe = RECIPES / "gpt.py"
    arguments, _ = planned(recipe, "--size", "70b", *data, devices=16)
    assert arguments["batch"]["tokens"].shape == (16, 8192)
    assert arguments["precision"].compute == "bfloat16"
    model = eqx.filter_eval_shape(arguments["make_model"], jax.random.key(0))
    assert model.embedding.shape[0] == 128_256
    arguments, _ = planned(recipe, "--pack", *data)
    assert "segments" in arguments["batch"]


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize("name", graded(CASES, slow=[*CASES][:1]))
def test_recipes_send_what_their_rules_say(name):
    check_recipe(name, backend="cpu")


# In a process of their own

#: Everything that is sent to the process that compiles is the script's own.
SCRIPT_OF_ITS_OWN = """
import functools
from dataclasses import dataclass
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import eqxshard

WIDTHS = {"wide": 24}

class Net(eqx.Module):
    layer: eqx.nn.Linear

    def __init__(self, make, args, key):
        self.layer = make(3, WIDTHS[args.size], key=key)

    def __call__(self, x):
        return self.layer(x)

@dataclass(frozen=True)
class Args:
    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=8)
    size: str = "wide"
    factor: int = 5

def squares(model, batch):
    return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, axis=-1)

def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)

def main(args):
    def loss_fn(model, batch, key):
        return squares(model, batch) * args.factor

    make_optim = lambda steps: optax.adamw(1e-3, mask=is_matrix)
    source = eqxshard.data.ArraySource({"x": np.zeros((64, 3), np.float32)})
    eqxshard.train(
        functools.partial(Net, eqx.nn.Linear, args), loss_fn, None, make_optim,
        source, None,
        config=args.run, epochs=1, mesh="fsdp=-1", rule=eqxshard.fsdp(min_size=1),
    )

if __name__ == "__main__":
    eqxshard.cli(main, Args)
"""


@pytest.fixture
def net(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(SCRIPT_OF_ITS_OWN)
    return file


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.slow
def test_a_plan_is_printed_and_written(run, net, tmp_path):
    status, out, err = run(net, "--plan=4xcpu", "--plan-file=plan.json")
    assert (status, err) == (0, "")
    assert "4 x cpu (fsdp=4)" in out and "all-gather" in out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["memory"]["parameters"] == 4 * (24 * 3 + 24) // 4
    # Two moments; and a number of the step, which is whole.
    assert plan["memory"]["optimizer"] == 2 * plan["memory"]["parameters"] + 4
    assert plan["memory"]["batch"] == 4 * 8 * 3 // 4
    written = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert written == {"net.py", "plan.json"}


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_a_mistake_of_the_script_is_told(run, net):
    wrong = "jnp.broadcast_to(batch['x'], (5, 7))"
    net.write_text(net.read_text().replace("args.factor", wrong))
    status, _, err = run(net, "--plan=2xcpu")
    words = ["Traceback", "net.py", "in loss_fn", "broadcast"]
    assert status == 1 and all(word in err for word in words), err


@pytest.mark.slow
@pytest.mark.parametrize("script", [RECIPES / "regression.py", SCRIPT])
def test_a_script_plans_itself_without_devices(script, tmp_path):
    settings = environment(JAX_PLATFORMS="cuda", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, script, "--plan=4xcpu"],
        cwd=tmp_path,
        env=settings,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "(data=4), compiled in" in done.stdout
    assert os.listdir(tmp_path) == []
