"""Attention, compiled for GPUs that are not there."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard import nn, testing
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._costs import count_flops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cudnn")]

BATCH, SEQ, HEADS, DIM = 8, 1024, 8, 64


def compile_layers(devices, sizes, *, packed=False, window=None, seq=SEQ, remat="none"):
    """Two layers of attention, forward and backward."""
    mesh = eqxshard.make_mesh(**sizes, devices=devices)
    rows = ("data", "fsdp")

    def array(dtype, spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    heads = P(rows, None, "tensor")
    query = array(jnp.bfloat16, heads, BATCH, seq, HEADS, DIM)
    key = array(jnp.bfloat16, heads, BATCH, seq, HEADS // 2, DIM)
    segments = array(jnp.int32, P(rows), BATCH, seq) if packed else None

    def loss(query, key, value, segments):
        def layer(x, _):
            options = dict(causal=True, window=window, segments=segments)
            return 2 * nn.attention(x, key, value, **options), None

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if remat != "none":
                policy = jax.checkpoint_policies.save_only_these_names("attention")
                layer = jax.checkpoint(layer, policy=policy if remat == "dots" else None)
            out, _ = jax.lax.scan(layer, query, None, length=2)
            return jnp.sum(out.astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return gradient.lower(query, key, key, segments).compile()


def calls(compiled):
    """The numbers of cuDNN's calls forward and backward, and the shapes of queries."""
    found = re.findall(
        r"= \(bf16(\[[\d,]+\]).*custom_call_target=\"__cudnn\$fmha(\w*)",
        compiled.as_text() or "",
    )
    backward = sum(name.endswith("Backward") for _, name in found)
    return len(found) - backward, backward, {shape for shape, _ in found}


@pytest.mark.versions
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_cudnn_computes_each_device_s_rows_and_heads(gpus, packed):
    sizes, rows, heads = {"data": 2, "fsdp": 2, "tensor": 2}, 2, 4
    compiled = compile_layers(gpus, sizes, packed=packed)
    assert calls(compiled) == (1, 1, {f"[{rows},{heads},{SEQ},{DIM}]"})
    assert testing.collectives(compiled).times == {}
    # No array has an element for each pair of positions, as residuals elsewhere have,
    # except for a mask that all heads share.
    squares = re.findall(rf"\w+\[([\d,]*){SEQ},{SEQ}\]", compiled.as_text() or "")
    assert set(squares) <= ({f"{rows},1,", f"{rows},"} if packed else set())


def test_a_policy_keeps_what_cudnn_needs_to_go_backward(gpus):
    for remat, forward in (("none", 1), ("dots", 1), ("full", 2)):
        assert calls(compile_layers(gpus[:1], {"data": 1}, remat=remat))[0] == forward


@pytest.mark.versions
def test_memory_of_packed_documents_grows_with_the_sequence(gpus):
    sizes, temporary = {"data": 2, "fsdp": 2, "tensor": 2}, []
    for seq in (4096, 8192, 16384):
        compiled = compile_layers(gpus, sizes, packed=True, seq=seq)
        memory = compiled.memory_analysis()
        temporary.append(memory.temp_size_in_bytes if memory else 0)
        assert calls(compiled)[0] > 0
        assert testing.collectives(compiled).times == {}
        assert not re.search(rf"\w\[[\d,]*{seq},{seq}\]", compiled.as_text() or "")
    # Each token adds the same memory.
    first, second = temporary[1] - temporary[0], temporary[2] - temporary[1]
    assert second == pytest.approx(2 * first, rel=0.05)


def test_cudnn_has_windows(gpus):
    compiled = compile_layers(gpus[:1], {"data": 1}, window=256)
    assert calls(compiled)[:2] == (1, 1)
    text = compiled.as_text() or ""
    assert set(re.findall(r'"sliding_window_length":(\d+)', text.replace(" ", ""))) == {
        "256"
    }


def test_causal_rings_compute_half_of_the_blocks(gpus):
    def work(causal):
        mesh = eqxshard.make_mesh(data=1, context=8, devices=gpus)
        sharding = NamedSharding(mesh, P(None, "context"))
        like = jax.ShapeDtypeStruct((1, 32768, 4, 128), jnp.bfloat16, sharding=sharding)

        def loss(query, key, value):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                out = nn.attention(query, key, value, causal=causal)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        compiled = gradient.lower(like, like, like).compile()
        flops = sum(count_flops(parse_module(compiled.as_text() or "")).values())
        ops = testing.collectives(compiled)
        assert {op.kind for op in ops} == {"collective-permute"}
        return flops, sum(op.bytes * (op.times or 0) for op in ops)

    (half, sent), (whole, around) = work(True), work(False)
    assert half < 0.55 * whole
    # Halves of four arrays and of two gradients are exchanged.
    assert sent < 1.06 * around


@pytest.mark.parametrize(
    "names, rows, context",
    [
        # A step of the user's own, without a mesh in context, or with other names.
        (("data", "tensor"), "data", False),
        (("dp", "tp"), "dp", True),
    ],
)
def test_without_names_that_say_it_attention_is_split_as_its_arrays_are(
    gpus, names, rows, context
):
    mesh = jax.sharding.Mesh(np.array(gpus).reshape(4, 2), names)
    split = NamedSharding(mesh, P(rows, None, names[1]))
    query = jax.ShapeDtypeStruct((8, 256, 8, DIM), jnp.bfloat16, sharding=split)

    def gradient(query):
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
            if context
            else contextlib.nullcontext()
        ):
            loss = lambda x: jnp.sum(nn.attention(x, x, x, causal=True) ** 2)  # noqa: E731
            return jax.grad(loss)(query)

    compiled = jax.jit(gradient).lower(query).compile()
    assert calls(compiled) == (1, 1, {"[2,4,256,64]"})
    assert testing.collectives(compiled).times == {}


def test_rows_that_divide_over_some_axes_of_the_batch_are_split_over_these(gpus):
    mesh = eqxshard.make_mesh(data=2, fsdp=4, devices=gpus)
    rows = NamedSharding(mesh, P("data"))
    query = jax.ShapeDtypeStruct((4, 256, 8, DIM), jnp.bfloat16, sharding=rows)

    def attend(query):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return nn.attention(query, query, query, causal=True)

    compiled = jax.jit(attend).lower(query).compile()
    assert calls(compiled) == (1, 0, {"[2,8,256,64]"})
    assert testing.collectives(compiled).times == {}


def test_the_gradient_of_a_key_that_all_devices_share_is_summed(gpus):
    mesh = eqxshard.make_mesh(data=8, devices=gpus)
    query, key = (
        jax.ShapeDtypeStruct(
            (8, 256, 8, DIM), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        )
        for spec in (P("data"), P())
    )

    def loss(query, key):
        out = jax.shard_map(
            lambda query, key: nn.attention(query, key, key, causal=True),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
        )(query, jnp.broadcast_to(key[:1], (1, *key.shape[1:])))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(query, key).compile()
    assert "all-reduce" in testing.collectives(compiled).times
