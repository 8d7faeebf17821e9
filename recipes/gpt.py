"""Train a language model, on whatever devices there are, and write text with it.

The model is in gpt_model.py, sampling is in gpt_generate.py, and gpt_weights.py reads and
writes weights in Hugging Face's format.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import equinox as eqx
import gpt_weights
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from gpt_generate import KVCache, generate
from gpt_model import GPT, SIZES, Remat, Shape, flops_per_token
from jax import P

import eqxshard
from eqxshard.data import text
from eqxshard.run import default


def loss_fn(model, batch, key=None):
    # With --pack, this entry weights the losses of sequences.
    arguments = {name: x for name, x in batch.items() if name != "__weight__"}
    return model.losses(**arguments, key=key)


def metric_fn(model, batch):
    return {"loss": loss_fn(model, batch)}


def make_rule(shape):
    """Split layers over stages, heads and features over tensor, the rest over fsdp."""
    by_dim = eqxshard.by_dim(
        {
            "layers": "stage",
            "vocab": "tensor",
            "mlp": "tensor",
            "heads": "tensor",
            "kv_heads": "tensor",
        }
    )
    fsdp = eqxshard.fsdp(min_size=2**10)
    if not shape.experts:
        return eqxshard.combine(by_dim, fsdp)
    # The experts of a layer are stacked, which an expert's own annotations do not say.
    experts = eqxshard.by_path({r"\.experts\.": P(None, "expert")})
    return eqxshard.combine(by_dim, experts, fsdp)


# Without a prefix: --layers instead of --shape.layers.
@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True)
class Changes:
    """Changes to the shape of --size; None changes nothing."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    """Heads of keys and values; each serves the same number of query heads."""
    embed: int | None = None
    mlp: int | None = None
    seq_len: int | None = None
    """The number of tokens in a sequence."""
    vocab_size: Annotated[int | None, default("the text's, at least the size's")] = None
    positions: Literal["rotary", "learned"] | None = None
    norm: Literal["rms", "layer"] | None = None
    activation: Literal["swiglu", "gelu"] | None = None
    tied: bool | None = None
    """Use the embedding table for the output, too."""
    bias: bool | None = None
    dropout: float | None = None
    experts: int | None = None
    """Experts in each layer, of which each token uses --top-k; 0: dense layers."""
    top_k: int | None = None


@dataclass(frozen=True)
class Args:
    """Train a GPT on text: by default a tiny one on Shakespeare, split over all devices."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(
        batch_size=16, steps=1000, evaluate_every=250, log_every=10
    )
    size: Literal["tiny", "124m", "1b", "8b", "70b"] = "tiny"
    """The shape: a tiny one, GPT-2's (124m), or one of Llama 3's."""
    shape: Changes = Changes()
    data: str = "shakespeare"
    """shakespeare; a .txt file, whose bytes are the tokens; a folder made by
    prepare_text.py; or synthetic: generated tokens, which need no data."""
    tokenizer: Annotated[str | None, default("the folder's")] = None
    """The tokenizer.json of a Hugging Face model, for samples."""
    pack: bool = False
    """Keep the documents in a sequence apart; long ones go on in the next sequence."""
    eval_windows: int = 256
    """Evaluate on this many sequences, always the same."""
    learning_rate: float = 1e-3
    """The highest learning rate, after a hundredth of the steps. It falls to a tenth."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon updates the matrices of the layers by Muon, and the rest by Adam."""
    beta2: float = 0.99
    """The decay of AdamW's average of squared gradients."""
    weight_decay: float = 0.1
    """The decay of matrices and, with adamw, of embedding tables."""
    clip: float = 1.0
    """The largest norm of all gradients together; larger gradients are scaled down."""
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        default("bfloat16 for 8b and 70b, float32 for smaller sizes"),
    ] = None
    """The dtype to compute in. Parameters are float32 between steps."""
    accumulate: int = 1
    """Into how many parts to split a batch, which go through the model one by one."""
    remat: Annotated[
        Remat | None, default("full for 8b and 70b, dots for smaller sizes")
    ] = None
    """The values to keep for the backward pass, which computes the others again.
    none: all values. dots: matrix products. full: no values. offload: dots, on the host."""
    microbatches: int = 4
    """With pipeline stages: into how many parts to split the rows of each device."""
    weights: str | None = None
    """Start from the GPT-2 or Llama in this folder, in Hugging Face's format."""
    export: str | None = None
    """Write the weights to this folder at the end, in Hugging Face's format."""
    sample: str | None = None
    """Continue this text instead of training, with the model of --resume or --weights."""
    length: int = 200
    """Tokens of each sample. In training, one follows each evaluation; 0: no samples."""
    temperature: float = 0.8
    """The temperature of samples: lower is more predictable; 0: the likeliest token."""


def make_optimizer(args, steps):
    peak = args.learning_rate
    if not 0 < peak < float("inf"):
        raise eqxshard.UsageError(
            f"--learning-rate {peak} is not positive; use one such as 0.001."
        )
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=min(max(steps // 100, 1), steps - 1),
        decay_steps=steps,
        end_value=peak / 10,
    )
    if args.optimizer == "muon":
        # The layers are stacked, but Muon updates the matrices of one layer.
        muon = optax.contrib.muon(
            schedule,
            weight_decay=args.weight_decay,
            consistent_rms=0.2,  # Makes AdamW's learning rates fit.
            muon_weight_dimension_numbers=find_matrices,
        )
        optim = eqxshard.per_layer(muon, "blocks")
    else:
        optim = optax.adamw(
            schedule, b2=args.beta2, weight_decay=args.weight_decay, mask=is_decayed
        )
    return optax.chain(optax.clip_by_global_norm(args.clip), optim)


def find_matrices(params):
    """The axes of inputs and outputs of each matrix of a layer; `None` for the rest."""
    axes = optax.contrib.MuonDimensionNumbers
    matrices = {
        "qkv": axes(-1, (-4, -3, -2)),
        "out": axes((-2, -1), -3),
        "up": axes(-1, (-3, -2)),
        "down": axes(-1, -2),
    }

    def find(path, _):
        return matrices.get(jax.tree_util.keystr(path[-1:], simple=True))

    return jax.tree_util.tree_map_with_path(find, params)


def is_decayed(params):
    """True for everything but biases and the weights of norms."""

    def decide(path, _):
        name = jax.tree_util.keystr(path)
        return not ("norm" in name or name.endswith("bias"))

    return jax.tree_util.tree_map_with_path(decide, params)


def make_precision(args):
    name = args.precision or ("bfloat16" if is_large(args) else "float32")
    return eqxshard.Precision(name)


def make_shape(args: Args, vocab_size: int) -> Shape:
    """The shape that the options ask for, with room for the tokens of a text."""
    shape = gpt_weights.shape_of(args.weights) if args.weights else SIZES[args.size]
    options = dataclasses.asdict(args.shape)
    changes = {name: value for name, value in options.items() if value is not None}
    if "heads" in changes:
        changes.setdefault("kv_heads", changes["heads"])
    changes.setdefault("vocab_size", max(shape.vocab_size, vocab_size))
    shape = dataclasses.replace(shape, **changes)
    if vocab_size > shape.vocab_size:
        raise eqxshard.UsageError(
            f"the text has {vocab_size:,} different tokens, and the model "
            f"{shape.vocab_size:,}; use --vocab-size {vocab_size} or more."
        )
    return shape


#: The fields of a shape that each axis of a mesh divides.
DIVIDED = {
    "tensor": ("kv_heads", "mlp", "vocab_size"),
    "stage": ("layers",),
    "expert": ("experts",),
    "context": ("seq_len",),
}


def check_mesh(args: Args, shape: Shape) -> None:
    """Say which option to change if the mesh does not divide the model."""
    sizes = eqxshard.run.parse_mesh(args.run.mesh or "fsdp=-1")
    for axis, names in DIVIDED.items():
        size = sizes.get(axis, 1)
        for name in names:
            value = getattr(shape, name)
            if size > 1 and (value == 0 or value % size):
                raise eqxshard.UsageError(
                    f"--{name.replace('_', '-')} {value} does not divide over {axis}="
                    f"{size}; use a multiple of {size}, or another --mesh."
                )
    if sizes.get("stage", 1) > 1 and shape.experts:
        raise eqxshard.UsageError(
            "--experts does not work with pipeline stages; use the mesh axis expert."
        )


class Tokenizer:
    """A Hugging Face tokenizer, from its file."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise eqxshard.UsageError(f"there is no {path}; give another --tokenizer.")
        try:
            import tokenizers  # Only for this: bytes need no package.
        except ImportError:
            raise eqxshard.UsageError(
                f"{path} needs the package tokenizers; add it with pip install "
                "tokenizers, or give --length 0 to train without samples."
            ) from None
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The package raises no narrower class.
            raise eqxshard.UsageError(
                f"{path} is not a Hugging Face tokenizer ({error}); give another "
                "--tokenizer."
            ) from None
        self.vocab_size = 1 + max(self.tokenizer.get_vocab().values())

    def encode(self, text: str) -> np.ndarray:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def find_tokenizer(args: Args) -> text.ByteTokenizer | Tokenizer | None:
    """The tokenizer of samples; `None` if there are none."""
    is_text = args.data == "shakespeare" or args.data.endswith(".txt")
    if args.tokenizer is not None and is_text and args.sample is None:
        raise eqxshard.UsageError(
            f"--tokenizer is not for {args.data}, whose tokens are its bytes; give --data "
            "a folder that recipes/prepare_text.py made of it."
        )
    if args.sample is None and not args.length:
        return None
    if args.tokenizer is not None:
        return Tokenizer(Path(args.tokenizer))
    if is_text or (args.data == "synthetic" and args.sample is not None):
        return text.ByteTokenizer()
    for folder in (Path(args.data), Path(args.data, "train")):
        if (folder / "tokenizer.json").is_file():
            return Tokenizer(folder / "tokenizer.json")
    if args.sample is not None:
        raise eqxshard.UsageError(f"{args.data} has no tokenizer.json; give --tokenizer.")
    return None


class Report(eqxshard.callbacks.Callback):
    """Logs the perplexity and prints a sample after each evaluation."""

    every = None

    def __init__(self, args: Args, corpus: text.Corpus, tokenizer):
        self.args, self.tokenizer = args, tokenizer
        self.start = corpus.valid.take(np.arange(1))

    def after_evaluation(self, loop):
        loop.log({"eval/perplexity": np.exp(loop.values["eval/loss"])})
        if self.args.length and self.tokenizer is not None:
            sampled = write(self.args, loop.state.model, self.tokenizer, self.start)
            loop.print(f"--- sample after step {loop.step} ---\n{sampled}\n---")


def write(args: Args, model: GPT, tokenizer, tokens: np.ndarray) -> str:
    """Continue a text by `--length` tokens."""
    seq_len = model.shape.seq_len
    length = len(tokens) + args.length
    sequences = 0
    while len(tokens) < length:
        # Once a sequence is full, its second half begins the next.
        start = tokens[-(seq_len // 2) :]
        continue_text = continue_sequence if sequences else begin_sequence
        sampled = continue_text(
            model,
            start[None],
            seq_len - len(start),
            args.temperature,
            jax.random.fold_in(jax.random.key(args.run.seed), sequences),
            tokenizer.vocab_size,
        )
        tokens = np.append(tokens, np.asarray(sampled)[0, len(start) :])
        sequences += 1
    return tokenizer.decode(tokens[:length])


def sample(model, prompt, length, temperature, key, vocab_size=None):
    """Sample tokens; if the model has more than `vocab_size`, only the first of them."""
    cache = make_cache(model, len(prompt))
    model = eqx.nn.inference_mode(model)

    def decode(tokens, cache):
        logits, cache = model.decode(tokens, cache)
        known = jnp.arange(logits.shape[-1]) < (vocab_size or logits.shape[-1])
        return jnp.where(known, logits, -jnp.inf), cache

    return generate(decode, cache, prompt, length, key=key, temperature=temperature)


# Two programs: the first prompt may have any length, later ones are half a sequence.
begin_sequence = eqxshard.filter_jit(sample)
continue_sequence = eqxshard.filter_jit(sample)


def make_cache(model: GPT, batch: int) -> KVCache:
    shape = model.shape
    size = (shape.layers, batch, shape.seq_len, shape.kv_heads, shape.head_dim)
    return KVCache.empty(size, model.embedding.dtype)


def open_corpus(args: Args) -> text.Corpus:
    if args.data == "synthetic":
        return make_corpus()
    if args.data == "shakespeare":
        try:
            return text.shakespeare()
        except FileNotFoundError as error:
            if args.run.plan is not None:
                return make_corpus()  # A plan needs only the shapes.
            sentence = f"{error} Or use --data FILE, a text of yours, or --data synthetic."
            raise eqxshard.UsageError(sentence) from None
    return text.open_corpus(args.data)


def make_corpus() -> text.Corpus:
    """Generated tokens: each is the one before it plus 0, 1 or 2, at random."""
    vocab_size = text.ByteTokenizer.vocab_size  # The same as for text.
    steps = np.random.default_rng(0).integers(0, 3, 2**20)
    tokens = np.cumsum(steps) % vocab_size
    train, valid = (
        text.TokenArray(part, vocab_size=vocab_size)
        for part in np.split(tokens, [-(2**17)])
    )
    return text.Corpus(train, valid, "synthetic")


def train(
    args: Args, corpus: text.Corpus, tokenizer, shape: Shape, make_model, load
) -> str:
    """Train, export the weights if asked to, and return a summary."""
    if args.pack:
        # Windows lie side by side, so an epoch reads each token once.
        train_data = text.Windows(
            corpus.train, shape.seq_len, stride=shape.seq_len, documents=True
        )
        sampler = None
        tokens_per_example = 1  # The weight of an example is its number of targets.
    else:
        train_data = text.Windows(corpus.train, shape.seq_len)
        # Any token may begin a sequence; an epoch reads as many tokens as there are.
        sampler = eqxshard.data.UniformSampler(max(len(train_data) // shape.seq_len, 1))
        tokens_per_example = shape.seq_len
    eval_data = text.Windows(
        corpus.valid, shape.seq_len, stride=shape.seq_len, limit=args.eval_windows
    )
    throughput = eqxshard.callbacks.Throughput(tokens_per_example, flops_per_token(shape))
    run = eqxshard.train(
        make_model,
        loss_fn,
        metric_fn,
        partial(make_optimizer, args),
        train_data,
        eval_data,
        config=args.run,
        name=args.size,
        mesh="fsdp=-1",
        rule=make_rule(shape),
        sampler=sampler,
        accumulate=args.accumulate,
        precision=make_precision(args),
        best="eval/loss",
        mode="min",
        load=load,
        callbacks=[throughput, Report(args, corpus, tokenizer)],
    )
    if args.export:
        gpt_weights.save(args.export, run.state.model)
    loss = run.metrics["loss"]
    return f"loss {loss:.4f} | perplexity {np.exp(loss):.2f} | {run.speed} | {run.title}"


def write_sample(args: Args, tokenizer, shape: Shape, make_model, load) -> str:
    """The text of `--sample`, continued by a trained model."""
    tokens = tokenizer.encode(args.sample)
    if not len(tokens):
        raise eqxshard.UsageError("--sample is empty; give it at least one character.")
    if max(tokens) >= shape.vocab_size:
        raise eqxshard.UsageError(
            f"--sample has the token {max(tokens)}, and the model {shape.vocab_size:,} "
            "different ones; give its own --tokenizer."
        )
    model = eqxshard.run.restore_model(
        make_model,
        config=args.run,
        name=args.size,
        mesh="fsdp=-1",
        rule=make_rule(shape),
        step="newest",
        load=load,
    )
    return write(args, model, tokenizer, tokens)


def is_large(args: Args) -> bool:
    return args.size in ("8b", "70b")


def main(args: Args) -> str:
    tokenizer = find_tokenizer(args)
    corpus = open_corpus(args)
    shape = make_shape(args, corpus.vocab_size)
    check_mesh(args, shape)
    make_model = partial(
        GPT,
        shape=shape,
        remat=args.remat or ("full" if is_large(args) else "dots"),
        microbatches=args.microbatches,
    )
    load = partial(gpt_weights.load, args.weights) if args.weights else None
    if args.sample is not None:
        return write_sample(args, tokenizer, shape, make_model, load)
    return train(args, corpus, tokenizer, shape, make_model, load)


if __name__ == "__main__":
    eqxshard.cli(main, Args)
