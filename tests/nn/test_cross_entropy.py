import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh, on

from eqxshard import testing
from eqxshard.nn import cross_entropy

BATCH, SEQ, EMBED, VOCAB = 8, 24, 16, 40


def arrays(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(BATCH, SEQ, EMBED))
    weight = rng.normal(size=(VOCAB, EMBED))
    targets = rng.integers(-1, VOCAB, (BATCH, SEQ), np.int32)
    targets[0, :5] = -1
    cotangent = rng.normal(size=(BATCH, SEQ)).astype(np.float32)
    hidden, weight = jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype)
    return hidden, weight, jnp.asarray(targets), jnp.asarray(cotangent)


@ft.cache
def expected():
    return with_gradients(plain)(*arrays())


def with_gradients(fn):
    def call(hidden, weight, targets, cotangent):
        losses, back = jax.vjp(lambda h, w: fn(h, w, targets), hidden, weight)
        return losses, *back(cotangent)

    return jax.jit(call)


def plain(hidden, weight, targets):
    logits = hidden @ weight.T
    found = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.where(targets >= 0, found, 0.0)


def chunked(chunk):
    return lambda *args: cross_entropy(*args, chunk=chunk)


def assert_close(results, expected, tolerance=1e-5):
    for name, result, array in zip(("losses", "hidden", "weight"), results, expected):
        result, array = np.asarray(result, np.float64), np.asarray(array, np.float64)
        atol = tolerance * np.abs(array).max()
        np.testing.assert_allclose(result, array, 0, atol, err_msg=name)


# All at once; chunks that divide; a last chunk that is not full; one position at a time.
@pytest.mark.parametrize(
    "chunk, vmapped",
    graded(
        [(24, False), (24, True), (8, False), (7, False), (7, True), (1, True)],
        [(24, False), (7, True)],
        [(24, True), (8, False), (7, False), (1, True)],
    ),
)
def test_equals_the_plain_loss(chunk, vmapped):
    fn = chunked(chunk)
    fn = jax.vmap(fn, in_axes=(0, None, 0)) if vmapped else fn
    results = with_gradients(fn)(*arrays())
    assert_close(results, expected())
    *_, targets, _ = arrays()
    assert np.all(np.asarray(results[0])[targets < 0] == 0)
    assert np.all(np.asarray(results[1])[targets < 0] == 0)


def test_bfloat16_is_summed_in_float32():
    hidden, weight, targets, cotangent = arrays(jnp.bfloat16)
    results = with_gradients(chunked(1))(hidden, weight, targets, cotangent)
    assert [x.dtype for x in results] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    hidden, weight = (x.astype(jnp.float32) for x in (hidden, weight))
    exact = with_gradients(plain)(hidden, weight, targets, cotangent)
    assert_close(results, exact, 2**-7)


def test_the_gradients_of_chunks_are_summed_in_float32():
    # In bfloat16 the sum would stop at 128, where another half makes no difference.
    hidden = jnp.ones((1000, 1), jnp.bfloat16)
    weight, targets = jnp.zeros((2, 1), jnp.bfloat16), jnp.zeros(1000, jnp.int32)
    grad = jax.grad(lambda weight: jnp.sum(chunked(1)(hidden, weight, targets)))
    assert jax.jit(grad)(weight).tolist() == [[-500], [500]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, chunk",
    [
        ({"data": 2, "fsdp": 4}, 2),
        ({"context": 4, "tensor": 2}, 2),
        ({"data": 2, "context": 2, "tensor": 2}, 5),
    ],
    ids=str,
)
def test_only_sums_over_the_vocabulary_and_of_the_gradient_are_sent(sizes, chunk):
    mesh, args = make_mesh(**sizes), arrays()
    split = P(("data", "fsdp"), "context")
    specs = (split, P("tensor"), split, split)
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs)]
    program = with_gradients(on(mesh, chunked(chunk))).lower(*args).compile()
    assert_close(program(*args), expected())
    found = testing.collectives(program)
    assert {op.kind for op in found} == {"all-reduce"}
    # The gradient of the weights once over each axis, not for each chunk.
    weight = f"f32[{VOCAB // mesh.shape['tensor']},{EMBED}]"
    gradients = [op for op in found if op.shapes == (weight,)]
    assert 1 <= len(gradients) <= 2 and all(op.times == 1 for op in gradients)
    # Otherwise sums for the positions of a chunk, and the gradients of their activations.
    others = [op for op in found if op not in gradients]
    assert bool(others) == (mesh.shape["tensor"] > 1)
    positions = BATCH // (mesh.shape["data"] * mesh.shape["fsdp"]) * chunk
    assert all(op.bytes <= 4 * positions * EMBED for op in others)


def test_only_the_logits_of_a_chunk_exist():
    def temporary_bytes(fn, *shapes):
        like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        targets = jax.ShapeDtypeStruct(shapes[0][:2], jnp.int32)
        args = (*like, targets, jax.ShapeDtypeStruct(shapes[0][:2], jnp.float32))
        compiled = with_gradients(fn).lower(*args).compile()
        memory = compiled.memory_analysis()
        assert memory
        return memory.temp_size_in_bytes

    shapes = (2, 2048, 8), (1000, 8)
    logits = 2 * 2048 * 1000 * 4
    assert temporary_bytes(plain, *shapes) > logits
    assert temporary_bytes(chunked(64), *shapes) < logits / 8


def test_targets_of_8_bits(unannotated):
    hidden, _, targets, _ = arrays()
    # More words than 8 bits can count.
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(300, EMBED)), jnp.float32)
    targets = jnp.maximum(targets, 0)
    losses = jax.jit(chunked(8))(hidden, weight, targets.astype(np.int8))
    assert_close([losses], [plain(hidden, weight, targets)])


@pytest.mark.parametrize(
    "hidden, weight, targets",
    [
        # Half of the targets; weights; too few dims.
        ((2, 8, 4), (5, 4), (2, 4)),
        ((2, 8, 4), (4, 5), (2, 8)),
        ((4,), (5, 4), ()),
    ],
)
def test_shapes_that_do_not_fit(hidden, weight, targets, unannotated):
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (hidden, weight)]
    with pytest.raises(ValueError, match=r"give hidden .* weight .* and targets"):
        jax.eval_shape(cross_entropy, *like, jax.ShapeDtypeStruct(targets, jnp.int32))
    with pytest.raises(ValueError, match="chunk=0 must be at least 1"):
        cross_entropy(*arrays()[:3], chunk=0)
