import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_helpers import assert_close, by_hand, plain, with_gradients
from grades import graded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh, on

from eqxshard import testing
from eqxshard.nn import attention

SPLIT = P(("data", "fsdp"), "context", "tensor")


@ft.cache
def random(seq, kv_heads, heads=4, keys=None):
    """Query, key, value, a cotangent of the output, and segments with padding."""
    rng, keys = np.random.default_rng(0), seq if keys is None else keys
    shapes = [(2, seq, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays.append(rng.normal(size=shapes[0]).astype(np.float32))
    # Padding on the left of one, on the right of the other.
    segments = np.sort(rng.integers(0, 4, (2, seq)), axis=-1)
    segments[1] = (segments[1] + 1) % 4
    return [*map(jnp.asarray, arrays), jnp.asarray(segments, jnp.int32)]


# At once, and in chunks of which the last is not full.
@pytest.mark.versions
@pytest.mark.parametrize(
    "seq, causal, packed, kv_heads",
    graded(
        [
            (20, False, True, 4),
            (20, True, False, 2),
            (530, False, True, 4),
            (530, True, True, 2),
        ],
        [(20, True, False, 2), (530, True, True, 2)],
        [(20, False, True, 4), (530, False, True, 4)],
    ),
)
def test_equals_attention_by_hand(seq, causal, packed, kv_heads):
    *arrays, segments = random(seq, kv_heads)
    options = dict(causal=causal, segments=segments if packed else None)
    results = with_gradients(ft.partial(attention, **options))(*arrays)
    assert_close(results, by_hand(arrays, **options))


@pytest.mark.parametrize(
    "seq, packed", graded([(20, True), (530, False)], [(20, True)], [(530, False)])
)
@pytest.mark.parametrize("window", [1, 7, 19])
def test_a_window(seq, packed, window):
    *arrays, segments = random(seq, 2)
    options = dict(causal=True, window=window, segments=segments if packed else None)
    results = with_gradients(ft.partial(attention, **options))(*arrays)
    assert_close(results, by_hand(arrays, **options))


def test_under_vmap_scan_and_checkpoint():
    *arrays, segments = random(20, 2)

    def one(q, k, v, segments):
        batch = [x[None] for x in (q, k, v)]
        return attention(*batch, causal=True, segments=segments[None])[0]

    def repeated(fn):
        @jax.checkpoint
        def body(q, _, k, v):
            return fn(q, k, v), None

        def call(q, k, v):
            return jax.lax.scan(lambda q, _: body(q, _, k, v), q, None, length=2)[0]

        return with_gradients(call)

    def vmapped(q, k, v):
        return jax.vmap(one)(q, k, v, segments)

    expected = repeated(ft.partial(plain, causal=True, segments=segments))(*arrays)
    assert_close(repeated(vmapped)(*arrays), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 4, "tensor": 2}, {"fsdp": 2, "tensor": 2}])
def test_on_meshes(sizes):
    mesh, (*arrays, segments) = make_mesh(**sizes), random(24, 2)
    expected = by_hand(arrays, causal=True, segments=segments)
    arrays = jax.device_put(arrays, NamedSharding(mesh, SPLIT))
    segments = jax.device_put(segments, NamedSharding(mesh, P(*SPLIT[:2])))

    def attend(q, k, v):
        return on(mesh, ft.partial(attention, causal=True, segments=segments))(q, k, v)

    program = with_gradients(attend).lower(*arrays).compile()
    results = program(*arrays)
    assert_close(results, expected)
    for result in results:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, SPLIT), 4)
    kinds = set(testing.collectives(program).times)
    assert kinds == ({"collective-permute"} if "context" in sizes else set())


@pytest.mark.parametrize("window", graded([None, 5], [5], [None]))
@pytest.mark.parametrize("seq, offset", [(1, 13), (3, 0), (530, 40)])
def test_with_an_offset_among_the_keys(seq, offset, window):
    *arrays, _ = random(seq, 2, keys=600)
    expected = plain(*arrays[:3], causal=True, offset=offset, window=window)
    attend = jax.jit(ft.partial(attention, causal=True, window=window))
    results = [attend(*arrays[:3], offset=jnp.asarray(offset))]
    assert_close(results, [expected])
    # Later keys and values do not matter.
    q, k, v = arrays[:3]
    late = jnp.arange(600)[:, None, None] >= seq + offset
    k, v = jnp.where(late, 7.0, k), jnp.where(late, 1e30, v)
    np.testing.assert_array_equal(attend(q, k, v, offset=offset), results[0])


def test_to_other_keys_and_scale():
    *arrays, _ = random(20, 2, keys=30)
    results = with_gradients(ft.partial(attention, scale=0.7))(*arrays)
    assert_close(results, by_hand(arrays, scale=0.7))


def test_bfloat16_has_its_softmax_in_float32():
    *arrays, segments = random(200, 2)
    narrow = [x.astype(jnp.bfloat16) for x in arrays]
    options = dict(causal=True, segments=segments)
    results = with_gradients(ft.partial(attention, **options))(*narrow)
    assert {x.dtype for x in results} == {jnp.dtype(jnp.bfloat16)}
    assert_close(results, by_hand(narrow, **options), 2**-6)


@pytest.mark.parametrize("seq", [20, 530])
def test_a_policy_keeps_the_output(seq):
    *arrays, _ = random(seq, 4)

    def kept(policy):
        attend = ft.partial(attention, causal=True)
        fn = jax.checkpoint(lambda *args: attend(*args) ** 2, policy=policy)
        residuals = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *arrays[:3])
        return len(jax.tree.leaves(residuals))

    names = jax.checkpoint_policies.save_only_these_names
    assert kept(names("attention")) > kept(names("other"))


SAME = [(2, 8, 4, 8)] * 3
SHORT = [(2, 4, 4, 8), (2, 8, 4, 8), (2, 8, 4, 8)]
SEGMENTS = jnp.zeros((2, 8), jnp.int32)


@pytest.mark.parametrize(
    "shapes, options, words",
    [
        (SHORT, {"causal": True}, "give the offset of the first query"),
        (SHORT, {"offset": 4}, "set causal=True"),
        (SAME, {"window": 4}, "window=4 with causal=False; give .* causal=True"),
        (SAME, {"window": 0, "causal": True}, "give a window of at least 1"),
        (SAME, {"causal": True, "offset": 0, "segments": SEGMENTS}, "leave out segments"),
        (SAME, {"segments": SEGMENTS[:, :7]}, r"segments have the shape \(2, 7\)"),
        (SAME, {"axis": "contxt"}, "did you mean 'context'"),
        ([(8, 4, 8)] * 3, {}, r"give it the dims \(batch, seq, heads, head_dim\)"),
        # Heads, those of value, the batch.
        ([(8, 4, 8), (8, 3, 8), (8, 3, 8)], {}, "have the shapes .*; give query"),
        ([(2, 8, 4, 8), (2, 8, 4, 8), (2, 8, 2, 8)], {}, "have the shapes .*; give query"),
        ([(2, 8, 4, 8), (3, 8, 4, 8), (3, 8, 4, 8)], {}, "have the shapes .*; give query"),
    ],
)
def test_mistakes(shapes, options, words, unannotated):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    mesh = make_mesh(data=2).abstract_mesh
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=words):
        jax.eval_shape(ft.partial(attention, **options), *arrays)
