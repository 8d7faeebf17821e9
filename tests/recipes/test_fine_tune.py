"""The code of the guide's page on fine-tuning: a GPT-2 and its adapters."""

import ast
import re
import sys
import types
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import eqxshard

PAGE = Path(__file__).parents[2] / "docs/pages/guide/fine-tune.md"
KEY = jax.random.key(0)


def is_definition(node):
    if isinstance(node, ast.Assign):
        name = ast.unparse(node.targets[0])
        return name.isupper() or name in ("rename", "lora_rename")
    return isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef)


@pytest.fixture(scope="module")
def page():
    """The definitions on the page, without the rest of its code."""
    blocks = re.findall(r"(<!-- .* -->\n)?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = "\n".join(block for not_run, block in blocks if not not_run)
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if is_definition(node)]
    module = sys.modules["fine_tune"] = types.ModuleType("fine_tune")
    exec(compile(tree, PAGE, "exec"), vars(module))
    yield module
    del sys.modules["fine_tune"]


def pretrained(page):
    """Random numbers under the names and in the layout of `openai-community/gpt2`."""
    rng, width = np.random.default_rng(0), page.WIDTH

    def normal(*shape):
        return rng.normal(scale=0.1, size=shape).astype(np.float32)

    arrays = {
        "wte.weight": normal(page.VOCAB, width),
        "wpe.weight": normal(page.TIME, width),
    }
    norms, linears = ["ln_f"], {}
    for i in range(page.DEPTH):
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
        linears[f"h.{i}.attn.c_attn"] = (width, 3 * width)
        linears[f"h.{i}.attn.c_proj"] = (width, width)
        linears[f"h.{i}.mlp.c_fc"] = (width, 4 * width)
        linears[f"h.{i}.mlp.c_proj"] = (4 * width, width)
        arrays[f"h.{i}.attn.bias"] = np.tri(page.TIME, dtype=np.float32)[None, None]
    for name in norms:
        arrays |= {f"{name}.weight": 1 + normal(width), f"{name}.bias": normal(width)}
    for name, shape in linears.items():
        arrays |= {f"{name}.weight": normal(*shape), f"{name}.bias": normal(shape[1])}
    return arrays


def make_tokens(page):
    return jnp.asarray(np.random.default_rng(0).integers(0, page.VOCAB, page.TIME))


def gpt2(arrays, tokens, depth, heads):
    """GPT-2 as in its paper and in its first code, in float64."""

    def get(name):
        return arrays[name].astype(np.float64)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * get(f"{name}.weight") + get(f"{name}.bias")

    def linear(x, name):
        return x @ get(f"{name}.weight") + get(f"{name}.bias")

    time = len(tokens)
    x = get("wte.weight")[tokens] + get("wpe.weight")[:time]
    for i in range(depth):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (np.split(y, heads, axis=-1) for y in np.split(qkv, 3, axis=-1))
        mixed = []
        for j in range(heads):
            scores = q[j] @ k[j].T / np.sqrt(q[j].shape[-1])
            scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[j])
        x = x + linear(np.concatenate(mixed, -1), f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ get("wte.weight").T


def test_the_loaded_model_is_gpt2(page, tmp_path):
    file, like = tmp_path / "gpt2.safetensors", eqx.filter_eval_shape(page.GPT2, KEY)
    save_file(pretrained(page), file)
    options = {"rename": page.rename, "transform": page.transform}
    model = eqxshard.load_weights(file, like, ignore=r"attn\.bias$", **options)
    tokens = make_tokens(page)
    expected = gpt2(pretrained(page), np.asarray(tokens), page.DEPTH, page.HEADS)
    logits = eqx.filter_jit(model)(tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_merged_adapters_give_the_same(page):
    model = jax.tree.map(
        # In float32, so that merging rounds nothing, and with adapters that do something.
        lambda x: x.astype(jnp.float32) + 0.01 if eqx.is_inexact_array(x) else x,
        eqx.filter_jit(page.make_adapted)(KEY),
    )
    merged = page.merge(model)
    like = eqx.filter_eval_shape(page.GPT2, KEY)
    assert jax.tree.structure(merged) == jax.tree.structure(like)
    call = eqx.filter_jit(lambda model: model(make_tokens(page)))
    np.testing.assert_allclose(call(merged), call(model), rtol=1e-4, atol=1e-4)
