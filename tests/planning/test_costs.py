import functools

import jax
import jax.numpy as jnp
import pytest

from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._costs import Costs, count_flops

A = jax.ShapeDtypeStruct((8, 32), jnp.float32)
B = jax.ShapeDtypeStruct((32, 16), jnp.float32)


def total_flops(fn, *args):
    return count_flops(parse_module(jax.jit(fn).lower(*args).compile().as_text() or ""))


def test_products_of_matrices():
    assert total_flops(jnp.matmul, A, B) == {"float32": 2 * 8 * 32 * 16}
    x = jax.ShapeDtypeStruct((3, 8, 32), jnp.float32)
    assert total_flops(lambda x, b: x @ b, x, B) == {"float32": 3 * 2 * 8 * 32 * 16}
    assert total_flops(lambda x: jnp.tanh(x) + x, A) == {}


def test_what_is_computed_again_is_not_of_the_model():
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    weights = jax.ShapeDtypeStruct((3, 32, 32), jnp.float32)
    step = jax.jit(jax.value_and_grad(loss)).lower(weights, A).compile()
    module = parse_module(step.as_text() or "")
    # Forward, the gradients of both factors, and forward again.
    assert count_flops(module, again=False) == {"float32": 3 * 3 * 2 * 8 * 32 * 32}
    assert count_flops(module) == {"float32": 3 * 4 * 2 * 8 * 32 * 32}


AGAIN = """
%fused (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %y = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %a = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused
  ROOT %a.remat2 = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused
}
"""


def test_a_product_that_xla_computes_again_is_not_of_the_model():
    module = parse_module(AGAIN)
    assert count_flops(module) == {"float32": 2 * 2 * 8**3}
    assert count_flops(module, again=False) == {"float32": 2 * 8**3}


def test_a_convolution():
    def convolve(x, kernel):
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    x = jax.ShapeDtypeStruct((2, 3, 10, 10), jnp.float32)
    kernel = jax.ShapeDtypeStruct((4, 3, 5, 5), jnp.float32)
    assert total_flops(convolve, x, kernel) == {"float32": 2 * 2 * 4 * 100 * 3 * 25}


@pytest.mark.parametrize(
    "target, operands, result",
    [
        ("BiasActivationForward", "x, kernel", "y"),
        ("BackwardFilter", "x, y", "kernel"),
        ("BackwardInput", "y, kernel", "x"),
    ],
)
def test_a_convolution_by_cudnn_and_its_gradients(target, operands, result):
    shapes = {
        "x": "f32[256,13,13,20]{3,2,1,0}",
        "kernel": "f32[50,5,5,20]{3,2,1,0}",
        "y": "f32[256,9,9,50]{3,2,1,0}",
    }
    names = operands.split(", ")
    lines = [f"  %{x} = {shapes[x]} parameter({i})" for i, x in enumerate(names)]
    text = "\n".join(
        [
            "ENTRY %main () -> f32[] {",
            *lines,
            f"  ROOT %out = ({shapes[result]}, u8[0]{{0}}) custom-call(%{names[0]}, "
            f"%{names[1]}), window={{size=5x5}}, dim_labels=b01f_o01i->b01f, "
            f'custom_call_target="__cudnn$conv{target}"',
            "}",
        ]
    )
    module = parse_module(text)
    flops = Costs(module).flops(module.computations["main"][-1])
    assert flops == {"float32": 2 * (256 * 9 * 9 * 50) * (5 * 5 * 20)}


# Backward, the scores are computed again.
@pytest.mark.parametrize("backward, products, own", [("", 2, 2), ("Backward", 5, 4)])
def test_attention_by_cudnn(backward, products, own):
    line = (
        "%out = (bf16[2,4,64,16]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), "
        f'custom_call_target="__cudnn$fmhaSoftmax{backward}", backend_config='
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": '
        '"BF16", "dimensions": ["2", "4", "64", "64"]}, "mask_type": "MASK"}}'
    )
    # Of 64 keys, a row sees 32 on average, and through a window of 8 not quite 8.
    windowed = 'CAUSAL", "sliding_window_length": "8'
    for mask, keys in (("NO_MASK", 64), ("CAUSAL", 32), (windowed, 7.5)):
        text = (
            "ENTRY %main (q: bf16[2,64,4,16]) -> bf16[2,4,64,16] {\n"
            "  %q = bf16[2,64,4,16]{3,2,1,0} parameter(0)\n"
            f"  ROOT {line.replace('MASK', mask)}\n}}\n"
        )
        module = parse_module(text)
        flops = Costs(module).flops(module.computations["main"][-1])
        each = 2 * 2 * 4 * 64 * keys * 16
        assert flops == {"bfloat16": products * each}
        assert count_flops(module, again=False) == {"bfloat16": own * each}


LOOP = """
%fused (p0: f32[4,100], p1: s32[]) -> f32[1,100] {
  %p0 = f32[4,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %view = f32[4,100]{1,0} bitcast(%p0)
  ROOT %part = f32[1,100]{1,0} dynamic-slice(%view, %p1, %zero), dynamic_slice_sizes={1,100}
}

%update (p0: f32[4,100], p1: f32[1,100], p2: s32[]) -> f32[4,100] {
  %p0 = f32[4,100]{1,0} parameter(0)
  %p1 = f32[1,100]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %all = f32[4,100]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

ENTRY %main (x: f32[4,100], i: s32[]) -> f32[4,100] {
  %x = f32[4,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %read = f32[1,100]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused
  %sum = f32[4,100]{1,0} add(%x, %x)
  ROOT %write = f32[4,100]{1,0} fusion(%x, %read, %i), kind=kLoop, calls=%update
}
"""


def test_of_a_stack_of_layers_only_one_is_read_and_written():
    module = parse_module(LOOP)
    costs = Costs(module)
    by_name = {x.name: costs.bytes(x) for x in module.computations["main"]}
    assert by_name["x"] == 0
    assert by_name["read"] == 2 * 400 + 4  # The 4 bytes are the index.
    assert by_name["write"] == 2 * 400 + 4
    assert by_name["sum"] == 3 * 1600


def test_of_a_condition_the_branch_with_the_most_operations_counts():
    def switch(i, x):
        branches = [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x]
        return jax.lax.scan(lambda x, _: (jax.lax.switch(i, branches, x), None), x, None, 5)

    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert total_flops(switch, jnp.int32(0), x) == {"float32": 5 * 2 * 2 * 32**3}
