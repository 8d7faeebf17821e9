"""A mixture of experts equals a loop over tokens and experts, on every mesh."""

import functools as ft
import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grades import graded
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec as P
from moe_helpers import (
    BATCH,
    BATCH_MESHES,
    CASES,
    EMBED,
    EXPERTS,
    ON_MESHES,
    ROWS,
    STATIC,
    TOKENS,
    assert_close,
    backward,
    batch_on,
    compiled_on,
    forward,
    forward_batch,
    make_arrays,
    make_experts,
    make_inputs,
    make_mesh,
    on_mesh,
    reference,
)

from eqxshard import testing
from eqxshard.parallel import mixture_of_experts

#: Each mesh with one of the cases.
QUICK = [*zip(BATCH_MESHES, itertools.cycle(CASES))]


@pytest.mark.versions
@pytest.mark.parametrize("mesh, case", ON_MESHES)
def test_outputs_and_gradients_equal_the_reference(mesh, case):
    k, capacity = CASES[case]
    run, _ = compiled_on(mesh, k, capacity)
    args = (make_arrays(), *make_inputs(scale=3.0))
    out, grads = run(*args)
    expected, expected_grads = reference(*args, k, capacity)
    assert_close((out, grads), (expected, expected_grads))
    assert np.all((np.asarray(out[2]) > 0) == (capacity is not None))
    # All tokens prefer the same three experts, each of which keeps 3 of 16 tokens.
    args[2][..., [3, 5, 11]] += np.array([300, 200, 100], np.float32)
    out, grads = run(*args)
    expected, expected_grads = reference(*args, k, capacity)
    assert_close((out, grads), (expected, expected_grads))
    np.testing.assert_allclose(out[2], 0 if capacity is None else 13 / 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, case", graded(itertools.product(BATCH_MESHES, CASES), QUICK)
)
def test_a_batch_equals_the_reference_per_device(name, case):
    k, capacity = CASES[case]
    x, logits = make_inputs(scale=3.0)
    # On one device alone, all tokens want the same three experts, which takes all rounds.
    logits[0, :, [3, 5, 11]] += 100
    args = (make_arrays(), x, logits)
    result = batch_on(name, case)[0](*args)
    assert_close(result, reference(*args, k, capacity))


favourites = hnp.arrays(np.int32, (BATCH, TOKENS), elements=st.integers(0, EXPERTS - 1))


@pytest.mark.parametrize("mesh, case", ON_MESHES)
@settings(deadline=None, max_examples=20)
@given(first=favourites, second=favourites)
def test_any_preferences(mesh, case, first, second):
    # The other experts are equally probable, so the first of them are chosen.
    logits = 4.0 * np.eye(EXPERTS, dtype=np.float32)[first]
    logits += 2 * np.eye(EXPERTS, dtype=np.float32)[second]
    args = (make_arrays(), make_inputs()[0], logits)
    k, capacity = CASES[case]
    out, grads = compiled_on(mesh, k, capacity)[0](*args)
    expected, expected_grads = reference(*args, k, capacity)
    assert_close(out, expected)
    assert_close(grads, expected_grads)


def test_a_single_choice_is_weighted_by_its_probability():
    args = (make_arrays(), *make_inputs(scale=2.0))
    result = compiled_on("expert=2", 1, 0.6)[0](*args)
    assert_close(result, reference(*args, 1, 0.6))
    assert np.any(np.abs(result[1][2]) > 0.01)


@pytest.mark.slow
def test_bfloat16():
    args = (make_arrays(), *make_inputs(scale=3.0))
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), args)
    mesh, fn = make_mesh("data=2,expert=4"), ft.partial(backward, k=2, capacity=0.5)
    out, grads = on_mesh(mesh, fn, *half)[0](*half)
    assert {leaf.dtype for leaf in jax.tree.leaves((out[0], grads))} == {half[1].dtype}
    assert out[1].dtype == out[2].dtype == jnp.float32
    # The routes are exact, whatever dtype the experts compute in.
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    expected, expected_grads = reference(*exact, k=2, capacity=0.5)
    assert_close(out[1:], expected[1:])
    assert_close((out, grads), (expected, expected_grads), 2e-2)


@pytest.mark.parametrize(
    "name", graded(["data=2,fsdp=2", "fsdp=2,expert=4"], ["fsdp=2,expert=4"], BATCH_MESHES)
)
def test_bfloat16_over_the_axes_of_the_batch(name):
    """XLA:CPU would end the process where per-device code sums the experts' gradients."""
    half = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.bfloat16), (make_arrays(), *make_inputs(scale=3.0))
    )
    experts = P("expert" if "expert" in name else None)
    fn = ft.partial(backward, k=2, capacity=None, forward=forward_batch)
    out, grads = on_mesh(make_mesh(name), fn, *half, split=(experts, ROWS, ROWS))[0](*half)
    assert {leaf.dtype for leaf in jax.tree.leaves((out[0], grads))} == {half[1].dtype}
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), half)
    expected, expected_grads = reference(*exact, k=2, capacity=None)
    assert_close((out, grads), (expected, expected_grads), 2e-2)


@pytest.mark.parametrize(
    "name", graded(["1", "data=2,expert=4"], ["1"], ["data=2,expert=4"])
)
def test_integers_of_64_bits_change_nothing(name):
    args = (make_arrays(), *make_inputs(scale=3.0))
    with jax.enable_x64(True):
        fn = ft.partial(backward, k=2, capacity=0.6)
        out, grads = on_mesh(make_mesh(name), fn, *args)[0](*args)
    assert {leaf.dtype for leaf in jax.tree.leaves((out, grads))} == {args[1].dtype}
    assert_close((out, grads), reference(*args, k=2, capacity=0.6))


def test_leading_dims_are_a_batch():
    experts, x, logits = make_arrays(), *make_inputs(scale=3.0)
    pairs = (x.reshape(2, 2, TOKENS, EMBED), logits.reshape(2, 2, TOKENS, EXPERTS))

    def fn(experts, *pairs):
        return tuple(mixture_of_experts(eqx.combine(experts, STATIC), *pairs))

    run, compiled = on_mesh(make_mesh("data=2,expert=4"), fn, experts, *pairs)
    out = run(experts, *pairs)
    assert out[1].shape == out[2].shape == (2, 2)
    expected, _ = reference(experts, x, logits, 2, None)
    assert_close([leaf.reshape(BATCH, *leaf.shape[2:]) for leaf in out], expected)
    # Two in the first round, two in further rounds.
    assert_all_to_all(compiled, 4, (2, 4, 4))


def test_per_device_code_passes_its_own_parts():
    args = (make_arrays(), *make_inputs(scale=3.0))
    fn = jax.shard_map(
        lambda *args: tuple(forward(*args, k=2, capacity=1.0)),
        mesh=make_mesh("data=2,expert=4"),
        in_specs=(P("expert"), P("data", "expert"), P("data", "expert")),
        out_specs=(P("data", "expert"), P("data"), P("data")),
    )
    assert_close(jax.jit(fn)(*args), reference(*args, 2, 1.0)[0])


class Direction(eqx.Module):
    """An expert that is not defined at zero, and returns a vector of another size."""

    weight: jax.Array

    def __call__(self, x):
        return self.weight @ (x / jnp.linalg.norm(x))


def test_an_expert_need_not_be_defined_at_zero():
    x, logits = map(jnp.asarray, make_inputs())

    @jax.jit
    @jax.grad
    def gradient(weight):
        out = mixture_of_experts(Direction(weight), x, logits)
        assert out.output.shape == (BATCH, TOKENS, 3)
        return jnp.sum(out.output)

    assert np.all(np.isfinite(gradient(jnp.ones((EXPERTS, 3, EMBED)))))


# Cost


def assert_all_to_all(compiled, count, rows=None):
    """All collectives but all-reduces are all-to-alls, of this number and of these rows.

    The rows are for one other device. Their dims of size 1 are left out, which differ
    from one version of XLA to the next.
    """
    found = testing.collectives(compiled)
    counts = {kind: n for kind, n in found.counts.items() if kind != "all-reduce"}
    assert counts == {"all-to-all": count}
    sent = {sent for op in found if op.kind == "all-to-all" for sent in op.shapes}
    dims = {tuple(int(n) for n in re.findall(r"[2-9]", shape[3:])) for shape in sent}
    assert dims == {rows} or rows is None, sent


@pytest.mark.versions
@pytest.mark.parametrize(
    "k, capacity, experts, fn, count, rows",
    [
        # One round is always enough: two ways, and two more for gradients.
        (2, None, 4, forward, 2, (2, 4, 4)),
        # Further rounds have two; their backward pass recomputes these and has two more.
        (3, 1.0, 16, backward, 4 + 2 + 4, (2, 4, 2, 4)),
    ],
)
def test_tokens_travel_by_all_to_all_and_nothing_is_gathered(
    k, capacity, experts, fn, count, rows
):
    _, compiled = compiled_on("data=2,expert=4", k, capacity, experts, fn)
    # This device's examples of the batch, that device's experts, slots, features.
    assert_all_to_all(compiled, count, rows)


@pytest.mark.parametrize(
    "name",
    graded(
        ["data=2,fsdp=2", "data=2,fsdp=2,expert=2"],
        ["data=2,fsdp=2,expert=2"],
        ["data=2,fsdp=2"],
    ),
)
def test_no_tokens_of_a_batch_are_gathered_and_gradients_are_summed_once(name):
    found = testing.collectives(batch_on(name, "dropless")[1])
    assert set(found.counts) <= {"all-reduce", "all-to-all"}
    assert ("all-to-all" in found.counts) == ("expert" in name)
    # Experts' gradients are summed outside of the rounds' loop.
    experts = sum(leaf.size for leaf in jax.tree.leaves(make_arrays())) * 4
    experts //= 2 if "expert" in name else 1
    summed = [op for op in found if op.kind == "all-reduce" and op.bytes >= experts / 4]
    assert summed and all(op.times == 1 for op in summed)
    assert sum(op.bytes for op in summed) < 1.1 * experts


def test_rounds_that_no_example_needs_are_not_computed():
    calls = []

    class Counted(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            jax.debug.callback(lambda: calls.append("a round"))
            return self.scale * x

    @jax.jit
    def run(x, logits):
        return mixture_of_experts(Counted(jnp.ones(EXPERTS)), x, logits).output

    x, _ = make_inputs()
    index = np.arange(TOKENS)
    logits = np.eye(EXPERTS)[index] + 0.5 * np.eye(EXPERTS)[(index + 1) % EXPERTS]
    logits = np.stack([logits] * BATCH).astype(np.float32)
    # A round has twice the slots of an even load of two choices.
    for rounds, favoured in (1, 0), (2, 5), (4, TOKENS):
        calls.clear()
        logits[-1, :favoured, 3] = 10
        run(x, logits).block_until_ready()
        jax.effects_barrier()
        assert len(calls) == rounds


# Mistakes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": 17}, "k=17 and capacity=None do not suit 16 experts; give"),
        ({"capacity": 0.0}, r"k=2 and capacity=0\.0 do not suit 16 experts; give"),
        ({"x": jnp.zeros((15, 4))}, r"x has shape \(15, 4\) and router_logits \(16, 16\)"),
        (
            {"router_logits": jnp.zeros((16, 8))},
            r"experts\.layers\.0\.weight has shape \(16, 8, 4\), .* for 8 experts; give",
        ),
        (
            {"x": jnp.zeros((18, 4)), "router_logits": jnp.zeros((18, 16))},
            "18 tokens do not divide over expert=4",
        ),
        (
            {"experts": lambda x: x, "router_logits": jnp.zeros((16, 6))},
            "6 experts do not divide over expert=4",
        ),
        ({"experts": lambda x: x[0]}, r"an expert returns an array of shape \(\)"),
    ],
)
def test_mismatches_are_errors(unannotated, changes, message):
    args = {
        "experts": make_experts(jax.random.key(0), EXPERTS),
        "x": jnp.zeros((16, 4)),
        "router_logits": jnp.zeros((16, 16)),
    }
    with (
        pytest.raises(ValueError, match=message),
        jax.sharding.use_abstract_mesh(make_mesh("expert=4").abstract_mesh),
    ):
        eqx.filter_eval_shape(mixture_of_experts, **(args | changes))
