"""GPT-2 and Llama as in transformers, by files that `make_gpt_golden.py` wrote with it."""

import dataclasses
import functools as ft
import json
import shutil
from pathlib import Path

import equinox as eqx
import gpt_weights
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpt_model import GPT
from helpers import assert_equal, part
from safetensors.numpy import load_file, save_file

import eqxshard

pytestmark = pytest.mark.usefixtures("as_scripts_run")

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("gpt2", "llama")
BATCHES = ("left", "right", "packed")


def abstract(shape):
    return eqx.filter_eval_shape(GPT, jax.random.key(0), shape)


@pytest.fixture(scope="module")
def models():
    return {
        kind: gpt_weights.load(GOLDEN / kind, abstract(gpt_weights.shape_of(GOLDEN / kind)))
        for kind in KINDS
    }


def batch_of(kind, name):
    golden = load_file(GOLDEN / f"{kind}-{name}.safetensors")
    names = ("tokens", "targets", "positions", "segments")
    return golden, {name: jnp.asarray(golden[name]) for name in names}


# As in transformers


@eqx.filter_jit
def logits_of(model, tokens, positions, segments):
    return model.logits(tokens, positions, segments)


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss_of(model, batch):
    """The mean loss over all targets; `losses` are means over rows."""
    counts = jnp.sum(batch["targets"] >= 0, -1)
    losses = model.losses(**batch)
    return jnp.sum(losses * counts) / jnp.sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHES)
def test_logits_and_gradients_are_those_of_transformers(models, kind, name, tmp_path):
    golden, batch = batch_of(kind, name)
    there = golden["segments"] > 0
    inputs = (batch[x] for x in ("tokens", "positions", "segments"))
    logits = np.asarray(logits_of(models[kind], *inputs))[there]
    assert np.std(logits) > 0.5
    np.testing.assert_allclose(logits, golden["logits"][there], rtol=0, atol=1e-4)
    loss, gradients = loss_of(models[kind], batch)
    np.testing.assert_allclose(loss, golden["loss"], rtol=1e-5)
    # Under their names, and in their layouts.
    gpt_weights.save(tmp_path, gradients)
    ours = load_file(tmp_path / "model.safetensors")
    expected = {
        path.removeprefix("gradients."): array
        for path, array in golden.items()
        if path.startswith("gradients.")
    }
    assert ours.keys() == expected.keys()
    for path, array in expected.items():
        assert np.max(np.abs(array)) > 1e-3, path
        np.testing.assert_allclose(ours[path], array, rtol=1e-3, atol=1e-5, err_msg=path)


def reads_back(folder, kind):
    """The logits of the model that transformers reads, for the packed documents."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    golden, _ = batch_of(kind, "packed")
    same = golden["segments"][:, :, None] == golden["segments"][:, None, :]
    same = torch.tensor(same & np.tri(same.shape[-1], dtype=bool))[:, None]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(golden["tokens"], dtype=torch.long),
            position_ids=torch.tensor(golden["positions"], dtype=torch.long),
            attention_mask=torch.where(same, 0.0, torch.finfo(torch.float32).min),
        ).logits.numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_what_is_saved(models, kind, tmp_path):
    gpt_weights.save(tmp_path, models[kind])
    expected = reads_back(GOLDEN / kind, kind)
    np.testing.assert_array_equal(reads_back(tmp_path, kind), expected)


# There and back


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_was_loaded(models, kind, tmp_path):
    gpt_weights.save(tmp_path, models[kind])
    original = load_file(GOLDEN / kind / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == original.keys()
    for path, array in original.items():
        np.testing.assert_array_equal(saved[path], array, strict=True, err_msg=path)
    assert gpt_weights.shape_of(tmp_path) == gpt_weights.shape_of(GOLDEN / kind)
    theirs = json.loads((GOLDEN / kind / "config.json").read_text())
    for name, value in json.loads((tmp_path / "config.json").read_text()).items():
        if name in theirs and not name.endswith("token_id"):
            assert theirs[name] == value, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_begins_with_them_on_any_mesh(models, kind, tmp_path):
    gpt_weights.save(tmp_path, models[kind])
    shape = gpt_weights.shape_of(tmp_path)
    rule = eqxshard.by_dim({"vocab": "tensor", "mlp": "tensor", "kv_heads": "tensor"})
    state = eqxshard.init_state(
        lambda key: GPT(key, dataclasses.replace(shape, dropout=0.1, seq_len=8)),
        optax.sgd(1e-3),
        key=jax.random.key(0),
        mesh=eqxshard.make_mesh(data=1, fsdp=4, tensor=2),
        rule=eqxshard.combine(rule, eqxshard.fsdp(min_size=64)),
        load=ft.partial(gpt_weights.load, tmp_path),
        precision=eqxshard.Precision(params=jnp.bfloat16),
    )
    qkv = state.model.blocks.attention.qkv
    assert part(qkv)[1] == 1 and np.prod(part(qkv)) == qkv.size // 8
    expected = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, models[kind]
    )
    if kind == "gpt2":
        shorter = expected.position[:8]
        expected = eqx.tree_at(lambda model: model.position, expected, shorter)
    assert_equal(state.model, expected)
    # Other types and lengths come back, too.
    gpt_weights.save(tmp_path / "again", state.model)
    shape = gpt_weights.shape_of(tmp_path / "again")
    assert shape.seq_len == 8
    assert_equal(
        gpt_weights.load(tmp_path / "again", abstract(shape)),
        jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_array(x) else x, expected),
    )


# Folders of others


def change_config(folder, kind, **changes):
    """Copy a model, with other entries in its config.json; `...` removes one."""
    folder.mkdir(exist_ok=True)
    for file in (GOLDEN / kind).iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "prefix"), [("gpt2", "transformer."), ("llama", "model.")]
)
def test_models_without_a_head_and_with_masks_are_read(models, kind, prefix, tmp_path):
    folder = change_config(tmp_path, kind)
    arrays = load_file(folder / "model.safetensors")
    arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    for i in range(2):
        arrays[f"h.{i}.attn.bias"] = np.tri(16, dtype=np.float32)[None, None]
        arrays[f"h.{i}.attn.masked_bias"] = np.full((), -1e4, np.float32)
        arrays[f"layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    if kind == "gpt2":
        arrays["lm_head.weight"] = arrays["wte.weight"]
    save_file(arrays, folder / "model.safetensors")
    like = abstract(gpt_weights.shape_of(folder))
    assert_equal(gpt_weights.load(folder, like), models[kind])
    arrays["h.0.attn.other"] = np.ones(3, np.float32)
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"h\.0\.attn\.other float32\[3\] is only in"):
        gpt_weights.load(folder, like)


def test_older_configurations_mean_the_same(tmp_path):
    rope = json.loads((GOLDEN / "llama/config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    older = {"rope_parameters": ..., "rope_scaling": rope, "rope_theta": theta}
    older |= {"head_dim": None, "hidden_act": ..., "attention_bias": ...}
    expected = gpt_weights.shape_of(GOLDEN / "llama")
    assert gpt_weights.shape_of(change_config(tmp_path, "llama", **older)) == expected
    defaults = {"n_inner": None, "activation_function": "gelu_pytorch_tanh"}
    shape = gpt_weights.shape_of(change_config(tmp_path, "gpt2", **defaults))
    assert shape == dataclasses.replace(gpt_weights.shape_of(GOLDEN / "gpt2"), mlp=64)


ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("gpt2", {"activation_function": "gelu"}, r"activation_function='gelu', and only"),
        ("gpt2", {"n_layer": ...}, r"n_layer is missing"),
        ("gpt2", {"model_type": "bert"}, r"model_type='bert' is not one of gpt2, llama"),
        ("llama", {"rope_parameters": ROPE}, r"rope_type='yarn', and only 'default' or"),
        (
            "llama",
            {"quantization_config": {"bits": 4}},
            r"quantization_config=.* only None",
        ),
    ],
)
def test_what_is_not_computed_here_is_refused(kind, changes, says, tmp_path):
    with pytest.raises(
        ValueError, match=rf"config\.json cannot be used: .*{says}"
    ) as error:
        gpt_weights.shape_of(change_config(tmp_path, kind, **changes))
    assert "\n" not in str(error.value)


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    with pytest.raises(eqxshard.UsageError, match=r"config\.json does not exist; give the"):
        gpt_weights.shape_of(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"config\.json cannot be used: .*\.$"):
        gpt_weights.shape_of(tmp_path)


def test_weights_of_other_shapes_are_named(tmp_path):
    shape = dataclasses.replace(gpt_weights.shape_of(GOLDEN / "gpt2"), vocab_size=33)
    with pytest.raises(ValueError, match="vocab_size=32, and this one has 33; make it"):
        gpt_weights.load(GOLDEN / "gpt2", abstract(shape))
    # A configuration that is not that of the weights.
    folder = change_config(tmp_path, "gpt2", n_inner=24)
    with pytest.raises(ValueError, match=r"blocks\.mlp\.up is float32\[2,1,32,16\] in "):
        gpt_weights.load(folder, abstract(gpt_weights.shape_of(folder)))
