"""Without a GPU: that cuDNN is chosen where it can be, and what is compiled elsewhere.

What is compiled for GPUs is tested in gpu/test_attention.py.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_helpers import assert_close, by_hand, with_gradients
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh, on

from eqxshard import testing
from eqxshard.nn import attention

SEQ = 16


def arrays(dtype, batch=(3,), dim=8):
    rng = np.random.default_rng(0)
    shapes = [(*batch, SEQ, heads, dim) for heads in (4, 2, 2, 4)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def segments():
    found = np.random.default_rng(0).integers(0, 3, (3, SEQ))
    return jnp.asarray(np.sort(found, axis=-1), jnp.int32)


def primitives(fn, *args):
    return str(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types_are_for_cudnn_if_it_is_installed(dtype, cudnn):
    assert "dot_product_attention_fwd" in primitives(attention, *arrays(dtype)[:3])
    # Not if it could not compute it.
    for other in (arrays(jnp.float32), arrays(dtype, dim=12)):
        assert "dot_product_attention_fwd" not in primitives(attention, *other[:3])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_elsewhere_it_is_exact(packed, cudnn):
    args = arrays(jnp.bfloat16)
    fn = ft.partial(attention, causal=True, segments=segments() if packed else None)
    assert "dot_product_attention_fwd" in primitives(fn, *args[:3])
    expected = by_hand(args, causal=True, segments=segments() if packed else None)
    assert_close(with_gradients(fn)(*args), expected, 2**-6)


@pytest.fixture
def like_cudnn(monkeypatch, cudnn, as_scripts_run):
    """Have the CPU compute what cuDNN would, by the same function of JAX."""
    compute = jax.nn.dot_product_attention
    keys = []

    def computed(query, key, value, *, implementation, **options):
        keys.append(key.shape[1])
        return compute(query, key, value, implementation="xla", **options)

    def on_gpus(*arrays, cuda, default):
        return cuda(*arrays)

    monkeypatch.setattr(jax.nn, "dot_product_attention", computed)
    monkeypatch.setattr(jax.lax, "platform_dependent", on_gpus)
    return keys


@pytest.mark.slow
@pytest.mark.parametrize(
    "documents, options",
    [
        ("few", {"causal": True}),
        ("many", {"causal": True}),
        # Also where a document is not in one piece, and attention not causal.
        ("scattered", {}),
        ("few", {"causal": True, "window": 300}),
    ],
)
@pytest.mark.parametrize("how", ["plain", "vmapped", "split"])
def test_long_sequences_of_documents_are_exact(documents, options, how, like_cudnn):
    rng, seq = np.random.default_rng(0), 2100
    count = {"few": 6, "many": seq, "scattered": 3}[documents]
    segments = rng.integers(0, count, (4, seq), np.int32)
    if documents != "scattered":
        segments = np.sort(segments, axis=-1)
    segments = jnp.asarray(segments)
    shapes = [(4, seq, heads, 8) for heads in (4, 2, 2, 4)]
    args = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    expected = by_hand(args, segments=segments, **options)

    def attend(query, key, value):
        attend = ft.partial(attention, **options)
        if how != "vmapped":
            return attend(query, key, value, segments=segments)
        one = [x[:, None] for x in (query, key, value, segments)]
        return jax.vmap(lambda *qkv, s: attend(*qkv, segments=s))(*one[:3], s=one[3])[:, 0]

    if how == "split":
        mesh = make_mesh(data=2, fsdp=2, tensor=2)
        args = jax.device_put(
            args, NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
        )
        program = with_gradients(on(mesh, attend)).lower(*args).compile()
    else:
        program = with_gradients(attend).lower(*args).compile()
    assert_close(program(*args), expected, 2**-6)
    assert testing.collectives(program).ops == ()
    # Of two chunks, and of all three.
    assert {704, 1408, 2112} <= {*like_cudnn}


@pytest.mark.parametrize("jax_version", [None, (0, 10, 1)], ids=["this JAX", "0.10.1"])
def test_inside_per_device_code_it_is_exact(cudnn, monkeypatch, jax_version):
    if jax_version:
        monkeypatch.setattr(jax, "__version_info__", jax_version)
    old = jax.__version_info__ < (0, 10, 2)
    mesh, (query, key, value, _) = make_mesh(stage=2, tensor=2), arrays(jnp.bfloat16, (4,))
    attend = ft.partial(attention, causal=True)
    spec = P("stage")
    staged = jax.shard_map(
        attend, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"stage"}
    )
    uses_cudnn = "dot_product_attention_fwd" in primitives(staged, query, key, value)
    assert uses_cudnn == (not old)
    result = jax.jit(staged)(query, key, value).astype(jnp.float32)
    exact = attend(*(x.astype(jnp.float32) for x in (query, key, value)))
    np.testing.assert_allclose(result, exact, 0, 2**-6)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="needs JAX 0.10.2")
def test_cudnn_has_long_sequences_of_documents_inside_per_device_code(cudnn):
    mesh = make_mesh(stage=2, data=2, tensor=2)
    like = jax.ShapeDtypeStruct((4, 2100, 2, 8), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct(like.shape[:2], jnp.int32)

    def attend(query, key, value, segments):
        return attention(query, key, value, causal=True, segments=segments)

    def loss(*arrays):
        staged = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=P("stage"),
            out_specs=P("stage"),
            axis_names={"stage"},
        )
        return jnp.sum(staged(*arrays).astype(jnp.float32))

    found = primitives(jax.grad(loss, argnums=(0, 1, 2)), like, like, like, segments)
    # In each direction for one, two and all three chunks of keys.
    assert found.count("dot_product_attention_bwd_wrapper") == 3
