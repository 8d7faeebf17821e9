"""The language model recipe: the same on every mesh, its options, its text."""

import json
import re
import subprocess
import sys
from functools import partial

import equinox as eqx
import gpt
import gpt_steps
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpt_model import GPT, SIZES
from grades import graded
from run_helpers import ROOT, assert_refused, call, environment, measured, read_lines

from eqxshard.testing import collectives

pytestmark = pytest.mark.usefixtures("as_scripts_run")

SCRIPT = ROOT / "recipes" / "gpt.py"
#: Relative; what float32 rounding makes of losses after twenty steps of Adam.
ROUNDING = 2e-5


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def one_device():
    """The losses on one device, of each kind of model."""
    found = {}

    def get(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in found:
            found[key] = gpt_steps.losses("data=1", **options)
        return found[key]

    return get


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs the recipe in this process; returns its status, stdout and stderr."""
    return partial(call, capsys, monkeypatch, SCRIPT)


# The same on every mesh


SLOW = ["fsdp=4,context=2"]
MESHES = [
    *SLOW,
    "stage=2,data=4",
    "data=2,fsdp=2,tensor=2",
    "data=8",
    "fsdp=8",
    "tensor=8",
    "context=8",
    "stage=8",
]


@pytest.mark.parametrize("mesh", graded(MESHES, slow=SLOW))
def test_every_mesh_has_the_losses_of_one_device(one_device, mesh):
    # With dropout, packed documents and accumulation.
    expected = one_device()
    assert expected[-1] < expected[0] - 0.05
    found = gpt_steps.losses(mesh)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["expert=4,data=2", "fsdp=2,expert=2,tensor=2"])
def test_experts_have_the_losses_of_one_device(mesh):
    shape = gpt_steps.change(experts=4, layers=2)
    expected = gpt_steps.losses("data=1", shape, steps=4)
    found = gpt_steps.losses(mesh, shape, steps=4)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.slow
def test_each_device_has_its_own_experts():
    state, *_ = gpt_steps.start("expert=8", gpt_steps.change(experts=8, layers=2))
    for name in ("up", "down"):
        array = getattr(state.model.blocks.mlp.experts, name)
        assert array.sharding.shard_shape(array.shape) == (2, 1, *array.shape[2:])


@pytest.mark.slow
def test_dropout_and_packing_make_a_difference(one_device):
    plain = gpt_steps.losses("data=1", gpt_steps.change(dropout=0.0), steps=2)
    assert abs(plain[1] / one_device()[1] - 1) > 10 * ROUNDING


@pytest.mark.slow
def test_a_document_does_not_see_those_before_it_in_its_sequence():
    shape = gpt_steps.change(dropout=0.0, layers=2)
    model = GPT(jax.random.key(0), shape)
    source = gpt_steps.make_source(shape)
    batch = source.gather(np.arange(len(source)))
    several = np.flatnonzero(batch["segments"].max(axis=1) > 1)[:4]
    batch = {name: jnp.asarray(array[several]) for name, array in batch.items()}
    second = batch["segments"] == 2

    def loss(tokens):
        targets = jnp.where(second, batch["targets"], -1)
        return model.losses(tokens, targets, batch["positions"], batch["segments"])

    others = (batch["tokens"] + 1) % shape.vocab_size
    changed = jnp.where(batch["segments"] == 1, others, batch["tokens"])
    same, all_changed = loss(changed), loss(others)
    np.testing.assert_array_equal(same, loss(batch["tokens"]))
    assert not np.allclose(all_changed, same)


@pytest.mark.slow
def test_one_layer_at_a_time_is_gathered():
    state, step, loader = gpt_steps.start("fsdp=8", accumulate=1)
    ops = collectives(step, state, next(iter(loader))).ops
    shape = gpt_steps.TINY
    largest = 4 * 2 * shape.mlp * shape.embed  # of a layer; there are eight
    assert max(op.bytes for op in ops if op.kind == "all-gather") <= largest


@pytest.mark.slow
def test_muon_is_for_the_matrices_of_each_layer():
    shape = gpt_steps.change(layers=2)
    expected = gpt_steps.losses("data=1", shape, steps=4, optimizer="muon")
    found = gpt_steps.losses("fsdp=4,tensor=2", shape, steps=4, optimizer="muon")
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)
    state, *_ = gpt_steps.start("fsdp=8", shape, optimizer="muon")
    muon = state.opt_state[1].stacks[0].inner_states["muon"].inner_state[0]
    moved = [leaf.shape for leaf in jax.tree.leaves(muon.mu)]
    blocks = state.model.blocks
    matrices = (blocks.attention.qkv, blocks.attention.out, blocks.mlp.up, blocks.mlp.down)
    assert moved == [matrix.shape for matrix in matrices]


@pytest.mark.parametrize(
    "size, parameters",
    [("124m", 124.5e6), ("1b", 1.236e9), ("8b", 8.03e9), ("70b", 70.6e9)],
)
def test_sizes_are_those_of_their_names(size, parameters):
    model = eqx.filter_eval_shape(partial(GPT, shape=SIZES[size]), jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(model) if hasattr(x, "size"))
    assert count == pytest.approx(parameters, rel=2e-3)


# Text from a model


@pytest.mark.slow
def test_samples_are_the_same_on_one_and_on_eight_devices():
    shape = gpt_steps.change(layers=2, dropout=0.0)
    prompt = np.asarray([[3, 1, 4, 1, 5]], np.int32)

    def write(mesh):
        state, _, _ = gpt_steps.start(mesh, shape)
        model = eqx.tree_at(
            lambda m: m.embedding, state.model, replace_fn=lambda table: 4 * table
        )
        return np.asarray(gpt.begin_sequence(model, prompt, 11, 1.0, jax.random.key(1)))

    expected = write("data=1")
    assert len(set(expected[0])) > 4
    for mesh in ("fsdp=8", "data=2,fsdp=2,tensor=2"):
        np.testing.assert_array_equal(write(mesh), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"positions": "learned", "norm": "layer"}])
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_sequence(kind):
    shape = gpt_steps.change(layers=2, dropout=0.0, **kind)
    model = GPT(jax.random.key(0), shape)
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, (2, 12))
    whole = model.logits(tokens)
    cache = gpt.make_cache(model, 2)
    found, cache = model.decode(jnp.asarray(tokens[:, :5]), cache)
    np.testing.assert_allclose(found, whole[:, 4], atol=1e-5)
    for i in range(5, 12):
        found, cache = model.decode(jnp.asarray(tokens[:, i : i + 1]), cache)
        np.testing.assert_allclose(found, whole[:, i], atol=1e-5)


# The script


SHORT = ["--devices", 1, "--batch-size", 8, "--seq-len", 16, "--layers", 1, "--length", 40]


@pytest.fixture
def words(tmp_path):
    """A text file of little sense."""
    path = tmp_path / "words.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 80)
    return path


@pytest.mark.slow
def test_training_logs_what_it_costs_and_resumes_and_writes(main, words, tmp_path):
    common = ["--data", words, *SHORT, "--log-every", 5, "--save-every", 20]
    common += ["--evaluate-every", 20, "--eval-windows", 16]
    whole = [*common, "--steps", 40, "--output", tmp_path / "whole"]
    status, out, err = main(*whole)
    assert status == 0, err
    last = r"loss \d\.\d{4} \| perplexity \d+\.\d\d \| .* \| tiny on 1 x cpu \(.*\)"
    assert re.fullmatch(last, out.splitlines()[-1]), out
    lines = read_lines(tmp_path / "whole")
    evaluations = [line for line in lines if "eval/loss" in line]
    assert evaluations[-1]["eval/loss"] < evaluations[0]["eval/loss"] < 3.2
    for line in evaluations:
        expected = np.exp(line["eval/loss"])
        assert line["eval/perplexity"] == pytest.approx(expected, rel=1e-5)
    reports = [line for line in lines if "train/loss" in line]
    assert all(line["tokens_per_second"] > 0 for line in reports)
    # What a CPU can compute at most is not in the table.
    assert not any("mfu" in name for line in lines for name in line)

    # Half of it, and then the rest.
    part = ["--output", tmp_path / "part"]
    status, _, err = main(*common, "--steps", 40, "--profile", "3:4", *part)
    assert status == 0, err
    assert list((tmp_path / "part").rglob("*.xplane.pb"))
    assert measured(tmp_path / "part") == measured(tmp_path / "whole")

    status, out, err = main(*whole, "--resume", "--sample", "the quick ")
    assert (status, err) == (0, "")
    assert out.startswith("the quick ") and len(out) == len("the quick ") + 40 + 1


@pytest.mark.thorough
def test_killed_runs_end_as_the_whole_one():
    # In a process of its own, which forks before it has touched a device.
    script = ROOT / "tests" / "kill_gpt.py"
    command = [sys.executable, script, "--runs", "2", "--seed", "7"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all ended as one" in run.stdout


MISTAKES = {
    "--mesh tensor=8 --devices 8": "--kv-heads 2 does not divide over tensor=8",
    "--mesh context=5 --devices 5": "--seq-len 64 does not divide over context=5",
    "--mesh stage=2 --devices 2 --experts 2": "experts",
    "--heads 3": "embed=64 does not divide over heads=3",
    "--seq-len 1": "seq_len=1 is too small",
    "--vocab-size 20": "the text has 29 different tokens, and the model 20",
    "--seq-len 9999999": "9,999,999 needs 10,000,000",
    "--learning-rate 0": "--learning-rate 0.0 is not positive",
    "--data nowhere.txt": "there is no nowhere.txt",
    "--sample hello": "there is no checkpoint",
    "--sample=": "--sample is empty",
    "--weights nowhere": "nowhere",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line(main, options, words):
    assert_refused(main("--data", words, *options.split()), MISTAKES[options])
