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


def test_rules_have_readable_reprs():
    rule = eqxshard.first_match(eqxshard.by_path({"a": P(), "b": P()}), fsdp(axis="data"))
    assert repr(rule) == "first_match(by_path('a', 'b'), fsdp('data'))"
    assert repr(eqxshard.fsdp()) == "fsdp()"
    assert repr(eqxshard.replicate()) == "replicate()"
