import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharding_helpers import fsdp, make_mesh, rule_error, specs, struct

import eqxshard


def test_a_rule_is_any_function():
    seen = []

    def rule(path, leaf, mesh):
        seen.append((path, leaf.shape, leaf.dtype, mesh))
        return P("fsdp") if path == "0.weight" else P()

    mesh = make_mesh()
    linear = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    found = eqxshard.shardings([linear], mesh, rule)
    assert seen == [
        ("0.weight", (4, 3), jnp.float32, mesh),
        ("0.bias", (4,), jnp.float32, mesh),
    ]
    assert found[0].weight == jax.NamedSharding(mesh, P("fsdp"))
    assert found[0].bias == jax.NamedSharding(mesh, P())


def test_user_rules_see_the_dims():
    def rule(path, leaf, mesh):
        return P("tensor") if leaf.dims and leaf.dims[0] == "mlp" else None

    found = specs(eqxshard.first_match(rule, eqxshard.replicate()))
    assert [path for path, spec in found.items() if spec] == ["up", "bias"]


@pytest.mark.parametrize("answer", ["fsdp", ("fsdp", None), True])
def test_a_rule_must_return_a_spec(answer):
    def rule(path, leaf, mesh):
        return answer

    message = (
        rf"the rule rule returned {re.escape(repr(answer))} for w; return a jax\.P, or"
    )
    with pytest.raises(TypeError, match=message):
        eqxshard.shardings({"w": struct(8, 8)}, make_mesh(), rule)


@pytest.mark.parametrize(
    "rule, message",
    [
        (
            P("fsdp"),
            r"rule=P.* is one PartitionSpec.*; write eqxshard\.fsdp\(\), or .*by_path",
        ),
        (3, r"rule=3 is not a rule; give one such as eqxshard\.fsdp\(\)"),
        (
            lambda path, leaf: None,
            r"lambda \(test_rule\.py:\d+\) cannot be called with \(path, leaf, mesh\).*; "
            r"take exactly \(path, leaf, mesh\)\.",
        ),
    ],
    ids=["spec", "number", "two arguments"],
)
def test_anything_that_is_not_a_rule_is_refused(rule, message, unannotated):
    with pytest.raises(TypeError, match=message):
        eqxshard.shardings({"w": np.ones(8)}, make_mesh(), rule)


def test_a_rule_maker_that_is_not_called_is_refused():
    message = r"fsdp cannot be called with \(path, leaf, mesh\).*; call it: fsdp\(\)\."
    with pytest.raises(TypeError, match=message):
        eqxshard.shardings({"w": np.ones(8)}, eqxshard.make_mesh(), eqxshard.fsdp)  # pyright: ignore


def test_a_parameter_cannot_be_unconstrained():
    message = rule_error(eqxshard.by_path({"up": P(P.UNCONSTRAINED)}))
    assert "by_path('up') leaves a dim of up UNCONSTRAINED" in message


def mine(path, leaf, mesh):
    return P()


RULES = (
    eqxshard.replicate(),
    eqxshard.fsdp(min_size=16),
    eqxshard.fsdp(axis=["data", "fsdp"]),
    eqxshard.zero1(min_size=3, axis="fsdp"),
    eqxshard.by_path({r"a\.b$": P(["data", "fsdp"], None), "c": P()}),
    eqxshard.by_dim({"mlp": "tensor", "embed": ["data", "fsdp"], "in": None}),
)
RULES += (
    eqxshard.first_match(*RULES),
    eqxshard.offload(eqxshard.combine(RULES[3], eqxshard.first_match(RULES[1], mine))),
)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_every_argument(rule):
    made = eval(repr(rule), vars(eqxshard) | {"P": P, "mine": mine})
    assert made == rule and hash(made) == hash(rule) and repr(made) == repr(rule)
    assert [each for each in RULES if each == rule] == [rule]


def test_a_rule_is_short_in_tables():
    mesh, leaf = make_mesh(), {"a": struct(8, 8)}
    rule = eqxshard.first_match(eqxshard.by_path({"a": P("fsdp")}), fsdp())
    assert eqxshard.explain(leaf, mesh, rule).leaves[0].rule == "by_path('a')"
    assert eqxshard.explain(leaf, mesh, fsdp(axis="data")).leaves[0].rule == "fsdp('data')"


def test_a_spec_that_is_none_is_refused(unannotated):
    with pytest.raises(TypeError, match=r"'w' has 'tensor', .* not a PartitionSpec; write"):
        eqxshard.by_path({"w": "tensor"})  # pyright: ignore
