import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from sharding_helpers import error, fsdp, make_mesh, spec_of, specs, struct

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


RULES = (
    eqxshard.replicate(),
    eqxshard.fsdp(min_size=16),
    eqxshard.fsdp(axis=("data", "fsdp")),
    eqxshard.zero1(min_size=3, axis="fsdp"),
    eqxshard.by_path({r"a\.b$": P(("data", "fsdp"), None), "c": P()}),
    eqxshard.by_dim({"mlp": "tensor", "embed": ("data", "fsdp"), "in": None}),
)
RULES += (
    eqxshard.first_match(*RULES),
    eqxshard.offload(eqxshard.combine(RULES[3], eqxshard.first_match(RULES[1]))),
)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_every_argument(rule):
    made = eval(repr(rule), vars(eqxshard) | {"P": P})
    assert made == rule and hash(made) == hash(rule) and repr(made) == repr(rule)
    assert [each for each in RULES if each == rule] == [rule]


def test_a_rule_is_short_in_tables():
    mesh, leaf = make_mesh(), {"a": struct(8, 8)}
    rule = eqxshard.first_match(eqxshard.by_path({"a": P("fsdp")}), fsdp())
    assert eqxshard.explain(leaf, mesh, rule).leaves[0].rule == "by_path('a')"
    assert eqxshard.explain(leaf, mesh, fsdp(axis="data")).leaves[0].rule == "fsdp('data')"


def by_dim(**axes):
    return eqxshard.first_match(eqxshard.by_dim(axes), eqxshard.replicate())


#: Rules that a `Block` on data=2, fsdp=2, tensor=2 refuses, and what the error says.
REFUSED = {
    "not a rule": (lambda: 3, r"rule=3 is not a rule; give"),
    "a spec": (lambda: P("fsdp"), "is not a rule; give"),
    "not made": (lambda: eqxshard.fsdp, r"rule=fsdp is a class, .* call it: fsdp\(\)"),
    "no spec": (lambda: lambda *_: "fsdp", "returned 'fsdp' for up; return a jax.P"),
    "unconstrained": (
        lambda: eqxshard.by_path({"up": P(P.UNCONSTRAINED)}),
        r"by_path\('up'\) leaves a dim of up UNCONSTRAINED",
    ),
    "a size": (lambda: eqxshard.fsdp("data"), "write axis='data' to name an axis"),  # pyright: ignore
    "an axis of fsdp": (lambda: eqxshard.fsdp(axis="fdsp"), "did you mean 'fsdp'"),
    "an axis of zero1": (lambda: eqxshard.zero1(axis="dta"), "did you mean 'data'"),
    # Even if no leaf has the dim.
    "an axis of by_dim": (lambda: by_dim(mlp="tensor", x="tensr"), "did you mean 'tensor'"),
    "an expression": (lambda: eqxshard.by_path({"w(": P()}), "'w\\('.* escape"),
    "a string": (lambda: eqxshard.by_path({"w": "x"}), "not a PartitionSpec"),  # pyright: ignore
    "no such path": (
        lambda: eqxshard.by_path({r"^nrm\.weight": P()}),
        "matches no leaf; did you mean 'norm.weight'",
    ),
    "no such dim": (lambda: by_dim(heads="tensor"), "their dims are embed, mlp"),
    "a misspelt dim": (lambda: by_dim(mlp="tensor", embd="fsdp"), "did you mean 'embed'"),
    "an axis of by_path": (
        lambda: eqxshard.by_path({"up": P("tensr")}),
        r"up \(32, 8\): .* names the axis 'tensr', .* did you mean 'tensor'\? its ",
    ),
    "an axis twice": (
        lambda: eqxshard.by_path({"up": P(("fsdp",), "fsdp")}),
        "uses the axis 'fsdp' twice",
    ),
    "more entries than dims": (
        lambda: eqxshard.by_path({"up": P(None, None, "fsdp")}),
        "has 3 entries and the array 2 dims",
    ),
    "twice": (
        lambda: eqxshard.combine(
            eqxshard.by_dim({"mlp": "tensor"}), eqxshard.by_path({"up": P(None, "tensor")})
        ),
        r"up \(32, 8\): both by_dim\(mlp: tensor\) and by_path\('up'\) split it",
    ),
    "offload inside": (
        lambda: eqxshard.combine(eqxshard.offload(eqxshard.fsdp()), eqxshard.replicate()),
        r"offload goes around all; write offload\(combine",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_with_a_rule_is_one_sentence(case, unannotated):
    make, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        specs(make())


def test_a_dim_that_does_not_divide_is_an_error_with_its_arithmetic():
    mesh = make_mesh(fsdp=2, tensor=2)
    rule = eqxshard.by_path({"w": P(None, ("fsdp", "tensor"))})
    assert spec_of(rule, 3, 8, mesh=mesh) == P(None, ("fsdp", "tensor"))
    message = error(rule, 3, 6, mesh=mesh)
    assert "w (3, 6): P(None, ('fsdp', 'tensor')) splits dim 1 of size 6" in message
    assert "over fsdp=2 x tensor=2, which does not divide it" in message
    assert "choose a dim that is a multiple of 4, or do not split this one" in message
