"""The bytes that the language model recipe has to send, counted by hand."""

from functools import partial
from typing import Any

import equinox as eqx
import gpt
import jax
import jax.numpy as jnp
import numpy as np
from gpt_model import GPT, Shape

import eqxshard
from eqxshard.planning import Plan

SHAPE = Shape(
    layers=4,
    heads=4,
    kv_heads=2,
    embed=128,
    mlp=256,
    seq_len=64,
    vocab_size=256,
    tied=False,
)
ROWS = 16
BFLOAT16 = eqxshard.Precision("bfloat16")

MESHES: dict[str, dict[str, int]] = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "data x tensor": {"data": 4, "tensor": 2},
    "data x fsdp": {"data": 2, "fsdp": 4},
    "fsdp x tensor": {"fsdp": 4, "tensor": 2},
    "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "context": {"context": 8},
}


#: A pipeline, and the microbatches that it gets. (Of two stages, XLA for GPUs unrolls the
#: last tick, and drops what that sends and nobody takes.)
PIPELINE, MICROBATCHES = {"stage": 4, "data": 2}, [4, 8]


def plan_gpt(
    mesh_shape: dict[str, int],
    shape: Shape = SHAPE,
    rows: int = ROWS,
    microbatches: int = 1,
    **options: Any,
) -> Plan:
    """A plan of the recipe's step, in bfloat16, with layers that are computed again."""
    tokens = jax.ShapeDtypeStruct((rows, shape.seq_len), jnp.int32)
    return eqxshard.plan(
        partial(GPT, shape=shape, remat="full", microbatches=microbatches),
        gpt.loss_fn,
        gpt.make_optimizer(gpt.Args(), 1000),
        {"tokens": tokens, "targets": tokens},
        mesh_shape=mesh_shape,
        **{"rule": gpt.make_rule(shape), "precision": BFLOAT16, **options},
    )


def attention_size(shape: Shape) -> int:
    """The parameters of a layer's attention."""
    heads = shape.heads + 2 * shape.kv_heads
    return heads * shape.head_dim * shape.embed + shape.embed * shape.embed


def layer_size(shape: Shape) -> int:
    """The parameters of a layer's matrices, those of all experts and their router too."""
    matrices = attention_size(shape) + max(shape.experts, 1) * 3 * shape.mlp * shape.embed
    return matrices + shape.experts * shape.embed


def theory(
    mesh_shape: dict[str, int],
    shape: Shape = SHAPE,
    rows: int = ROWS,
    backend: str = "cpu",
) -> dict[tuple[str, str], float]:
    """By axes and kind, the bytes that each device has to send in a step.

    Gradients are summed in bfloat16, of two bytes, as everything is but what is said to be
    otherwise.
    """
    axes = ("data", "fsdp", "tensor", "context")
    data, fsdp, tensor, context = (mesh_shape.get(axis, 1) for axis in axes)
    s = shape
    layer = layer_size(s)
    layers, table = s.layers * layer / tensor, s.vocab_size * s.embed / tensor
    norms = (2 * s.layers + 1) * s.embed
    rows //= data * fsdp
    activations = rows * s.seq_len * s.embed
    sent: dict[tuple[str, str], float] = {}

    def add(axes: str, kind: str, size: float, devices: int) -> None:
        if devices > 1:
            part = size * (devices - 1) / devices
            sent[axes, kind] = sent.get((axes, kind), 0) + part

    # Parameters: the layers twice, forward and again backward.
    add("fsdp", "all-gather", 2 * (2 * layers + 2 * table), fsdp)
    # Gradients. That of the input's table is summed whole. XLA makes a reduce-scatter of
    # the sum if it is over fsdp alone. Beside data it does so on GPUs only, and before JAX
    # 0.12 only if tensor does not split the table.
    batch = [axis for axis in ("data", "fsdp") if mesh_shape.get(axis, 1) > 1]
    is_scattered = backend == "gpu" and (tensor == 1 or jax.__version_info__ >= (0, 12))
    is_whole = len(batch) > 1 and not is_scattered
    whole = table if is_whole else 0
    scattered = layers + 2 * table - whole
    add("fsdp", "reduce-scatter", 2 * scattered, fsdp)
    # Then the parts of them.
    add("data", "all-reduce", 2 * 2 * scattered / fsdp, data)
    add(",".join(batch), "all-reduce", 2 * 2 * (norms + whole), data * fsdp)
    # Activations: of each layer's two blocks forward, one of them again, and the
    # gradients of both; of both tables. The cross-entropy sends three numbers per token.
    add("tensor", "all-reduce", 2 * 2 * (5 * s.layers + 2) * activations, tensor)
    add("tensor", "all-reduce", 2 * 4 * 3 * rows * s.seq_len, tensor)
    if context > 1:
        # Each device's keys and values visit the others, forward and twice backward, of
        # which the first visit is one for both. With the last of these go their gradients,
        # in float32; then these come home.
        positions = rows * s.seq_len // context
        keys, queries = (positions * n * s.head_dim for n in (s.kv_heads, s.heads))
        visits = 3 * 2 * (2 * keys) + 4 * (2 * keys)
        home = 2 * (2 * keys)
        # Half of all is exchanged with the device at the other end, and back: queries, keys
        # and values forward and again backward; the output both times; its gradient, with
        # one number for each row; the gradient of the queries.
        halves = 2 * (queries + 2 * keys) + 2 * queries + queries + queries
        halves += 4 * positions * s.heads // 2
        sent["context", "collective-permute"] = s.layers * (
            (context - 1) * visits - 2 * (2 * keys) + home + halves
        )
        add("context", "all-reduce", 2 * 2 * (layers + 2 * table + norms), context)
    return sent


def theory_of_experts(devices: int, shape: Shape) -> dict[tuple[str, str], float]:
    """The same where devices split nothing but experts, and so sequences.

    Of the further rounds, which the data ask for or not, one counts: both ways forward,
    and backward these again and those of the gradients.
    """
    s, tokens = shape, ROWS * shape.seq_len
    part = (devices - 1) / devices
    slots = 2 * s.top_k * s.seq_len // (s.experts * devices)
    rows = ROWS * s.experts * slots * s.embed
    # Attention takes whole sequences: queries, keys and values, and the gradient of the
    # output. Each device looks up all tokens, and needs the gradients of all.
    qkv = tokens * (s.heads + 2 * s.kv_heads) * s.head_dim
    gathered = s.layers * (2 * qkv + tokens * s.embed) + tokens * s.embed
    # Gradients of all but the experts' own parameters and the input's table.
    layer = attention_size(s) + 2 * s.embed + s.experts * s.embed
    dense = s.layers * layer + s.embed + s.vocab_size * s.embed
    # How often each device's tokens choose each expert, twice; the mean probabilities of
    # the experts; the loss of each example.
    routes = s.layers * (2 * ROWS * s.top_k * devices * s.experts + ROWS * s.experts)
    return {
        ("expert", "all-to-all"): s.layers * 12 * 2 * rows * part,
        ("expert", "all-gather"): 2 * gathered * part,
        ("expert", "all-reduce"): 2 * (2 * dense + 4 * (routes + ROWS)) * part,
    }


def theory_of_stages(microbatches: int) -> dict[tuple[str, str], float]:
    """The same of the pipeline."""
    stages, data = PIPELINE.values()
    s = SHAPE
    layer = layer_size(s) + 2 * s.embed
    table = s.vocab_size * s.embed
    activations = ROWS // data * s.seq_len * s.embed
    # Gradients are summed in bfloat16: a stage's layers, both tables and the last norm.
    gradients = s.layers * layer / stages + 2 * table + s.embed
    return {
        # In each tick, a microbatch to the next stage; then its gradient the way back.
        ("stage", "collective-permute"): (
            2 * (microbatches + stages - 1) * 2 * activations / microbatches
        ),
        # The output, which the last stage has, and the gradient of the input, which the
        # first one has.
        ("stage", "all-reduce"): 2 * 2 * 2 * activations * (stages - 1) / stages,
        ("data", "all-reduce"): 2 * 2 * gradients * (data - 1) / data,
    }


def traffic(plan: Plan) -> dict[tuple[str, str], float]:
    """The bytes sent in a plan, by axes and kind, without collectives of scalars alone."""
    sent: dict[tuple[str, str], float] = {}
    for each in plan.collectives:
        if each.bytes > 64:
            assert each.axes is not None and each.times is not None
            key = ",".join(each.axes), each.kind
            sent[key] = sent.get(key, 0) + each.sent * each.times
    return sent


def state_bytes(mesh_shape: dict[str, int]) -> int:
    """The bytes of the parameters of one device: float32, split or whole."""
    fsdp, tensor = (mesh_shape.get(axis, 1) for axis in ("fsdp", "tensor"))
    model = eqx.filter_eval_shape(partial(GPT, shape=SHAPE), jax.random.key(0))
    sizes = [getattr(x, "size", 0) for x in jax.tree.leaves(model)]
    whole = sum(size for size in sizes if size < 2**10)
    return 4 * int(whole + (np.sum(sizes) - whole) / (fsdp * tensor))
