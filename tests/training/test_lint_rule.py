"""Rules that do not do what they say, and rules that do."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import P
from lint_helpers import BATCH, FSDP, KEY, MLP, OPTIM, found, make_mesh, square_losses

import eqxshard
from eqxshard.training._lint import lint_model

by_path, first_match = eqxshard.by_path, eqxshard.first_match
REPLICATE = eqxshard.replicate()


class Large(eqx.Module):
    """Arrays of 2 MB and of 1 MB."""

    table: eqx.nn.Embedding
    head: eqx.nn.Linear

    def __init__(self, key):
        self.table = eqx.nn.Embedding(1024, 512, key=key)
        self.head = eqx.nn.Linear(512, 512, use_bias=False, key=key)


def check(rule, make_model: Any = Large, **sizes: Any):
    model = eqx.filter_eval_shape(make_model, KEY)
    return list(lint_model(model, make_mesh(**sizes), rule))


def odd(key):
    return MLP(key, width=257, size=65)


@pytest.mark.parametrize("rule", [FSDP, eqxshard.combine(by_path({"up": P()}), FSDP)])
def test_arrays_that_do_not_divide(rule):
    findings = check(rule, odd, fsdp=8)
    assert [each.leaf for each in findings] == ["up", "down"]
    assert {each.kind for each in findings} == {"whole"}
    assert "no dim of (257, 65) divides by fsdp=8" in findings[0].message
    # What is small may be whole, and so may be everything on a mesh of another axis.
    assert check(rule, lambda key: MLP(key, width=17, size=9), fsdp=8) == []
    assert check(rule, odd, data=8) == []


def test_an_array_that_is_split_over_another_axis_is_not_whole():
    rule = eqxshard.combine(by_path({".*": P("tensor")}), FSDP)
    assert check(rule, lambda key: MLP(key, width=258, size=66), fsdp=4, tensor=2) == []


SHADOWED = {
    "a pattern": (by_path({"weight": P(), "head.weight": P("fsdp")}), "'weight' comes"),
    "a rule": (first_match(FSDP, by_path({"head": P()})), "fsdp() comes first"),
    "a rule of dims": (
        first_match(
            by_path({"table": P("fsdp")}), eqxshard.by_dim({"vocab": "fsdp"}), FSDP
        ),
        "by_path('table') comes first",
    ),
}


@pytest.mark.parametrize("kind", SHADOWED)
def test_parts_of_rules_that_earlier_ones_shadow(kind):
    rule, text = SHADOWED[kind]
    found(check(rule, fsdp=8), "unmatched", "decides nothing", text)


def test_a_rule_that_was_not_checked_when_the_state_was_made():
    mesh = make_mesh(fsdp=8)
    state = eqxshard.abstract_state(MLP, OPTIM, key=KEY, mesh=mesh, rule=FSDP)
    misspelt = first_match(by_path({"upp": P()}), FSDP)
    step = eqxshard.make_train_step(square_losses, OPTIM, rule=misspelt)
    findings = eqxshard.lint(step, state, BATCH)
    found(findings, "unmatched", "'upp' matches no leaf", "did you mean 'up'")


WHOLE = {
    "replicate() on fsdp": (REPLICATE, {"fsdp": 8}, "fsdp=8"),
    "fsdp() on tensor": (eqxshard.fsdp(), {"tensor": 8}, "tensor=8"),
    "dims that do not occur in it": (
        first_match(eqxshard.by_dim({"out": "tensor"}), REPLICATE),
        {"data": 2, "tensor": 4},
        "tensor=4",
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_large_arrays_that_are_left_whole(kind):
    rule, sizes, axes = WHOLE[kind]
    findings = check(rule, **sizes)
    assert {each.kind for each in findings} == {"large-whole"}
    assert findings[0].leaf == "table.weight"
    assert f"could split it over {axes}" in findings[0].message


MEANT = {
    "data parallel": (REPLICATE, {"data": 8}),
    "split": (FSDP, {"fsdp": 8}),
    "a path": (first_match(by_path({"table": P()}), FSDP), {"fsdp": 8}),
    "a path for every mesh": (by_path({".*": P("tensor")}), {"data": 8}),
    "a size": (eqxshard.fsdp(min_size=10**7), {"fsdp": 8}),
    "the optimizer's alone": (eqxshard.zero1(), {"data": 2, "fsdp": 4}),
    "a function": (lambda path, leaf, mesh: P(), {"fsdp": 8}),
    "sequences": (REPLICATE, {"context": 8}),
    "a last rule": (first_match(by_path({"weight": P("fsdp")}), FSDP), {"fsdp": 8}),
    "an exception": (
        first_match(by_path({"head": P()}), by_path({"weight": P("fsdp")})),
        {"fsdp": 8},
    ),
}


@pytest.mark.parametrize("kind", MEANT)
def test_what_is_meant_is_no_finding(kind):
    rule, sizes = MEANT[kind]
    assert check(rule, **sizes) == []


def test_a_rule_is_not_asked_about_what_it_need_not_fit():
    rule = first_match(by_path({"up": P()}), by_path({".*": P(None, "fsdp")}))
    make = lambda key: MLP(key, width=256, size=65)  # noqa: E731
    assert check(rule, make, fsdp=8) == []


def test_what_is_small_beside_the_rest_may_be_whole():
    class Huge(eqx.Module):
        table: jax.Array
        head: jax.Array

    make = lambda key: Huge(jnp.zeros((2**13, 2**13)), jnp.zeros((512, 512)))  # noqa: E731
    rule = first_match(by_path({"table": P("fsdp")}), REPLICATE)
    assert check(rule, make, fsdp=8) == []
