"""How far `typecheck` gets: Equinox's layers, the recipes and published models.

What is not in a table of exceptions passes, under `replicate` and `fsdp` as well as with
dims split over `tensor`.
"""

import functools as ft
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from typecheck_models import LAYERS, PUBLISHED

import eqxshard

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_scripts_run")]

ROWS = 16
MESHES = {
    "replicate": eqxshard.make_mesh(data=8),
    "fsdp": eqxshard.make_mesh(data=2, fsdp=4),
    "tensor": eqxshard.make_mesh(data=4, tensor=2),
}
RULES = {"replicate": eqxshard.replicate(), "fsdp": eqxshard.fsdp(min_size=0)}
LOOKUP = "JAX types a lookup only if it is told how the result is split"
CONVOLUTION = "JAX does not type a convolution of split channels"
TRACED = "it computes constants while JAX traces, which needs jax.set_mesh"
STATE = (
    "Equinox compares the types of a state before and after, with what arrays are split as"
)
SUM = "a product is summed over a dim that both sides split"
LOOP = "a loop begins with zeros that are not split, and returns what is"

LAYERS_UNTYPED = {
    "Embedding": LOOKUP,
    "BatchNorm (ema)": STATE,
    "RotaryPositionalEmbedding": TRACED,
}
LAYERS_ON_TENSOR = {
    "SpectralNorm": SUM,
    "Sequential with state": STATE,
    "GRUCell": LOOP,
    "LSTMCell": LOOP,
    **{name: CONVOLUTION for name in LAYERS if name.startswith("Conv")},
}
PUBLISHED_UNTYPED = {
    **dict.fromkeys(("GPT-2", "Llama", "BERT", "ESM-2", "LSTM"), LOOKUP),
    "ESM-2, typed lookup": TRACED,
    "neural ODE": TRACED,
}
PUBLISHED_ON_TENSOR = {
    **dict.fromkeys(("GPT-2, typed lookup", "Llama, typed lookup"), SUM),
    **dict.fromkeys(("BERT, typed lookup", "ViT", "Mixer", "ConvNeXt", "MAF"), SUM),
    "LSTM, typed lookup": LOOP,
    "neural ODE": SUM,
    "Mamba": "what is joined is split differently",
    "U-Net": CONVOLUTION,
    "DQN": CONVOLUTION,
}
RESHAPE = "JAX does not type a reshape of patches under jax.vmap"
UNTYPED = (LOOKUP, CONVOLUTION, TRACED, STATE, RESHAPE)


def expect(report, reason):
    """A report says what a table says, and names what it can."""
    if reason is None:
        assert report, report
        return
    assert not report
    assert report.untyped == (reason in UNTYPED), report
    assert report.place is not None
    if reason in (SUM, LOOP):
        assert report.fields, report


def expected(name, split, untyped, on_tensor):
    found = on_tensor.get(name) if split == "tensor" else None
    return found or untyped.get(name)


def loss_of(case):
    """The mean of what a model returns for each example."""

    def loss_fn(model, batch, key):
        x = batch["x"]
        rows = jax.typeof(x).sharding.spec[0]
        if isinstance(model, tuple):
            model, state = model
            axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
            out, state = jax.vmap(model, axis_name="batch", **axes)(x, state)
            return jnp.mean(out, range(1, out.ndim)), state
        keys = jax.sharding.reshard(jax.random.split(key, ROWS), P(rows))
        out = jax.vmap(lambda x, key: case.call(model, x, key))(x, keys)
        return jnp.mean(out, range(1, out.ndim))

    return loss_fn


def check(case, split, rule):
    batch = {"x": jax.ShapeDtypeStruct((ROWS, *case.shape), case.dtype)}
    return eqxshard.typecheck(case.make, loss_of(case), batch, MESHES[split], rule)


def split_first_dims(path, leaf, mesh):
    """Each matrix and kernel by its first dim: the outputs of a layer."""
    return P("tensor") if leaf.ndim > 1 and leaf.shape[0] % 2 == 0 else P()


@pytest.mark.parametrize("split", MESHES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, split):
    report = check(LAYERS[name], split, RULES.get(split, split_first_dims))
    expect(report, expected(name, split, LAYERS_UNTYPED, LAYERS_ON_TENSOR))


def test_all_layers_of_equinox_are_here():
    apart = {"Conv", "ConvTranspose", "Pool", "AdaptivePool", "State", "StateIndex"}
    layers = {
        name
        for name, value in vars(eqx.nn).items()
        if isinstance(value, type) and name not in apart | {"StatefulLayer"}
    }
    assert layers <= {name.split(" ")[0] for name in LAYERS}


@pytest.mark.parametrize("split", MESHES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name, split):
    case = PUBLISHED[name]
    by_dim = eqxshard.by_dim(dict.fromkeys(case.split, "tensor"))
    rule = RULES.get(split, eqxshard.first_match(by_dim, eqxshard.replicate()))
    reason = expected(name, split, PUBLISHED_UNTYPED, PUBLISHED_ON_TENSOR)
    expect(check(case, split, rule), reason)


IMAGES = {"image": ((28, 28), jnp.uint8), "label": ((), jnp.int32)}
RGB = {**IMAGES, "image": ((32, 32, 3), jnp.uint8)}
PAIRS = {"x": ((), jnp.float32), "y": ((), jnp.float32)}
ROWS_OF_4 = {"x": ((4,), jnp.float32), "y": ((4,), jnp.float32)}
TEXT = {"tokens": ((16,), jnp.int32), "targets": ((16,), jnp.int32)}
TOUR = {"image": ((784,), jnp.float32), "label": ((), jnp.int32)}
PATHS = {"path": ((10, 2), jnp.float32)}
CARTS = {"cart": ((4,), jnp.float32)}
KEYS = "keys of jax.random.split, or noise, are not split as the batch is"
RECIPES_UNTYPED = {
    "gpt": LOOKUP,
    "parallel_tour": KEYS,
    "diffusion": KEYS,
    "reinforce": KEYS,
    "neural_ode": TRACED,
    "vit": RESHAPE,
}
RECIPES_ON_TENSOR = {
    "regression": SUM,
    "fashion_mnist": SUM,
    "fashion_mnist, MLP": SUM,
    "ensemble": SUM,
    "lora": LOOKUP,
    "neural_ode": SUM,
    "gan": CONVOLUTION,
    "resnet": CONVOLUTION,
    "rnn": LOOP,
}
SPLIT = {"rnn": "gates", "resnet": "out", "lora": "out"}
RECIPES = (
    "regression fashion_mnist fashion_mnist,_MLP gpt parallel_tour diffusion ensemble gan "
    "lora neural_ode reinforce resnet rnn vit"
)


def recipes():
    """The models and losses of the recipes, with their batches."""
    folder = Path(__file__).parents[2] / "recipes"
    sys.path[:0] = [str(folder), str(folder / "gallery")]
    try:
        import diffusion
        import ensemble
        import fashion_mnist
        import gan
        import gpt
        import gpt_model
        import lora
        import neural_ode
        import parallel_tour
        import regression
        import reinforce
        import resnet
        import rnn
        import vit
    finally:
        del sys.path[:2]
    shape = gpt_model.Shape(2, 4, 32, 64, 16, 2, vocab_size=64)
    convnet = ft.partial(fashion_mnist.ConvNet, 8, 16, 3, 32)

    def discriminator_loss(model, batch, key):
        generator = gan.make_generator(jax.random.key(1))
        return gan.discriminator_loss(model, batch, key, generator)

    return {
        "regression": (regression.make_model, regression.loss_fn, ROWS_OF_4),
        "fashion_mnist": (convnet, fashion_mnist.loss_fn, IMAGES),
        "fashion_mnist, MLP": (fashion_mnist.MLP, fashion_mnist.loss_fn, IMAGES),
        "gpt": (lambda key: gpt_model.GPT(key, shape), gpt.loss_fn, TEXT),
        "parallel_tour": (parallel_tour.Classifier, parallel_tour.loss_fn, TOUR),
        "diffusion": (diffusion.Flow, diffusion.loss_fn, IMAGES),
        "ensemble": (ensemble.make_ensemble, ensemble.loss_fn, PAIRS),
        "gan": (gan.make_discriminator, discriminator_loss, IMAGES),
        "lora": (ft.partial(lora.make_adapted, 4), lora.loss_fn, IMAGES),
        "neural_ode": (neural_ode.make_field, neural_ode.loss_fn, PATHS),
        "reinforce": (reinforce.make_policy, reinforce.loss_fn, CARTS),
        "resnet": (eqx.nn.make_with_state(resnet.ResNet), resnet.loss_fn, RGB),
        "rnn": (rnn.RNN, rnn.loss_fn, IMAGES),
        "vit": (vit.ViT, vit.loss_fn, IMAGES),
    }


@pytest.mark.parametrize("split", MESHES)
@pytest.mark.parametrize("name", RECIPES.split())
def test_recipes(name, split):
    name = name.replace("_MLP", " MLP")
    make, loss_fn, shapes = recipes()[name]
    batch = {
        entry: jax.ShapeDtypeStruct((ROWS, *shape), dtype)
        for entry, (shape, dtype) in shapes.items()
    }
    by_dim = eqxshard.by_dim({SPLIT.get(name, "mlp"): "tensor"})
    on_tensor = split_first_dims if name == "gan" else by_dim
    rule = RULES.get(split, eqxshard.first_match(on_tensor, eqxshard.replicate()))
    report = eqxshard.typecheck(make, loss_fn, batch, MESHES[split], rule)
    expect(report, expected(name, split, RECIPES_UNTYPED, RECIPES_ON_TENSOR))
