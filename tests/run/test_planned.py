import functools
import os
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pooch
import pytest
from run_helpers import ROOT, SCRIPT

import eqxshard
from eqxshard.run._planned import collect, collect_all

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
    with collect(script, options, devices=devices) as found:
        return found


def config(**options):
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"options['config'] = eqxshard.RunConfig({given})"


def refuse(message, script, *options, devices=2):
    with pytest.raises(ValueError) as caught:
        collected(script, *options, devices=devices)
    assert message in str(caught.value)


def test_a_script_runs_up_to_its_call_of_train(write, tmp_path, capsys):
    script = write(config(batch_size=10))
    arguments, notes = collected(script)
    assert capsys.readouterr().out == "cleaned up\nsteps 10\n"
    assert arguments["batch"] == BATCH and notes == ()
    assert arguments["mesh_shape"]["data"] == arguments["devices"] == 2
    assert arguments["rule"] == eqxshard.replicate()
    assert [path.name for path in tmp_path.iterdir()] == [script.name]


def test_the_script_is_main_only_inside(write):
    before = sys.modules["__main__"], sys.argv, [*sys.path]
    script = write(config(batch_size=10))
    with collect(script, ["--one", "2"], devices=2) as (arguments, _):
        assert arguments["loss_fn"] is getattr(sys.modules["__main__"], "loss_fn")  # noqa: B009
        assert sys.argv == [str(script), "--one", "2"]
        assert sys.path[0] == str(script.parent)
    assert (sys.modules["__main__"], sys.argv, [*sys.path]) == before


def test_padding_brings_weights_and_an_epoch_has_a_step_at_least(write, capsys):
    arguments, _ = collected(write(config(batch_size=64)))
    assert arguments["batch"].keys() == {"x", "label", "__weight__"}
    assert arguments["batch"]["__weight__"].shape == (64,)
    assert "steps 2\n" in capsys.readouterr().out
    drop = "; options['remainder'] = 'drop'"
    arguments, _ = collected(write(config(batch_size=64) + drop))
    assert "__weight__" not in arguments["batch"]


def test_transforms_decide_the_batch(write):
    lines = """
def shorten(batch, generators):
    noise = np.stack([generator.random(2) for generator in generators])
    return {"x": batch["x"][:, :2] + noise.astype(np.float16)}
options["transform"] = eqxshard.data.RandomTransform(shorten)
"""
    arguments, _ = collected(write(lines + config(batch_size=10)))
    assert arguments["batch"] == {"x": jax.ShapeDtypeStruct((10, 2), jnp.float32)}


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


def test_the_batch_size_of_a_script_is_rounded_up_and_that_of_a_user_is_not():
    arguments, (note,) = collected(SCRIPT, devices=24)
    assert arguments["batch"]["x"].shape == (24, 3)
    assert note == (
        "--batch-size 16 does not divide over data=24 x fsdp=1 = 24 devices, so this is a "
        "plan for --batch-size 24"
    )
    message = "= 24 devices; use a multiple of 24, such as 24 or 48."
    for option in ("--batch-size=36", "--batch_size=36"):
        refuse(message, SCRIPT, option, devices=24)


@pytest.mark.parametrize(
    "options, compute, remat",
    [("", "float32", "dots"), ("--size 8b", "bfloat16", "full")],
)
def test_large_sizes_of_the_gpt_compute_in_bfloat16(options, compute, remat):
    recipe = ROOT / "recipes" / "gpt.py"
    with collect(recipe, options.split(), devices=8) as (plan, _):
        assert plan["precision"].compute == compute
        assert plan["make_model"].keywords["remat"] == remat


def test_a_script_that_makes_its_own_mesh(write):
    lines = "; import jax; options['mesh'] = eqxshard.make_mesh(fsdp=2, data=4)"
    script = write(config(batch_size=8) + lines)
    arguments, _ = collected(script, devices=8)
    assert arguments["mesh_shape"]["fsdp"] == 2
    refuse("makes its own mesh, of 8 devices; let it give", script, devices=16)


def test_bad_input_is_one_sentence_with_the_remedy(write, tmp_path):
    refuse("there is no script nowhere.py; give the path", "nowhere.py")
    refuse("--devices 0 is too small; use 1", SCRIPT, devices=0)
    refuse("does not divide the 8 devices; choose", SCRIPT, "--mesh=fsdp=3", devices=8)
    script = write(text="print('hello')")
    refuse("simple.py does not call eqxshard.train, so there is nothing to plan", script)


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
@pytest.mark.parametrize("data", ["auto", "fashion_mnist", "synthetic"])
def test_images_need_not_be_there(data):
    recipe = ROOT / "recipes" / "fashion_mnist.py"
    arguments, notes = collected(recipe, "--data", data, "--rule", "fsdp")
    assert notes == () and arguments["mesh_shape"]["fsdp"] == 2
    batch = arguments["batch"]
    assert batch["image"] == jax.ShapeDtypeStruct((256, 28, 28), jnp.uint8)
    assert batch["label"] == jax.ShapeDtypeStruct((256,), jnp.int32)


@pytest.mark.usefixtures("offline")
def test_texts_need_not_be_there():
    recipe = ROOT / "recipes" / "gpt.py"
    arguments, notes = collected(recipe, "--size", "70b", devices=16)
    assert notes == () and arguments["batch"]["tokens"].shape == (16, 8192)
    arguments, _ = collected(recipe)
    assert vocab_of(arguments) == 65
    arguments, _ = collected(recipe, "--tokenizer", "byte", "--pack")
    assert vocab_of(arguments) == 257 and "segments" in arguments["batch"]
    options = ("--data", "nowhere.txt", "--tokenizer", "byte")
    arguments, (note,) = collected(recipe, *options)
    assert (
        note == "there is no nowhere.txt, so it counts as a text with a vocabulary of 257"
    )
    assert vocab_of(arguments) == 257
    _, (note,) = collected(recipe, "--data", "/nowhere/prepared")
    assert note.endswith("/nowhere/prepared, so it counts as a text with a vocabulary of 1")


def vocab_of(arguments):
    model = eqx.filter_eval_shape(arguments["make_model"], jax.random.key(0))
    return model.embedding.shape[0]


def test_a_text_that_is_there_is_read(tmp_path):
    Path(tmp_path / "words.txt").write_text("abcd" * 300)
    options = ("--data", str(tmp_path / "words.txt"))
    arguments, notes = collected(ROOT / "recipes" / "gpt.py", *options)
    assert vocab_of(arguments) == 4 and notes == ()


def test_outside_of_a_plan_train_trains(write):
    collected(write(config(batch_size=10)))
    source = eqxshard.data.ArraySource({"x": np.zeros((16, 1))})
    make, loss_fn = (lambda key: None), (lambda model, batch, key: 0)
    with pytest.raises(ValueError, match="--batch-size 256 is more than the 16 examples"):
        eqxshard.train(make, loss_fn, None, lambda steps: optax.sgd(0.1), source, None)


VARIED = """
import equinox as eqx
import numpy as np
import optax
from dataclasses import dataclass
import eqxshard

print("loaded")

@dataclass(frozen=True)
class Args:
    run: eqxshard.RunConfig = eqxshard.RunConfig(batch_size=5)
    rate: float = 0.1

def loss_fn(model, batch, key):
    return batch["x"]

def main(args):
    source = eqxshard.data.ArraySource({"x": np.zeros(50, np.float32)})
    print("rate", args.rate)
    eqxshard.train(
        eqx.nn.Identity, loss_fn, None, lambda steps: optax.sgd(args.rate),
        source, None, config=args.run, epochs=1,
    )

eqxshard.cli(main, Args)
"""


def test_a_script_is_loaded_once_for_several_options(write, capsys):
    script = write(text=VARIED)
    variants = (["--rate=1.0"], ["--rate=2.0", "--batch-size=10"])
    with collect_all(script, variants, devices=2) as (found, notes):
        assert found[0]["loss_fn"] is found[1]["loss_fn"]
    assert capsys.readouterr().out == "loaded\nrate 1.0\nrate 2.0\n"
    # The first batch size is the script's, and does not divide.
    assert [each["batch"]["x"].shape for each in found] == [(6,), (10,)]
    assert len(notes) == 1 and "--batch-size 6" in notes[0]


def test_without_cli_options_cannot_be_varied(write):
    script = write(config(batch_size=10))
    with (
        pytest.raises(ValueError, match="so its options cannot be varied"),
        collect_all(script, ([], ["--rate=1.0"]), devices=2),
    ):
        pass
