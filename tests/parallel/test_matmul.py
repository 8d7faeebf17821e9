import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_helpers import make_mesh, on

from eqxshard import testing
from eqxshard.parallel import all_gather_matmul, matmul_reduce_scatter

ROWS, SEQ, EMBED, MLP_WIDTH = 4, 16, 8, 32
#: Of the activations, the weights and the result of `mlp`.
SPECS = (P(("data", "fsdp"), "tensor"), P(None, "tensor"), P("tensor"))


@ft.cache
def random(dtype=jnp.float32):
    """Activations, two weights, and the gradient of the result."""
    shapes = ((ROWS, SEQ, EMBED), (EMBED, MLP_WIDTH), (MLP_WIDTH, EMBED))
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), dtype) for s in (*shapes, shapes[0])]


def mlp(x, up, down):
    """Of one example: rows split over `tensor`, then columns, then rows."""
    return matmul_reduce_scatter(jnp.tanh(all_gather_matmul(x, up)), down)


def plain(x, up, down):
    return jnp.tanh(x @ up) @ down


def with_gradients(fn):
    """The output for a batch, and the gradients of its product with another array."""

    def call(x, up, down, grad):
        out, back = jax.vjp(jax.vmap(fn, (0, None, None)), x, up, down)
        return out, *back(grad)

    return call


@ft.cache
def compiled(dtype=jnp.float32, **sizes):
    """The output and gradients of `mlp` on a mesh, and the program that computes them."""
    mesh = make_mesh(**sizes)
    shardings = [NamedSharding(mesh, spec) for spec in (*SPECS, SPECS[0])]
    args = jax.device_put(random(dtype), shardings)
    program = jax.jit(on(mesh, with_gradients(mlp))).lower(*args).compile()
    return program, program(*args)


def assert_close(results, expected, tolerance=1e-6):
    for result, reference in zip(results, expected, strict=True):
        reference = np.asarray(reference, np.float32)
        atol = tolerance * np.abs(reference).max()
        np.testing.assert_allclose(np.asarray(result, np.float32), reference, 0, atol)


MESHES = [
    dict(data=2, tensor=4),
    pytest.param(dict(data=2, fsdp=2, tensor=2), marks=pytest.mark.slow),
    pytest.param(dict(tensor=2), marks=pytest.mark.slow),
    pytest.param(dict(tensor=8), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sizes", MESHES)
def test_values_and_gradients_equal_plain_products(sizes):
    _, results = compiled(**sizes)
    assert_close(results, with_gradients(plain)(*random()))
    # They come out split as they went in.
    for result, spec in zip(results, (SPECS[0], *SPECS)):
        mesh = make_mesh(**sizes)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)


@pytest.mark.parametrize("sizes", MESHES)
def test_collectives(sizes):
    program, _ = compiled(**sizes)
    found, n = testing.collectives(program), sizes["tensor"]
    batch = math.prod(sizes.values()) // n
    sent = [op for op in found.ops if op.kind == "collective-permute"]
    # Blocks of rows: n - 1 times for each product, and for its gradient.
    assert [op.shapes for op in sent] == [(f"f32[{ROWS // batch},{SEQ // n},{EMBED}]",)] * (
        4 * (n - 1)
    )
    # The gradients of the weights, once, over the axes of the batch.
    summed = sorted(s for op in found.ops if op.kind == "all-reduce" for s in op.shapes)
    width = MLP_WIDTH // n
    weights = [f"f32[{EMBED},{width}]", f"f32[{width},{EMBED}]"]
    assert summed == (sorted(weights) if batch > 1 else [])
    assert found.counts.keys() <= {"collective-permute", "all-reduce"}


@pytest.mark.slow
def test_bfloat16():
    _, results = compiled(jnp.bfloat16, data=2, tensor=4)
    assert {result.dtype for result in results} == {jnp.dtype(jnp.bfloat16)}
    exact = [np.asarray(x, np.float64) for x in random(jnp.bfloat16)]
    with jax.enable_x64():
        expected = with_gradients(plain)(*map(jnp.asarray, exact))
    assert_close(results, expected, 0.02)


def test_without_tensor_parallelism_they_are_plain_products():
    x, up, down, _ = random()
    expected = plain(x, up, down)
    for mesh in (None, make_mesh(data=2)):
        run = on(mesh, mlp)
        assert "shard_map" not in str(jax.make_jaxpr(run)(x, up, down))
        np.testing.assert_array_equal(run(x, up, down), expected)


def test_in_per_device_code():
    mesh = make_mesh(data=2, tensor=2)

    def loss(x, up, down):
        return jnp.sum(jnp.sin(mlp(x, up, down)), keepdims=True)

    in_specs = (P("data", "tensor"), *SPECS[1:])
    mapped = jax.shard_map(
        loss, mesh=mesh, in_specs=in_specs, out_specs=P(("data", "tensor"))
    )

    def total(*args):
        return jnp.sum(mapped(*args))

    def expected(*args):
        return jnp.sum(jnp.sin(plain(*args)))

    x, up, down, _ = random()
    args = x, up, down
    grads = jax.jit(jax.grad(total, (0, 1, 2)))(*args)
    assert_close(grads, jax.grad(expected, (0, 1, 2))(*args), 2e-6)


@pytest.mark.parametrize("fn", [all_gather_matmul, matmul_reduce_scatter])
@pytest.mark.parametrize(
    "dtypes", [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)]
)
def test_different_types_give_what_they_give_without_a_mesh(fn, dtypes, as_scripts_run):
    primals = tuple(a.astype(d) for a, d in zip(random()[:2], dtypes))
    args = primals, tuple(map(jnp.cos, primals))
    with_tangents, mesh = ft.partial(jax.jvp, fn), make_mesh(tensor=4)
    expected = jax.jit(with_tangents)(*args)
    placed = jax.device_put(args, NamedSharding(mesh, P()))
    results = jax.jit(on(mesh, with_tangents))(*placed)
    for result, array in zip(results, expected):
        assert result.dtype == array.dtype == jnp.float32
    assert_close(results, expected)


# Mistakes


@pytest.mark.parametrize("fn", [all_gather_matmul, matmul_reduce_scatter])
@pytest.mark.parametrize(
    "x, weight, axis, says",
    [
        (
            (16, 8),
            (32, 8),
            "tensor",
            r"x has the shape \(16, 8\) and weight \(32, 8\); give",
        ),
        ((8,), (8, 32), "tensor", r"x has the shape \(8,\)"),
        (
            (2, 30, 8),
            (8, 32),
            "tensor",
            "the 30 rows of x do not divide over tensor=4; use",
        ),
        ((2, 32, 6), (6, 6), "tensor", "the 6 columns of .* do not divide over tensor=4"),
        ((16, 8), (8, 32), "tensr", "names the axis 'tensr', .* did you mean 'tensor'"),
    ],
)
def test_shapes_that_do_not_fit(unannotated, fn, x, weight, axis, says):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, weight)]
    call = on(make_mesh(tensor=4), ft.partial(fn, axis=axis))
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(call, *arrays)
