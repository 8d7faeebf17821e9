"""A mixture of experts for a whole batch runs per device where the mesh splits it."""

import functools as ft
import itertools

import jax
import pytest
from grades import graded
from jax.sharding import PartitionSpec as P
from moe_helpers import (
    BATCH,
    BATCH_MESHES,
    CASES,
    EXPERTS,
    ROWS,
    TOKENS,
    assert_close,
    backward,
    forward_batch,
    make_arrays,
    make_inputs,
    make_mesh,
    on_mesh,
    reference,
)

from eqxshard import testing


@ft.cache
def compiled_on(name, case):
    args = (make_arrays(), *make_inputs())
    k, capacity = CASES[case]
    experts = P("expert" if "expert" in name else None)
    fn = ft.partial(backward, k=k, capacity=capacity, forward=forward_batch)
    return on_mesh(make_mesh(name), fn, *args, split=(experts, ROWS, ROWS))


#: Each mesh with one of the cases.
QUICK = [*zip(BATCH_MESHES, itertools.cycle(CASES))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, case", graded(itertools.product(BATCH_MESHES, CASES), QUICK)
)
def test_results_and_gradients_equal_the_reference(name, case):
    k, capacity = CASES[case]
    x, logits = make_inputs(scale=3.0)
    # Of one device alone, all tokens want three experts: it takes all rounds.
    logits[0, :, [3, 5, 11]] += 100
    args = (make_arrays(), x, logits)
    out, grads = compiled_on(name, case)[0](*args)
    expected, expected_grads = reference(*args, k, capacity)
    assert_close(out, expected)
    assert_close(grads, expected_grads)


@pytest.mark.parametrize("name", ["data=2,fsdp=2", "data=2,fsdp=2,expert=2"])
def test_no_tokens_are_gathered_and_gradients_are_summed_once(name):
    _, compiled = compiled_on(name, "dropless")
    found = testing.collectives(compiled)
    assert set(found.counts) <= {"all-reduce", "all-to-all"}
    assert ("all-to-all" in found.counts) == ("expert" in name)
    # Experts' gradients are summed outside of the rounds' loop.
    experts = sum(leaf.size for leaf in jax.tree.leaves(make_arrays())) * 4
    experts //= 2 if "expert" in name else 1
    summed = [op for op in found.ops if op.kind == "all-reduce" and op.bytes >= experts / 4]
    assert summed and all(op.times == 1 for op in summed)
    assert sum(op.bytes for op in summed) < 1.1 * experts


def test_a_batch_that_does_not_divide_is_left_to_the_compiler():
    x, logits = (array[:3] for array in make_inputs(scale=3.0))
    args = (make_arrays(), x, logits)
    fn = ft.partial(backward, k=2, capacity=None, forward=forward_batch)
    run, _ = on_mesh(make_mesh("data=2,fsdp=2"), fn, *args, split=(P(), P(), P()))
    assert_close(run(*args), reference(*args, 2, None))


def test_leading_dims_are_a_batch_per_device_too():
    experts, x, logits = make_arrays(), *make_inputs(scale=3.0)
    pairs = (x.reshape(2, 2, TOKENS, -1), logits.reshape(2, 2, TOKENS, EXPERTS))

    def fn(*args):
        return tuple(forward_batch(*args, k=2, capacity=None))

    split = (P("expert"), P("fsdp"), P("fsdp"))
    run, compiled = on_mesh(make_mesh("fsdp=2,expert=4"), fn, experts, *pairs, split=split)
    out = run(experts, *pairs)
    expected, _ = reference(experts, x, logits, 2, None)
    assert_close([leaf.reshape(BATCH, *leaf.shape[2:]) for leaf in out], expected)
    assert set(testing.collectives(compiled).counts) <= {"all-reduce", "all-to-all"}
