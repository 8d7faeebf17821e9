"""Without a GPU: cuDNN is chosen where it can be, and other code is compiled elsewhere.

Programs for GPUs are tested in gpu/test_attention.py.
"""

import functools as ft
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_helpers import assert_close, by_hand, with_gradients
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh, on

import eqxshard
from eqxshard import testing
from eqxshard.nn import _cudnn_call, attention

SEQ = 16
CALL = "__cudnn$fmha"


def arrays(dtype, batch=(3,), dim=8):
    rng = np.random.default_rng(0)
    shapes = [(*batch, SEQ, heads, dim) for heads in (4, 2, 2, 4)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def segments():
    found = np.random.default_rng(0).integers(0, 3, (3, SEQ))
    return jnp.asarray(np.sort(found, axis=-1), jnp.int32)


def primitives(fn, *args):
    return str(jax.make_jaxpr(fn)(*args))


@pytest.fixture
def on_mesh():
    """A mesh in context, of one device, whose axes say what is split."""
    mesh = eqxshard.make_mesh(data=1, devices=jax.devices()[:1])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types_are_for_cudnn_if_it_is_installed(dtype, cudnn, on_mesh):
    assert CALL in primitives(attention, *arrays(dtype)[:3])
    # cuDNN cannot compute these.
    for other in (arrays(jnp.float32), arrays(dtype, dim=12)):
        assert CALL not in primitives(attention, *other[:3])


def test_without_a_mesh_the_call_is_jaxs_own_which_is_split_as_arrays_are(cudnn):
    found = primitives(attention, *arrays(jnp.bfloat16)[:3])
    assert CALL not in found and "dot_product_attention_fwd" in found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_it_is_chosen_on_a_mesh_of_gpus_that_are_not_there(dtype):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    for platform, chosen in ((device, True), (None, False)):
        mesh = AbstractMesh(
            (2, 4), ("data", "tensor"), (AxisType.Auto,) * 2, abstract_device=platform
        )
        with jax.sharding.use_abstract_mesh(mesh):
            assert (CALL in primitives(attention, *arrays(dtype, (2,))[:3])) == chosen
            for other in (arrays(jnp.float32, (2,)), arrays(dtype, (2,), dim=12)):
                assert CALL not in primitives(attention, *other[:3])


def calls_for_gpus(fn, *args):
    """The calls of cuDNN in a function and its gradient: their attributes and types."""

    def loss(*arrays):
        return jnp.sum(fn(*arrays).astype(jnp.float32))

    jitted = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = jitted.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call (@__cudnn\S+)\(.*?\) (\{.*)", text)


@pytest.mark.versions
@pytest.mark.parametrize(
    "options, packed",
    [
        ({}, False),
        ({"causal": True}, False),
        ({"causal": True, "window": 5}, False),
        ({}, True),
        ({"causal": True}, True),
    ],
)
def test_the_calls_are_those_of_jax(options, packed, cudnn, on_mesh, as_scripts_run):
    args = arrays(jnp.bfloat16)[:3]
    of = segments() if packed else None
    ours = ft.partial(attention, segments=of, scale=0.3, **options)
    mask, window = None, options.get("window")
    if packed:
        mask = (segments()[:, :, None] == segments()[:, None, :])[:, None]
    theirs = ft.partial(
        jax.nn.dot_product_attention,
        mask=mask,
        is_causal=options.get("causal", False),
        scale=0.3,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    found = calls_for_gpus(ours, *args)
    assert len(found) == 2 and found == calls_for_gpus(theirs, *args)


@pytest.mark.versions
@pytest.mark.parametrize("packed", [False, True])
def test_their_operands_are_in_the_order_of_jax(packed, cudnn, as_scripts_run):
    """Several have the same type, so their types do not tell them apart."""
    *args, grad = arrays(jnp.bfloat16)
    mask = [segments()[:, :, None] == segments()[:, None, :]] if packed else []

    def ours(query, key, value, *mask):
        options = _cudnn_call.Options(causal=True, window=None, scale=0.3)
        return _cudnn_call.attend(options, query, key, value, mask[0] if mask else None)

    def theirs(query, key, value, *mask):
        options = {"mask": mask[0][:, None]} if mask else {}
        attend = ft.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return attend(query, key, value, is_causal=True, scale=0.3, **options)

    def operands(fn):
        def both(query, key, value, grad, *mask):
            attend = lambda *qkv: fn(*qkv, *mask)  # noqa: E731
            out, back = jax.vjp(attend, query, key, value)
            return out, back(grad)

        lowered = (
            jax.jit(both).trace(*args, grad, *mask).lower(lowering_platforms=("cuda",))
        )
        # The numbers of other values depend on the rest of the program.
        text = re.sub(r"%\d+", "%", lowered.as_text())
        return re.findall(r"custom_call (@__cudnn.*?)\((.*?)\)", text)

    bias = ["%"] if packed else []
    *qkv, given = ("%arg0", "%arg1", "%arg2", "%arg3")
    found = operands(ours)
    assert found == operands(theirs)
    assert [used.split(", ") for _, used in found] == [
        [*qkv, *bias],
        [*qkv, "%#1", given, *bias, "%"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_elsewhere_it_is_exact(packed, cudnn, on_mesh):
    args = arrays(jnp.bfloat16)
    fn = ft.partial(attention, causal=True, segments=segments() if packed else None)
    assert CALL in primitives(fn, *args[:3])
    expected = by_hand(args, causal=True, segments=segments() if packed else None)
    assert_close(with_gradients(fn)(*args), expected, 2**-6)


@pytest.fixture
def like_cudnn(monkeypatch, cudnn, as_scripts_run):
    """Have the CPU compute what cuDNN would, by the same function of JAX."""
    keys = []

    def computed(options, query, key, value, mask):
        keys.append(key.shape[1])
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask[:, None],
            is_causal=options.causal,
            scale=options.scale,
            implementation="xla",
        )

    def on_gpus(*arrays, cuda, default):
        return cuda(*arrays)

    monkeypatch.setattr("eqxshard.nn._cudnn._dot_product", computed)
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
    assert testing.collectives(program) == ()
    # Keys of one, of two and of all three chunks.
    assert {704, 1408, 2112} <= {*like_cudnn}


def test_inside_per_device_code_it_is_exact(cudnn):
    mesh, (query, key, value, _) = make_mesh(stage=2, tensor=2), arrays(jnp.bfloat16, (4,))
    attend = ft.partial(attention, causal=True)
    spec = P("stage")
    staged = jax.shard_map(
        attend, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"stage"}
    )
    assert CALL in primitives(staged, query, key, value)
    result = jax.jit(staged)(query, key, value).astype(jnp.float32)
    exact = attend(*(x.astype(jnp.float32) for x in (query, key, value)))
    np.testing.assert_allclose(result, exact, 0, 2**-6)


@pytest.mark.slow
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
    assert found.count("SoftmaxBackward") == 3
