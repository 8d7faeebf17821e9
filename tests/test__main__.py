"""The command `python -m eqxshard`."""

import json
import subprocess
import sys

import jax
import pytest
from grades import graded
from plan_recipes import CASES, check_recipe
from run_helpers import ROOT, SCRIPT, assert_refused, environment
from run_page_helpers import make_record, make_run

from eqxshard.__main__ import main

REGRESSION = ROOT / "recipes" / "regression.py"

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
    size: str = "thin"
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

GUARD eqxshard.cli(main, Args)
"""


@pytest.fixture
def script(tmp_path):
    """Writes the script; returns its path."""

    def write(guard="if __name__ == '__main__':"):
        file = tmp_path / "net.py"
        file.write_text(SCRIPT_OF_ITS_OWN.replace("GUARD", guard))
        return file

    return write


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs the command in this process; returns its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        try:
            status = main([*map(str, words)])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.slow
def test_a_plan_of_a_script_is_printed_and_written(command, script, tmp_path):
    words = ["plan", script(), "--size", "wide", "--devices", "4", "--backend=cpu"]
    status, out, err = command(*words, "--device", "h100", "--json", "plan.json")
    assert (status, err) == (0, "")
    assert "4 x NVIDIA H100 80GB HBM3 (fsdp=4)" in out and "all-gather" in out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["memory"]["parameters"] == 4 * (24 * 3 + 24) // 4
    # Two moments; and a number of the step, which is whole.
    assert plan["memory"]["optimizer"] == 2 * plan["memory"]["parameters"] + 4
    assert plan["memory"]["batch"] == 4 * 8 * 3 // 4
    written = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert written == {"net.py", "plan.json"}


def test_bad_input_is_one_sentence_with_the_remedy(command, monkeypatch, tmp_path):
    def refuse(sentence, *words):
        assert_refused(command("plan", *words), sentence)

    refuse("are required: --devices; see", REGRESSION)
    refuse("argument --devices: invalid int value: 'x'; see", REGRESSION, "--devices=x")
    refuse("'gpus' (choose from", REGRESSION, "--devices=8", "--backend=gpus")
    refuse("there is no script nowhere.py; give", "nowhere.py", "--devices=8")
    refuse("no folder out; make it", REGRESSION, "--devices=8", "--json=out/plan.json")
    refuse("plan.htm is no page; give", REGRESSION, "--devices=8", "--html=plan.htm")
    refuse("there is no target 'h20'; did you", REGRESSION, "--devices=8", "--device=h20")
    refuse(
        "mesh data=3 does not fit the 8 devices; choose",
        *(REGRESSION, "--devices=8", "--mesh=data=3,fsdp=-1"),
    )
    monkeypatch.setenv("EQXSHARD_PLAN_DIR", str(tmp_path))
    words = (REGRESSION, "--devices=8", "--backend=tpu", "--device=tpu-v5p")
    refuse("the compiler for tpu-v5p is not installed; run", *words)


def test_nothing_to_plan(command, tmp_path):
    (tmp_path / "hello.py").write_text("import sys; sys.exit()")
    refused = command("plan", "hello.py", "--devices", "8")
    assert_refused(refused, "hello.py does not call eqxshard.train, so there is nothing to")


def test_a_search_of_nothing(command):
    words = ("search", REGRESSION, "--devices=4", "--backend=cpu")
    refused = command(*words, "--search-accumulate=many")
    assert_refused(refused, "many is not a list of numbers; use one")
    refused = command(*words, "--search-axes=fdsp")
    assert_refused(refused, "fdsp")
    refused = command(*words, "--json=nowhere/search.json")
    assert_refused(refused, "there is no folder nowhere; make it first.")


def test_pages_of_runs_are_written(command, tmp_path):
    for name in ("one", "two"):
        make_run(tmp_path / name, record=make_record())
    page = tmp_path / "one" / "index.html"
    assert command("page", "one") == (0, f"{page}\n", "")
    assert page.exists()
    status, out, _ = command("compare", "one", "two")
    head, one, two, page = out.splitlines()
    assert (status, page) == (0, f"the page is {tmp_path / 'compare.html'}")
    assert head.split()[:4] == ["Run", "Step", "eval/loss", "eval/accuracy"]
    assert one.split()[:4] == ["one", "2,000", "0.3176", "0.9155"] and "two" in two
    assert (tmp_path / "compare.html").exists()
    assert_refused(command("compare", "one", "one"), "the same; give each run once")
    assert_refused(command("page", "three"), "/three; give the folder of a run.")
    assert_refused(
        command("page", "one", "--small"), "unrecognized arguments: --small; see"
    )
    words = ("compare", "one", "two", "--output=out/page.html")
    assert_refused(command(*words), "there is no folder out; make it first.")


def test_info_has_versions_devices_and_variables_that_matter(command, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SLURM_JWT", "secret")
    status, out, err = command("info")
    assert (status, err) == (0, "")
    assert f"jax          {jax.__version__}\n" in out and "eqxshard     " in out
    assert "\nNCCL_DEBUG=INFO\n" in out and "secret" not in out
    assert out.endswith("devices      8 x cpu (cpu)\n")


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_a_search_ranks_meshes_of_a_script(command, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("search", REGRESSION, "--devices=2", "--device=cpu", "--json=search.json")
    status, _, err = command(*words)
    assert status == 0, err
    assert "tried 1 of 3 candidates\n" in err and "tried 3 of 3 candidates\n" in err
    found = json.loads((tmp_path / "search.json").read_text())
    # Its rule splits nothing over tensor, so all of the work would be done twice there.
    *others, tensor = found["candidates"]
    assert (tensor["name"], tensor["plan"]) == ("tensor=2", None)
    assert "repeat the same work" in tensor["reason"]
    assert all(each["fits"] for each in others)


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_a_script_without_a_guard_is_refused(command, script):
    refused = command(
        "plan", script(guard="if True:"), "--size=wide", "--devices=2", "--backend=cpu"
    )
    assert_refused(refused, "eqxshard.cli is called when this script is imported, for a")


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_a_mistake_in_the_model_shows_where_it_is(command, script):
    file = script()
    text = file.read_text().replace("args.factor", "jnp.broadcast_to(batch['x'], (5, 7))")
    file.write_text(text)
    status, _, err = command("plan", file, "--size=wide", "--devices=2", "--backend=cpu")
    assert status == 1 and err.startswith("Traceback"), err
    assert "net.py" in err and "in loss_fn" in err and "broadcast" in err, err


@pytest.mark.slow
@pytest.mark.parametrize("script", [REGRESSION, SCRIPT])
def test_the_command_is_a_process_without_devices(script, tmp_path):
    words = ["-m", "eqxshard", "plan", script, "--devices=4", "--backend=cpu"]
    settings = environment(JAX_PLATFORMS="cuda", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "(data=4), compiled in" in done.stdout and done.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize("name", graded(CASES, slow=[*CASES][:1]))
def test_recipes_send_what_their_rules_say(name):
    check_recipe(name, backend="cpu")
