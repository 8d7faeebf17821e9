import re

import jax
import jax.numpy as jnp
import plan_memory
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_helpers import OPTIM
from plan_memory import fashion_mnist

import eqxshard
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning._scratch import convolution_scratch, find_convolutions

LAST = ("NHWC", "HWIO", "NHWC")


def compiled(**options):
    """A module with one convolution, of two groups of features."""

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, dimension_numbers=LAST, feature_group_count=2, **options
        )

    # As XLA's own kernel takes it, and not another library.
    flag = {"xla_cpu_experimental_ynn_fusion_type": ""}
    shapes = (2, 12, 10, 8), (3, 3, 4, 8)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    lowered = jax.jit(convolve, compiler_options=flag).lower(*args)
    return parse_module(lowered.compile().as_text() or "")


@settings(max_examples=8)
@given(
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*2 * [st.tuples(st.integers(0, 2), st.integers(0, 2))]),
)
def test_a_convolution_is_found_as_it_was_written(strides, padding):
    options = {"window_strides": strides, "padding": padding}
    (found,) = find_convolutions(compiled(**options))
    assert dict(found.options) == {
        **options,
        "feature_group_count": 2,
        "lhs_dilation": (1, 1),
        "rhs_dilation": (1, 1),
        "batch_group_count": 1,
    }
    out = [
        (size + sum(pad) - 3) // stride + 1
        for size, pad, stride in zip((12, 10), padding, strides)
    ]
    assert found.copied == 2 * out[0] * out[1] * 3 * 3 * 4


def test_what_other_code_runs_copies_nothing():
    module = compiled(window_strides=(1, 1), padding="SAME")
    text = module.text.replace("->b01f", "->bf01")
    assert text != module.text
    assert not list(find_convolutions(parse_module(text)))
    assert convolution_scratch(parse_module(text), 1) == 0


@pytest.mark.slow
def test_a_plan_says_what_convolutions_took():
    def note_of(make_model):
        plan = eqxshard.plan(
            *(make_model, fashion_mnist.loss_fn, OPTIM, plan_memory.images(256)),
            **{"mesh_shape": {"data": 4}, "rule": eqxshard.replicate(), "target": "cpu"},
        )
        assert plan.memory.peak > plan.memory.temporaries
        return next((x for x in plan.notes if "convolutions were run" in x), None)

    lenet, _ = fashion_mnist.MODELS["lenet"]
    note = note_of(lenet)
    # How much it is depends on how threads meet, and on the machine.
    assert note is not None and re.search(r"[1-9][\d.]* MB of the temporaries$", note)
    assert note_of(fashion_mnist.MLP) is None
