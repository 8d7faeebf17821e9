"""Broken steps that lint finds in the compiled text, and sound ones like them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from lint_helpers import (
    FSDP,
    MLP,
    found,
    lint,
    make_mesh,
    square_losses,
)

import eqxshard
from eqxshard.compiled._hlo import parse_module
from eqxshard.compiled._lint_text import Argument, LintedStep, TextLint


class Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.tanh(self.weight @ x)


class Stack(eqx.Module):
    """Stacked layers, by a loop that is ours or JAX's own."""

    layers: Layer
    ours: bool = eqx.field(static=True)

    def __init__(self, key, ours=True):
        self.layers = Layer(jax.random.normal(key, (4, 128, 128)) / 100)
        self.ours = ours

    def __call__(self, x):
        if self.ours:
            return eqxshard.scan_layers(self.layers, x)
        return jax.lax.scan(
            lambda x, layer: (Layer(layer)(x), None), x, self.layers.weight
        )[0]


WIDE = {"x": jnp.zeros((16, 128))}
HYBRID = {"data": 2, "fsdp": 4}
TENSOR = eqxshard.by_path({"up": P("tensor"), "down": P(None, "tensor")})


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, HYBRID], ids=str)
@pytest.mark.parametrize("model", [MLP, Stack])
def test_what_is_gathered_where_it_is_used_is_as_it_should_be(model, sizes):
    batch = {"x": jax.ShapeDtypeStruct((512, 64 if model is MLP else 128), jnp.float32)}
    assert str(lint(model, batch=batch, **sizes)) == "no findings"


def test_tensor_parallelism_gathers_no_parameter():
    assert lint(rule=eqxshard.combine(TENSOR, FSDP), data=2, fsdp=2, tensor=2) == ()


def shuffle(model, batch, key):
    order = jax.random.permutation(key, batch["x"].shape[0])
    mixed = batch["x"] + batch["x"][order]
    return jnp.sum(jax.vmap(model)(mixed) ** 2, axis=-1)


SMALL = {"x": jnp.ones((16, 64)), "y": jnp.zeros(16, jnp.int32)}


def mapped(model, batch, key):
    return jax.lax.map(lambda x: jnp.sum(model(x / 255)), batch["x"])


def mapped_outputs(model, batch, key):
    return jax.lax.map(lambda x: jnp.sum(model(x)), jax.vmap(model)(batch["x"]))


def contrastive(model, batch, key):
    out = jax.vmap(model)(batch["x"])
    return jnp.sum(
        (out @ out.T) * jnp.equal(batch["y"][:, None], batch["y"][None]).astype(out.dtype),
        axis=-1,
    )


@pytest.mark.parametrize(
    "loss_fn, leaf",
    [
        (mapped, "batch.x"),
        (mapped_outputs, None),
        (shuffle, "batch.x"),
        (contrastive, "batch.y"),
    ],
)
def test_all_examples_on_every_device_are_found_at_any_size(loss_fn, leaf):
    finding = found(
        lint(loss_fn=loss_fn, batch=SMALL, **HYBRID), "global-batch", "jax.vmap"
    )
    assert finding.leaf == leaf
    assert str(finding.line).startswith("test_lint_text.py:")


@pytest.mark.parametrize("accumulate, resident", [(2, False), (1, True)])
def test_loops_over_examples_are_found_in_any_kind_of_step(accumulate, resident):
    mesh, optim = make_mesh(**HYBRID), optax.sgd(1e-3)
    state = eqxshard.init_state(MLP, optim, key=jax.random.key(0), mesh=mesh, rule=FSDP)
    source = eqxshard.data.ArraySource({k: np.asarray(v) for k, v in SMALL.items()})
    placement = "device" if resident else "host"
    loader = eqxshard.Loader(source, batch_size=16, mesh=mesh, placement=placement)
    batches = loader.stacked(1) if resident else {k: v[None] for k, v in SMALL.items()}
    step = eqxshard.make_train_step(mapped, optim, accumulate=accumulate, lint="error")
    with pytest.raises(ValueError, match="is gathered: every device"):
        step.many(state, batches)
    eval_step = eqxshard.make_eval_step(
        lambda m, b: {"y": mapped(m, b, None)}, lint="error"
    )
    with pytest.raises(ValueError, match="is gathered: every device"):
        eval_step.many(state.model, batches)


def normalized(model, batch, key):
    x, y = batch["x"], batch["y"]
    x = x - jnp.mean(x, axis=0, keepdims=True)
    x = x / (1 + jnp.std(x, axis=0, keepdims=True))
    counts = jnp.bincount(y, length=8).astype(jnp.float32)
    losses = square_losses(model, {"x": x}, key) / counts[y]
    first = jnp.sum(model(batch["x"][0]))
    return losses, {"median": jnp.median(losses), "first": jnp.full(len(losses), first)}


def mixed(model, batch, key):
    keep = jax.random.bernoulli(key, 0.9, batch["x"].shape).astype(jnp.float32)
    x = batch["x"] * keep
    return square_losses(model, {"x": 0.5 * x + 0.5 * x[::-1]}, key)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [normalized, mixed])
def test_sums_and_pairs_of_examples_are_no_global_batch(loss_fn):
    assert lint(loss_fn=loss_fn, batch=SMALL, **HYBRID) == ()
    eight = {name: x[:8] for name, x in SMALL.items()}
    assert lint(loss_fn=loss_fn, batch=eight, **HYBRID) == ()


def test_a_loop_of_jax_over_layers():
    """In a step of ours, it is no finding."""
    assert lint(lambda key: Stack(key, ours=False), batch=WIDE, fsdp=8) == ()

    def step(model, x):
        whole = jax.lax.with_sharding_constraint(model, jax.NamedSharding(mesh, P()))
        grads = jax.grad(lambda model: jnp.sum(jax.vmap(model)(x) ** 2))(whole)
        return jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)

    mesh = make_mesh(fsdp=8)
    model = Stack(jax.random.key(0), ours=False)
    model = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, FSDP))
    batch = jax.device_put(
        np.ones((16, 128), np.float32), jax.NamedSharding(mesh, P("fsdp"))
    )
    finding = found(
        eqxshard.lint(jax.jit(step), model, batch),
        "all-layers",
        "weight (4, 128, 128) is gathered for all 4 layers at once",
        "Use eqxshard.scan_layers",
    )
    assert "test_lint_text.py:" in str(finding)


def test_an_array_whose_memory_is_not_reused():
    module = parse_module(
        "HloModule step, input_output_alias={ {0}: (0, {}, may-alias) }\n\n"
        "ENTRY %main (a: f32[256,64], b: f32[256,64]) -> f32[256,64] {\n"
        '  %a = f32[256,64]{1,0} parameter(0), metadata={op_name="arrays[0]"}\n'
        '  ROOT %b = f32[256,64]{1,0} parameter(1), metadata={op_name="arrays[1]"}\n'
        "}\n"
    )
    arguments = [
        Argument(f"arrays[{n}]", path, (256, 64), donated=True, in_model=False)
        for n, path in enumerate(("reused", "kept"))
    ]
    (finding,) = TextLint(module, LintedStep({"data": 8}, arguments, {}, ())).findings()
    assert (finding.kind, finding.leaf) == ("donation", "kept")
