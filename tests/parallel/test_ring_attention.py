import functools as ft
import math
import re
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_helpers import assert_close, by_hand, with_gradients
from grades import graded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh, on

from eqxshard import testing
from eqxshard.compiled._hlo import parse_module
from eqxshard.parallel import ring_attention
from eqxshard.planning._costs import count_flops

#: The spec of query, key, value and output.
SPLIT = P(("data", "fsdp"), "context", "tensor")


@ft.cache
def random(shape, dtype=jnp.float32):
    arrays = np.random.default_rng(0).normal(size=(4, *shape))
    return [np.asarray(x, dtype) for x in arrays]


@ft.cache
def full_attention(shape, causal, scale=None, dtype=jnp.float32):
    return by_hand(random(shape, dtype), causal=causal, scale=scale)


def compiled(mesh, shape, fn=None, dtype=jnp.float32, **kwargs):
    """The output and the gradients of ring attention, compiled for a shape on a mesh."""
    fn = ft.partial(ring_attention, **kwargs) if fn is None else fn
    sharding = None if mesh is None else NamedSharding(mesh, SPLIT)
    like = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    # The mesh is in context in the forward pass only, as in a step.
    return with_gradients(on(mesh, fn)).lower(*[like] * 4).compile()


def run(program, arrays, mesh):
    if mesh is not None:
        arrays = jax.device_put(arrays, NamedSharding(mesh, SPLIT))
    return program(*arrays)


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


def largest(program):
    """The number of elements of the largest array on a device."""
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", program.as_text() or "")
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def sent(program):
    """The bytes that each device sends, by the kind of collective."""
    found = Counter()
    for op in testing.collectives(program):
        found[op.kind] += op.bytes * (op.times or 0)
    return dict(found)


def assert_sent_around(program, n, elements, causal=True):
    """Keys and values n - 1 times, and again for the gradient; their gradients n times.

    `elements` are those of a device's part of the keys. If it is causal, halves are
    exchanged: of query, key, value and output, and for the gradient those of the output's
    gradient, its product with the output, and of the gradient of the query.
    """
    around, exchanged = 2 * (n - 1) + 2 * (n - 1) + 2 * n, 3 + 1 / 8 if causal else 0
    total = sent(program)
    assert set(total) == {"collective-permute"}
    # The compiler may merge the two times that keys and values are sent first.
    parts = total["collective-permute"] / (4 * elements)
    assert around - 2 <= parts <= around + exchanged


# The same as full attention


# Blocks of three chunks, two and one; some chunks are not full.
@pytest.mark.versions
@pytest.mark.parametrize(
    "causal",
    [
        pytest.param(False, id="full", marks=pytest.mark.slow),
        pytest.param(True, id="causal"),
    ],
)
@pytest.mark.parametrize(
    "size, length",
    graded(
        [(None, 1030), (2, 1050), (4, 60), (8, 64)],
        [(None, 1030), (4, 60)],
        [(2, 1050), (8, 64)],
    ),
)
def test_equals_full_attention(size, length, causal):
    shape = (1, length, 2, 4)
    mesh = None if size is None else make_mesh(context=size)
    program = compiled(mesh, shape, causal=causal)
    results = run(program, random(shape), mesh)
    assert_close(results, full_attention(shape, causal))
    if size is not None:
        assert_sent_around(program, size, math.prod(shape) // size, causal)
        return
    peer = ft.partial(jax.nn.dot_product_attention, is_causal=causal)
    assert_close(results, with_gradients(peer)(*random(shape)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, vmapped",
    [
        ({"context": 4, "tensor": 2}, False),
        ({"fsdp": 2, "context": 2, "tensor": 2}, True),
    ],
)
def test_batch_and_heads_stay_split(sizes, vmapped):
    mesh, (batch, length, heads, dim) = make_mesh(**sizes), (shape := (4, 32, 6, 8))
    attend = ft.partial(ring_attention, causal=True)
    program = compiled(mesh, shape, eqx.filter_vmap(attend) if vmapped else attend)
    results = run(program, random(shape), mesh)
    assert_close(results, full_attention(shape, True))
    for result in results:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, SPLIT), 4)
    # Nothing is larger than a device's scores of its own rows and heads.
    n = mesh.shape["context"]
    scores = batch * heads * length**2 // n**2 // (mesh.size // n)
    local = batch * length * heads * dim // mesh.size
    assert largest(program) <= max(scores, local)
    assert_sent_around(program, n, local)


# Grouped queries and segments


def grouped(length, heads=6, kv_heads=2, dim=4):
    """Query, key, value and a cotangent, and segments, in order if there are chunks."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    segments = rng.integers(0, 3, (2, length), np.int32)
    return arrays, np.sort(segments, axis=-1) if length > 512 else segments


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(
    "sizes, length, causal",
    [
        (None, 530, False),
        ({"data": 2, "context": 2, "tensor": 2}, 32, True),
        ({"context": 2}, 1030, False),
    ],
)
def test_grouped_queries_and_segments(sizes, length, causal, packed):
    arrays, segments = grouped(length)
    fn = ft.partial(ring_attention, causal=causal)
    expected = by_hand(arrays, causal=causal, segments=segments if packed else None)
    mesh = None if sizes is None else make_mesh(**sizes)
    if mesh is not None:
        split = NamedSharding(mesh, P(("data", "fsdp"), "context"))
        arrays = jax.device_put(arrays, NamedSharding(mesh, SPLIT))
        segments = jax.device_put(segments, split)

    def call(segments, *arrays):
        attend = ft.partial(fn, segments=segments if packed else None)
        return with_gradients(on(mesh, attend))(*arrays)

    program = jax.jit(call).lower(segments, *arrays).compile()
    assert_close(program(segments, *arrays), expected, 2e-5)
    if mesh is None:
        return
    # Keys and values are sent once for each group of three, and segments with them; if it
    # is causal, halves of the queries too.
    n, kv_heads = mesh.shape["context"], 2 // mesh.shape["tensor"]
    permutes = testing.collectives(program)
    assert {op.kind for op in permutes} == {"collective-permute"}
    rows, block = 2 // mesh.shape["data"], -(-length // n)
    sent = {shape for op in permutes for shape in op.shapes}
    part = max(block + 1, 3 * block // 2 if causal else 0)
    assert max(map(elements, sent)) <= rows * part * kv_heads * 4
    assert packed == any(shape.startswith("s32") for shape in sent)


def elements(shape):
    return math.prod(map(int, re.findall(r"\d+", shape.split("[")[1])))


@pytest.mark.slow
@pytest.mark.parametrize("manual", [{"context"}, {"stage"}])
def test_inside_per_device_code(manual):
    # Per device over `context` it gets parts; otherwise it splits the arrays itself.
    mesh, shape = make_mesh(stage=2, context=4), (2, 24, 2, 4)
    spec = P(None, "context") if "context" in manual else P("stage")
    per_device = jax.shard_map(
        ft.partial(ring_attention, causal=True),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=manual,
    )
    program = compiled(mesh, shape, per_device)
    assert_close(run(program, random(shape), mesh), full_attention(shape, True))
    count = 4 if "context" in manual else mesh.size
    assert_sent_around(program, 4, math.prod(shape) // count)


def test_scale_and_large_scores():
    # Without subtracting the maximum, exp would overflow.
    shape = (1, 16, 2, 4)
    program = compiled(None, shape, scale=50.0)
    expected = full_attention(shape, False, scale=50.0)
    results = run(program, random(shape), None)
    assert_close(results, expected, 1e-3)
    assert np.abs(expected[0]).max() > 1


def test_bfloat16_is_summed_in_float32():
    # In bfloat16, sums of a thousand weights would stop at 256.
    shape, mesh = (1, 1200, 1, 4), make_mesh(context=2)
    sharding = NamedSharding(mesh, SPLIT)
    like = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    lowered = with_gradients(on(mesh, ring_attention)).lower(*[like] * 4)
    results = run(lowered.compile(), random(shape, jnp.bfloat16), mesh)
    assert {result.dtype for result in results} == {jnp.dtype(jnp.bfloat16)}
    expected = full_attention(shape, False, dtype=jnp.bfloat16)
    for result, array in zip(results, expected):
        error = np.abs(np.asarray(result, np.float64) - array).max()
        assert error < 2**-7 * np.abs(array).max()
    # Keys and values are sent in bfloat16, twice; their gradients in float32, and back
    # in bfloat16.
    moved = re.findall(r"collective_permute.*tensor<\S+x(\w+)>\n", lowered.as_text())
    assert sorted(moved) == ["bf16"] * 6 + ["f32"] * 2


# Memory


@pytest.mark.slow
def test_memory_grows_with_the_length_of_a_block_not_with_its_square():
    mesh, heads = make_mesh(context=4), 2

    def program(length):
        return compiled(mesh, (1, length, heads, 16), causal=True)

    short, long = program(4096), program(8192)
    less, more = (temporary_bytes(p) for p in (short, long))
    assert more <= 2 * less
    # The increase is a few copies of a device's part of the queries.
    assert more - less <= 12 * (8192 - 4096) // 4 * heads * 16 * 4
    # Only the scores between two chunks exist at a time.
    for p in (short, long, compiled(None, (1, 2048, heads, 16), causal=True)):
        assert largest(p) <= heads * 512**2


# A window


@pytest.mark.parametrize(
    "size, length, window",
    graded(
        [(None, 1030, 600), (4, 60, 40), (4, 60, 16), (8, 64, 8), (2, 1050, 700)],
        [(None, 1030, 600), (4, 60, 40)],
        [(8, 64, 8)],
    ),
)
def test_a_window(size, length, window):
    arrays, _ = grouped(length)
    mesh = None if size is None else make_mesh(context=size)
    attend = ft.partial(ring_attention, causal=True, window=window)
    expected = by_hand(arrays, causal=True, window=window)
    if mesh is not None:
        arrays = jax.device_put(arrays, NamedSharding(mesh, SPLIT))
    program = with_gradients(on(mesh, attend)).lower(*arrays).compile()
    assert_close(program(*arrays), expected, 2e-5)
    if size is None:
        return
    # Keys and values are sent as far as the window reaches, and so are their gradients.
    hops, part = min(-(-(window - 1) // (length // size)), size - 1), arrays[1].size // size
    parts = sent(program)["collective-permute"] / (4 * part)
    assert 2 * hops + 2 * hops + 2 <= parts <= 2 * 3 * hops + 2


# Work


@pytest.mark.slow
def test_causal_attention_computes_half_of_the_blocks():
    mesh, length = make_mesh(context=4), 4096

    def flops(program):
        module = parse_module(program.as_text() or "")
        return sum(count_flops(module).values())

    shape = (1, length, 1, 64)
    causal, full = (compiled(mesh, shape, causal=causal) for causal in (True, False))
    assert flops(causal) < 0.6 * flops(full)


# Mistakes


SAME = [(2, 16, 2, 4)] * 3


@pytest.mark.parametrize(
    "shapes, options, says",
    [
        ([(2, 30, 2, 4)] * 3, {}, "the 30 positions of the .* over context=4; use a multi"),
        (SAME, {"axis": "contxt"}, "ring_attention names the axis 'contxt'.*'context'"),
        ([(8, 3, 4), (8, 2, 4), (8, 2, 4)], {}, "query, key and value have the shapes"),
        ([(0, 2, 4)] * 3, {}, "query, key and value have the shapes"),
        ([(8, 2, 4), (16, 2, 4), (16, 2, 4)], {}, "8 queries and 16 keys; give the same"),
        (SAME, {"segments": np.zeros((2, 12), np.int32)}, "segments have the shape"),
    ],
)
def test_mismatches_are_errors(unannotated, shapes, options, says):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    attend = on(make_mesh(context=4), ft.partial(ring_attention, **options))
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(attend, *arrays)
