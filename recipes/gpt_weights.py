"""GPT-2 and Llama in Hugging Face's format: reads and writes shapes and weights.

    shape = gpt_weights.shape_of(folder)
    load = functools.partial(gpt_weights.load, folder)
    state = eqxshard.init_state(lambda key: GPT(key, shape), ..., load=load)
    gpt_weights.save("exported", state.model)

`transformers` reads the saved folders. It need not be installed.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import jax
import numpy as np
from gpt_model import GPT, Shape

import eqxshard
from eqxshard import nn
from eqxshard.checkpoint import compare_weights

Folder = str | os.PathLike[str]

#: A field of `Shape`, and its entry in the config.json of GPT-2 and of Llama.
SIZES = [
    ("layers", "n_layer", "num_hidden_layers"),
    ("heads", "n_head", "num_attention_heads"),
    ("kv_heads", None, "num_key_value_heads"),
    ("embed", "n_embd", "hidden_size"),
    ("mlp", "n_inner", "intermediate_size"),
    ("seq_len", "n_positions", "max_position_embeddings"),
    ("vocab_size", "vocab_size", "vocab_size"),
    ("tied", "tie_word_embeddings", "tie_word_embeddings"),
    ("theta", None, "rope_theta"),
    ("epsilon", "layer_norm_epsilon", "rms_norm_eps"),
]
#: The path of an array, and its name in the files of GPT-2 and of Llama, with a star for
#: the number of the layer, and without the ".weight" or ".bias" at the end.
NAMES = [
    ("embedding", "wte", "embed_tokens"),
    ("position", "wpe", None),
    ("blocks.norm1", "h.*.ln_1", "layers.*.input_layernorm"),
    ("blocks.attention.qkv", "h.*.attn.c_attn", "layers.*.self_attn.{q,k,v}_proj"),
    ("blocks.attention.out", "h.*.attn.c_proj", "layers.*.self_attn.o_proj"),
    ("blocks.norm2", "h.*.ln_2", "layers.*.post_attention_layernorm"),
    ("blocks.mlp.up", "h.*.mlp.c_fc", "layers.*.mlp.{gate,up}_proj"),
    ("blocks.mlp.down", "h.*.mlp.c_proj", "layers.*.mlp.down_proj"),
    ("norm", "ln_f", "norm"),
]


class Family(NamedTuple):
    model_type: str
    architecture: str
    #: The beginning of arrays' names in a model with a head.
    prefix: str
    #: The fields of `Shape` that are the same in all of these models.
    parts: dict[str, Any]
    #: Entries of config.json that change the computation, with the values that are
    #: supported here. The first value is the default.
    options: dict[str, tuple[Any, ...]]
    #: The defaults of other entries.
    defaults: dict[str, Any]
    sizes: dict[str, str]
    names: dict[str, str]


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    prefix="transformer.",
    parts={"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True},
    options={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    sizes={ours: theirs for ours, theirs, _ in SIZES if theirs},
    names={ours: theirs for ours, theirs, _ in NAMES},
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    prefix="model.",
    parts={"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False},
    options={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1.0,),
        "rope_type": ("default", "llama3"),
        "quantization_config": (None,),
    },
    defaults={"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    sizes={ours: theirs for ours, _, theirs in SIZES},
    names={ours: theirs for ours, _, theirs in NAMES if theirs},
)
FAMILIES = {family.model_type: family for family in (GPT2, LLAMA)}
#: Llama 3.1's `rope_scaling`, in the order of `nn.RotaryScaling`.
SCALING = {"factor": float, "low_freq_factor": float, "high_freq_factor": float}
SCALING |= {"original_max_position_embeddings": int}


def shape_of(folder: Folder) -> Shape:
    """The shape of the model in a folder, from its config.json."""
    file = Path(folder) / "config.json"
    try:
        config = dict(json.loads(file.read_bytes()))
        return _shape(config)
    except FileNotFoundError:
        raise eqxshard.UsageError(
            f"{file} does not exist; give the folder of a Hugging Face GPT-2 or Llama."
        ) from None
    except (ValueError, TypeError) as error:
        sentence = f"{file} cannot be used: {str(error).rstrip('.')}."
        raise eqxshard.UsageError(sentence) from None


def _shape(config: dict[str, Any]) -> Shape:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not one of {', '.join(FAMILIES)}")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    family, config = FAMILIES[kind], config | rope
    config = family.defaults | {k: v for k, v in config.items() if v is not None}
    config.setdefault("rope_type", config.get("type", "default"))
    if kind == "gpt2" and "n_embd" in config:
        config.setdefault("n_inner", 4 * config["n_embd"])
    if kind == "llama" and "num_attention_heads" in config:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    for name, values in family.options.items():
        if config.get(name, values[0]) not in values:
            known = " or ".join(map(repr, values))
            raise ValueError(f"{name}={config[name]!r}, and only {known} is supported here")
    types = get_type_hints(Shape)
    sizes = {
        ours: _entry(config, theirs, types[ours]) for ours, theirs in family.sizes.items()
    }
    shape = Shape(**{"kv_heads": sizes["heads"], **family.parts, **sizes})
    if config.get("head_dim", shape.head_dim) != shape.head_dim:
        raise ValueError(
            f"head_dim={config['head_dim']}, and only {shape.embed} features / "
            f"{shape.heads} heads is supported here"
        )
    if kind == "gpt2" or config["rope_type"] == "default":
        return shape
    numbers = [_entry(config, name, number) for name, number in SCALING.items()]
    return dataclasses.replace(shape, rope_scaling=nn.RotaryScaling(*numbers))


def _entry(config: dict[str, Any], name: str, kind: type) -> Any:
    if name not in config:
        raise ValueError(f"{name} is missing")
    value = config[name]
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds or (kind is not bool and value <= 0):
        raise ValueError(f"{name}={value!r} is not a positive {kind.__name__}")
    return kind(value)


def load(folder: Folder, like: GPT) -> GPT:
    """Load a folder's weights, on each device only its part, in the dtypes of `like`."""
    theirs, ours = shape_of(folder), like.shape
    if ours.seq_len <= theirs.seq_len:  # Sequences may be shorter.
        theirs = dataclasses.replace(theirs, seq_len=ours.seq_len)
    theirs = dataclasses.replace(theirs, dropout=ours.dropout, top_k=ours.top_k)
    for field in dataclasses.fields(Shape):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here != there:
            raise eqxshard.UsageError(
                f"{os.fspath(folder)} has a model of {field.name}={there!r}, and this one "
                f"has {here!r}; make it with the shape that shape_of returns."
            )
    family = family_of(ours)
    inward, _ = layouts(ours)
    ignore = [r"\.attn\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$"]
    ignore += [r"^lm_head\.weight$"] if ours.tied else []

    def transform(path: str, array: Any) -> np.ndarray:
        return inward[path](array) if path in inward else array

    def options(prefix: str) -> dict[str, Any]:
        rename = lambda path: name_of(family, path, prefix)  # noqa: E731
        return {"rename": rename, "transform": transform, "ignore": ignore}

    # OpenAI's own GPT-2 and others were saved without a head, and have shorter names.
    is_short = not compare_weights(folder, like, **options("")).missing
    return eqxshard.load_weights(folder, like, **options("" if is_short else family.prefix))


def save(folder: Folder, model: GPT) -> None:
    """Write a folder that `transformers` reads."""
    folder, shape = Path(folder), model.shape
    family = family_of(shape)
    _, outward = layouts(shape)
    eqxshard.save_weights(
        folder / "model.safetensors",
        model,
        rename=lambda path: name_of(family, path, family.prefix),
        transform=lambda path, x: outward[path](x) if path in outward else x,
    )
    config: dict[str, Any] = {name: values[0] for name, values in family.options.items()}
    config |= {name: getattr(shape, ours) for ours, name in family.sizes.items()}
    config |= {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": str(model.embedding.dtype),
        # The tokenizer knows these; without the entries, transformers assumes numbers.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.rope_scaling:
        numbers = zip(SCALING, dataclasses.astuple(shape.rope_scaling), strict=True)
        config["rope_scaling"] = {"rope_type": "llama3", **dict(numbers)}
    for name in ("rope_type", "quantization_config"):
        config.pop(name, None)
    if jax.process_index() == 0:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def family_of(shape: Shape) -> Family:
    """The family of a model; an error if any part of the model differs from it."""
    family = GPT2 if shape.positions == "learned" else LLAMA
    wanted = family.parts | {"experts": 0}
    wanted |= {"kv_heads": shape.heads} if family is GPT2 else {}
    for name, value in wanted.items():
        if (ours := getattr(shape, name)) != value:
            raise eqxshard.UsageError(
                f"this model has {name}={ours!r}, and Hugging Face's "
                f"{family.architecture} has {value!r}; write it with eqxshard.save_weights."
            )
    return family


def name_of(family: Family, path: str, prefix: str) -> str | list[str]:
    if path == "unembedding":
        return "lm_head.weight"
    kind = "bias" if path.endswith("bias") else "weight"
    name = prefix + family.names[re.sub(r"[._](bias|weight)$", "", path)]
    before, _, after = f"{name}.{kind}".partition("{")
    several, _, after = after.rpartition("}")
    return [before + x + after for x in several.split(",")] if several else f"{name}.{kind}"


Layouts = dict[str, Callable[[Any], Any]]


def layouts(shape: Shape) -> tuple[Layouts, Layouts]:
    """Functions from the file's arrays of one layer to ours, as views, and back."""
    embed, dim, kv_heads = shape.embed, shape.head_dim, shape.kv_heads
    if family_of(shape) is LLAMA:
        return {
            "blocks.attention.qkv": lambda parts: np.concatenate(
                [part.reshape(kv_heads, -1, dim, embed) for part in parts], axis=1
            ),
            "blocks.attention.out": lambda x: x.reshape(embed, -1, dim),
            "blocks.mlp.up": np.stack,
        }, {
            "blocks.attention.qkv": lambda x: [
                part.reshape(-1, embed) for part in (x[:, :-2], x[:, -2], x[:, -1])
            ],
            "blocks.attention.out": lambda x: x.reshape(embed, -1),
            "blocks.mlp.up": list,
        }
    # GPT-2's matrices are (in, out), and the queries of all heads come before all keys.
    return {
        "blocks.attention.qkv": lambda x: x.T.reshape(3, -1, dim, embed).swapaxes(0, 1),
        "blocks.attention.qkv_bias": lambda x: x.reshape(3, -1, dim).swapaxes(0, 1),
        "blocks.attention.out": lambda x: x.T.reshape(embed, -1, dim),
        "blocks.mlp.up": lambda x: x.T[None],
        "blocks.mlp.up_bias": lambda x: x[None],
        "blocks.mlp.down": lambda x: x.T,
        "position": lambda x: x[: shape.seq_len],
    }, {
        "blocks.attention.qkv": lambda x: x.swapaxes(0, 1).reshape(-1, embed).T,
        "blocks.attention.qkv_bias": lambda x: x.swapaxes(0, 1).reshape(-1),
        "blocks.attention.out": lambda x: x.reshape(embed, -1).T,
        "blocks.mlp.up": lambda x: x[0].T,
        "blocks.mlp.up_bias": lambda x: x[0],
        "blocks.mlp.down": lambda x: x.T,
    }
