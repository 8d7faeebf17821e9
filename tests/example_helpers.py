"""The models of Equinox's documentation, and how its examples train them.

The models in `examples/models` have the layers and the constructors of Equinox's, but are
written anew. With `$EQXSHARD_EQUINOX_EXAMPLES`, the folder `docs/examples` of a checkout of
Equinox, the models are those of its notebooks, unchanged (two of which need `einops`).
"""

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

MODELS = Path(__file__).parent / "examples" / "models"
NOTEBOOKS = os.environ.get("EQXSHARD_EQUINOX_EXAMPLES")

#: Globals of a notebook that its models use.
GLOBALS = {"vision_transformer": {"channels": 3}}
KEPT = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
#: Not for models, and rarely installed.
UNUSED = {"torch", "torchvision", "diffrax", "datasets", "tqdm", "transformers"}
UNUSED |= {"matplotlib"}


def read_notebook(path: Path) -> str:
    """The imports, classes and functions of a notebook."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        for node in ast.parse(source).body:
            imported = ast.unparse(node).split()[1].split(".")[0]
            if isinstance(node, KEPT) and imported not in UNUSED:
                parts.append(ast.get_source_segment(source, node) or "")
    return "\n".join(parts)


def load_models(file: str, notebook: str) -> Any:
    """The classes of an example, as attributes."""
    if NOTEBOOKS is None:
        return load_file(file)
    path = Path(NOTEBOOKS) / f"{notebook}.ipynb"
    return execute(read_notebook(path), path, GLOBALS.get(notebook, {}))


def load_file(file: str) -> Any:
    """What a file of `examples/models` defines, as attributes."""
    return execute((MODELS / file).read_text(), MODELS / file, {})


def execute(text: str, path: Path, given: dict[str, Any]) -> Any:
    names = {"__name__": path.stem, **given}
    exec(compile(text, str(path), "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


class Example(NamedTuple):
    """A model of Equinox's documentation, and how it is trained there.

    - `file`: of our model; `notebook`: the name of Equinox's.
    - `make`: `make(models, key)`; `loss_fn`: `loss_fn(model, batch, key)`, one loss per
        example; `optim`: the example's own.
    - `data`: `data(rng)`, arrays of `EXAMPLES` rows by name.
    """

    file: str
    notebook: str
    make: Callable[[Any, Any], Any]
    loss_fn: Callable[[Any, Any, Any], Any]
    optim: optax.GradientTransformation
    data: Callable[[np.random.Generator], dict[str, Any]]


EXAMPLES = 32


def normal(rng, *shape):
    return rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)


def integers(rng, stop, *shape, start=0):
    return rng.integers(start, stop, size=(EXAMPLES, *shape), dtype=np.int32)


def classification(model, batch, key):
    keys = jax.random.split(key, len(batch["label"]))
    inputs = {name: value for name, value in batch.items() if name != "label"}
    inputs = inputs.get("image", inputs)
    logits = jax.vmap(model, in_axes=(0, None, 0))(inputs, True, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def cross_entropy(model, batch, key):
    log_probs = jax.vmap(model)(batch["image"])
    return -jnp.take_along_axis(log_probs, batch["label"][:, None], axis=1)[:, 0]


def binary_cross_entropy(model, batch, key):
    p, y = jax.vmap(model)(batch["x"]), batch["y"]
    return -jnp.mean(y * jnp.log(p) + (1 - y) * jnp.log(1 - p), axis=-1)


def stateful_squares(model_and_state, batch, key):
    model, state = model_and_state
    axes: Any = {"in_axes": (0, None), "out_axes": (0, None)}
    out, state = jax.vmap(model, axis_name="batch", **axes)(batch["x"], state)
    return jnp.mean((out - batch["y"]) ** 2, axis=-1), state


def denoising(call, t1=10.0):
    """The score matching of the diffusion example: times spread evenly over the batch."""

    def loss_fn(model, batch, key):
        time_key, noise_key = jax.random.split(key)
        count = len(batch["image"])
        t = (jax.random.uniform(time_key, (count,)) + jnp.arange(count)) * (t1 / count)

        def one(image, t, key):
            noise_key, model_key = jax.random.split(key)
            noise = jax.random.normal(noise_key, image.shape)
            std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
            score = call(model, t, image * jnp.exp(-0.5 * t) + std * noise, model_key)
            return (1 - jnp.exp(-t)) * jnp.mean((score + noise / std) ** 2)

        return jax.vmap(one)(batch["image"], t, jax.random.split(noise_key, count))

    return loss_fn


def spirals(rng):
    """Clockwise and anticlockwise ones."""
    t = np.linspace(0, 2 * np.pi, 16)
    offset = rng.uniform(0, 2 * np.pi, size=(EXAMPLES, 1))
    y = np.arange(EXAMPLES)[:, None] % 2
    x = np.stack([np.sin(t + offset) * (2 * y - 1), np.cos(t + offset)], axis=-1)
    return {"x": np.float32(x / (1 + t[:, None])), "y": np.float32(y)}


def stateful_data(rng):
    x = normal(rng, 3)
    return {"x": x, "y": np.sin(x) + 1}


def images(*shape):
    return lambda rng: {"image": normal(rng, *shape), "label": integers(rng, 10)}


def sentences(rng):
    """Token 0 is padding."""
    tokens = integers(rng, 40, 8, start=1) * (np.arange(8) < integers(rng, 9, 1, start=3))
    segments = integers(rng, 2, 8)
    return {"token_ids": tokens, "segment_ids": segments, "label": integers(rng, 2)}


VIT = {"embedding_dim": 16, "hidden_dim": 16, "num_heads": 2, "num_layers": 1}
VIT |= {"dropout_rate": 0.1, "patch_size": 4, "num_patches": 4, "num_classes": 10}
BERT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32}
BERT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_dropout_prob": 0.1}
BERT |= {"attention_probs_dropout_prob": 0.1, "max_position_embeddings": 8}
BERT |= {"type_vocab_size": 2}
UNET = {"data_shape": (1, 8, 8), "is_biggan": False, "dim_mults": [1, 2], "hidden_size": 8}
UNET |= {"heads": 2, "dim_head": 4, "dropout_rate": 0.1, "num_res_blocks": 2}
UNET |= {"attn_resolutions": [4]}

MODELS_OF_EQUINOX = {
    "mnist": Example(
        "cnn.py",
        "mnist",
        lambda models, key: models.CNN(key),
        cross_entropy,
        optax.adamw(3e-4),
        images(1, 28, 28),
    ),
    "rnn": Example(
        "rnn.py",
        "train_rnn",
        lambda models, key: models.RNN(2, 1, 16, key=key),
        binary_cross_entropy,
        optax.adam(3e-3),
        spirals,
    ),
    "stateful": Example(
        "stateful.py",
        "stateful",
        lambda models, key: eqx.nn.make_with_state(models.Model)(key),
        stateful_squares,
        optax.adam(3e-4),
        stateful_data,
    ),
    "vit": Example(
        "vit.py",
        "vision_transformer",
        lambda models, key: models.VisionTransformer(**VIT, key=key),
        classification,
        optax.adamw(1e-4),
        images(3, 8, 8),
    ),
    "diffusion": Example(
        "mixer.py",
        "score_based_diffusion",
        lambda models, key: models.Mixer2d((1, 8, 8), 4, 8, 16, 16, 1, 10.0, key=key),
        denoising(lambda model, t, image, key: model(t, image)),
        optax.adabelief(3e-4),
        images(1, 8, 8),
    ),
    "unet": Example(
        "unet.py",
        "unet",
        lambda models, key: models.UNet(**UNET, key=key),
        denoising(lambda model, t, image, key: model(t, image, key=key)),
        optax.adabelief(3e-4),
        images(1, 8, 8),
    ),
    "bert": Example(
        "bert.py",
        "bert",
        lambda models, key: models.BertClassifier(BERT, num_classes=2, key=key),
        classification,
        optax.adam(1e-5),
        sentences,
    ),
}
