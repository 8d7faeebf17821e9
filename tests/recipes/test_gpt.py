"""The language model recipe: the same on every mesh, its options, its text."""

import re
import sys
from functools import partial

import equinox as eqx
import gpt_steps
import jax
import numpy as np
import pytest
from gpt_model import GPT, SIZES
from grades import graded
from run_helpers import ROOT, assert_refused, call, read_lines

pytestmark = pytest.mark.usefixtures("as_scripts_run")

SCRIPT = ROOT / "recipes" / "gpt.py"
#: The relative error of losses in float32 after twenty steps of Adam.
ROUNDING = 2e-5


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs the recipe in this process; returns its status, stdout and stderr."""
    return partial(call, capsys, monkeypatch, SCRIPT)


#: A mesh, and the changes to the tiny shape.
MESHES = [
    ("fsdp=4,context=2", {"layers": 2}),
    ("stage=2,data=4", {}),
    ("data=2,fsdp=2,tensor=2", {}),
    ("fsdp=2,expert=2,tensor=2", {"experts": 4, "layers": 2}),
]


@pytest.mark.parametrize("mesh, changes", graded(MESHES, slow=MESHES[:1]))
def test_a_mesh_has_the_losses_of_one_device(mesh, changes):
    # With dropout, packed documents and accumulation.
    shape = gpt_steps.change(**changes)
    expected = gpt_steps.losses("data=1", shape)
    assert expected[-1] < expected[0] - 0.05
    found = gpt_steps.losses(mesh, shape)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.parametrize(
    "size, parameters",
    [("124m", 124.5e6), ("1b", 1.236e9), ("8b", 8.03e9), ("70b", 70.6e9)],
)
def test_sizes_are_those_of_their_names(size, parameters):
    model = eqx.filter_eval_shape(partial(GPT, shape=SIZES[size]), jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(model) if hasattr(x, "size"))
    assert count == pytest.approx(parameters, rel=2e-3)


# The script


SHORT = ["--devices", 1, "--batch-size", 8, "--seq-len", 16, "--layers", 1, "--length", 40]


@pytest.fixture
def words(tmp_path):
    """A text file of little sense."""
    path = tmp_path / "words.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 80)
    return path


@pytest.mark.slow
def test_training_logs_what_it_costs_and_resumes_and_writes(
    main, words, tmp_path, monkeypatch
):
    # Bytes need no package.
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    options = ["--data", words, *SHORT, "--log-every", 5, "--evaluate-every", 20]
    options += ["--eval-windows", 16, "--steps", 40, "--output", tmp_path / "run"]
    status, out, err = main(*options)
    assert status == 0, err
    last = r"loss \d\.\d{4} \| perplexity \d+\.\d\d \| .* \| tiny on 1 x cpu \(.*\)"
    assert re.fullmatch(last, out.splitlines()[-1]), out
    lines = read_lines(tmp_path / "run")
    evaluations = [line for line in lines if "eval/loss" in line]
    assert evaluations[-1]["eval/loss"] < evaluations[0]["eval/loss"] < 5
    for line in evaluations:
        expected = np.exp(line["eval/loss"])
        assert line["eval/perplexity"] == pytest.approx(expected, rel=1e-5)
    reports = [line for line in lines if "train/loss" in line]
    assert all(line["tokens_per_second"] > 0 for line in reports)
    # The peak of a CPU is not in the table.
    assert not any("mfu" in name for line in lines for name in line)
    # Nothing is left to train.
    status, out, err = main(*options, "--resume", "yes", "--sample", "the quick ")
    assert (status, err) == (0, "")
    # Some of the 40 bytes may be parts of characters.
    assert out.startswith("the quick ") and 0 < len(out) - len("the quick \n") <= 40


@pytest.mark.slow
def test_generated_tokens_are_learned(main, tmp_path):
    options = ["--data", "synthetic", *SHORT, "--steps", 60, "--eval-windows", 16]
    options += ["--output", tmp_path / "run"]
    status, _, err = main(*options)
    assert status == 0, err
    status, out, err = main(*options, "--resume", "yes", "--sample", "abc")
    assert (status, err) == (0, "") and out.startswith("abc")
    losses = [x["eval/loss"] for x in read_lines(tmp_path / "run") if "eval/loss" in x]
    assert np.log(3) < losses[-1] < 0.9 * np.log(257)


MISTAKES = {
    "--mesh tensor=8 --devices 8": "--kv-heads 2 does not divide over tensor=8",
    "--mesh stage=2 --devices 2 --experts 2": "experts",
    "--heads 3": "embed=64 does not divide over heads=3",
    "--vocab-size 20": "the text has 257 different tokens, and the model 20",
    "--seq-len 9999999": "9,999,999 needs 10,000,000",
    "--learning-rate 0": "--learning-rate 0.0 is not positive",
    "--data nowhere.txt": "there is no nowhere.txt",
    "--sample hello": "there is no checkpoint",
    "--tokenizer t.json": "whose tokens are its bytes; give --data a folder that",
    "--tokenizer nowhere.json --sample hello": "there is no nowhere.json",
    "--tokenizer words.txt --sample hello": "words.txt is not a Hugging Face tokenizer",
    "--weights nowhere": "nowhere",
}


def test_without_a_network_it_asks_for_a_text(main, monkeypatch, tmp_path):
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path))
    # Nothing listens there.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9/")
    status, _, err = main()
    assert status == 2 and err.endswith(
        "Or use --data FILE, a text of yours, or --data synthetic.\n"
    )


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line(main, options, words):
    assert_refused(main("--data", words, *options.split()), MISTAKES[options])
