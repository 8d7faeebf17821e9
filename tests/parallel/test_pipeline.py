import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grades import graded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import (
    KEY,
    ROWS,
    UNOPTIMISED,
    WIDTH,
    Apply,
    expected,
    losses_of,
    make_batch,
    make_mesh,
    make_model,
    mean_loss,
    on,
    pipelined,
    relative,
    trace,
)

from eqxshard import testing
from eqxshard.parallel import pipeline
from eqxshard.sharding import batch_sharding

# The same on every mesh


def test_without_a_mesh_layers_are_applied_in_turn():
    model, batch = eqx.nn.inference_mode(make_model()), make_batch()

    def by_hand(model):
        arrays, static = eqx.partition(model.layers, eqx.is_array)

        def apply(h, layer):
            return jax.vmap(eqx.combine(layer, static))(h, batch["places"]), None

        h, _ = jax.lax.scan(apply, jax.vmap(model.embed)(batch["x"]), arrays)
        losses = jnp.sum((jax.vmap(model.head)(h) - batch["y"]) ** 2, axis=-1)
        return jnp.sum(losses * batch["__weight__"]) / jnp.sum(batch["__weight__"])

    def pipelined(model):
        return mean_loss(model, batch, None, 4)

    fns = by_hand, pipelined
    grads = eqx.filter_jit(lambda model: [eqx.filter_value_and_grad(f)(model) for f in fns])
    expected, found = grads(model)
    assert relative(found, expected) < 1e-6


QUICK: list[tuple] = [(4, dict(stage=4, data=2))]
#: Fewer microbatches than stages.
SLOW: list[tuple] = [(4, dict(stage=8))]
MORE: list[tuple] = [
    (4, dict(stage=1)),
    (8, dict(stage=2)),
    (4, dict(stage=4)),
    (8, dict(stage=8)),
    (4, dict(stage=2, data=2)),
    (8, dict(stage=4, data=2)),
    (8, dict(stage=2, data=2, fsdp=2)),
]


@pytest.mark.versions
@pytest.mark.parametrize("microbatches, sizes", graded([*QUICK, *SLOW, *MORE], QUICK, SLOW))
def test_loss_and_gradients_equal_one_device(microbatches, sizes):
    _, result = pipelined(microbatches, **sizes)
    assert relative(result, expected()) < 1e-6


@pytest.mark.parametrize("microbatches, sizes", QUICK)
def test_collectives(microbatches, sizes):
    compiled, _ = pipelined(microbatches, **sizes)
    stages, data = sizes["stage"], sizes["data"]
    found = testing.collectives(compiled)
    # The activations of a microbatch, once for each tick forward and each tick backward.
    sent = [op for op in found if op.kind == "collective-permute"]
    for op in sent:
        assert op.shapes == (f"f32[{ROWS // data // microbatches},{WIDTH}]",)
    assert [op.times for op in sent] == [microbatches + stages - 1] * 2
    # Weights stay where they are. Activations and gradients are summed once, at the end.
    assert found.counts.keys() == {"collective-permute", "all-reduce"}
    assert all(op.times == 1 for op in found if op.kind == "all-reduce")


class Draw(eqx.Module):
    """A layer that draws a number from its key, and writes it to its own entry."""

    entry: jax.Array

    def __call__(self, h, key):
        return h + jnp.where(self.entry, jax.random.uniform(key), 0)


def test_each_layer_and_example_has_its_own_key_on_any_mesh():
    layers, x, key = Draw(jnp.eye(4, dtype=bool)), jnp.zeros((16, 4)), jax.random.key(0)

    def drawn(mesh, microbatches):
        placed = x if mesh is None else jax.device_put(x, batch_sharding(mesh))
        draw = ft.partial(pipeline, microbatches=microbatches, key=key)
        return np.asarray(jax.jit(on(mesh, lambda x: draw(layers, x)))(placed))

    values = drawn(None, 1)
    assert len(np.unique(values)) == values.size
    np.testing.assert_array_equal(drawn(make_mesh(stage=2, data=2), 4), values)


def test_layers_may_use_collectives_along_other_axes():
    # If stages did different things at a time, their layers' messages would get mixed up.
    def ring(h):
        size = jax.lax.axis_size("context")
        ahead = [(i, (i + 1) % size) for i in range(size)]
        return jax.lax.ppermute(h, "context", ahead)

    def on_ring(scale, h):
        spec = P("context")
        send = jax.shard_map(ring, in_specs=spec, out_specs=spec, axis_names={"context"})
        return jnp.sin(scale * h + send(h))

    def rolled(scale, h):
        return jnp.sin(scale * h + jnp.roll(h, 2))

    def grad(fn, mesh):
        def loss(scales, x):
            return jnp.mean(pipeline(Apply(scales, fn), x, microbatches=4) ** 2)

        scales, x = jnp.linspace(1, 2, 4), jax.random.normal(KEY, (8, 8))
        if mesh is not None:
            scales = jax.device_put(scales, NamedSharding(mesh, P("stage")))
            x = jax.device_put(x, batch_sharding(mesh))
        return jax.jit(jax.value_and_grad(on(mesh, loss), (0, 1)))(scales, x)

    mesh = make_mesh(stage=2, context=4)
    assert relative(grad(on_ring, mesh), grad(rolled, None)) < 1e-6


# Ticks and memory


def temporary_bytes(rows, microbatches, width=64, layers=16):
    """The temporary memory of gradients on 4 stages."""

    def struct(spec, *shape):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    mesh = make_mesh(stage=4)
    param = struct(P("stage"), layers, width, width)
    stack: Any = Apply(param, lambda weight, h: jax.nn.gelu(weight @ h))  # pyright: ignore
    x = struct(P(("data", "fsdp")), rows, width)

    def loss(stack, x):
        return jnp.mean(pipeline(stack, x, microbatches=microbatches))

    grad = jax.jit(jax.grad(on(mesh, loss), (0, 1)))
    memory = grad.lower(stack, x).compile(UNOPTIMISED).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_per_microbatch():
    """Its growth with each additional microbatch, in units of their activations."""
    few, many = (temporary_bytes(16 * n, n) for n in (4, 16))
    growth = (many - few) / 12 / (16 * 64 * 4)
    # The input of each of a stage's 4 layers, the input and output of each tick, and
    # their gradient.
    assert 5 <= growth <= 8


# Mistakes


X = jnp.ones((8, 4))
SCALE = Apply(jnp.ones(2), lambda scale, h: scale * h)


def sized(rows=ROWS, microbatches=4):
    batch = jax.tree.map(jnp.asarray, make_batch(rows))
    return losses_of(make_model(), batch, KEY, microbatches)


def of_layers(fn):
    return pipeline(Apply(jnp.ones(2), fn), X, microbatches=2)


#: A word of the error, the call, and the mesh.
MISTAKES: dict[str, tuple[Any, dict[str, int]]] = {
    "8 layers do not divide over stage=3; use a mu": (sized, dict(stage=3)),
    "a batch of 24 .* 4 devices, .* use a multiple of 16 examples, or fewer microbatches": (
        ft.partial(sized, rows=24),
        dict(stage=2, data=2, fsdp=2),
    ),
    "microbatches=0 must be at least 1": (ft.partial(sized, microbatches=0), {}),
    r"a layer takes float32\[4\] .* returns bfloat16\[4\]; have it": (
        lambda: of_layers(lambda scale, h: h.astype(jnp.bfloat16)),
        dict(stage=2),
    ),
    r"a layer takes float32\[4\] .* returns a tuple": (
        lambda: of_layers(lambda scale, h: (h, h)),
        {},
    ),
    r"args.1.segments has the shape \(4,\) for a batch of 8; give it one entry": (
        lambda: pipeline(SCALE, X, None, {"segments": np.ones(4)}, microbatches=1),
        {},
    ),
}


@pytest.mark.parametrize("says", MISTAKES)
def test_mistakes(says):
    call, sizes = MISTAKES[says]
    make_model()  # Outside of the mesh, since all tests share it.
    with pytest.raises(ValueError, match=says):
        trace(call, **sizes)


def test_with_one_stage_there_are_no_microbatches():
    make_model()
    trace(lambda: sized(rows=7), stage=1)
