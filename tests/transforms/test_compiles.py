"""Compiles after the first: explained once, each with what changed, or refused."""

import functools as ft
import logging
import re
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh

import eqxshard

X = np.arange(8, dtype=np.float32)


class Scale(eqx.Module):
    """An array, a static field and a static leaf."""

    weight: Any
    power: int = eqx.field(static=True, default=1)
    activation: object = jnp.tanh


class Unequal:
    """Objects that say the same of themselves and are not equal."""

    def __repr__(self):
        return "Unequal()"


def double(x, n=1):
    """Doubles the arrays of anything."""
    return jax.tree.map(lambda leaf: leaf * 2, eqx.filter(x, eqx.is_array))


def make_double(**options):
    return eqxshard.filter_jit(double, **options)


def placed(spec):
    return jax.device_put(X, jax.NamedSharding(make_mesh(), spec))


# What changed


CHANGES = {
    "shape": (X, X[:4], "x: shape (8,) -> (4,)"),
    "dtype": (X, X.astype(np.int32), "x: dtype float32 -> int32"),
    "weak type": (jnp.float32(2), jnp.asarray(2.0), "x: weak_type False -> True"),
    "sharding": (
        placed(jax.P()),
        placed(jax.P("data")),
        "x: sharding P() on 8 x cpu (data=8) -> P('data',) on 8 x cpu (data=8)",
    ),
    "committed": (
        jnp.asarray(X),
        jax.device_put(X, jax.devices()[0]),
        "x: sharding uncommitted -> SingleDeviceSharding(",
    ),
    "a static value": ((X, 1), (X, 2), "x.1: 1 -> 2"),
    "its type": ((X, 1), (X, 1.0), "x.1: 1 -> 1.0"),
    "a static field": (Scale(X), Scale(X, power=2), "x.power: 1 -> 2"),
    "a function": (
        Scale(X, activation=jnp.tanh),
        Scale(X, activation=make_mesh),
        "x.activation: jax.numpy.tanh -> helpers.make_mesh",
    ),
    "an equal text": (
        (X, Unequal()),
        (X, Unequal()),
        "x.1: Unequal() -> another object like it",
    ),
    "one more": ({"a": X}, {"a": X, "b": Scale(X)}, "x.b: absent -> Scale"),
    "one less": ([X, X[:4]], [X], "x.1: float32[4] -> absent"),
    "a container": ([X, X], (X, X), "x: list -> tuple"),
    "None": ((X, None), (X, X), "x.1: None -> float32[8]"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_compile_says_what_changed(kind, caplog):
    before, now, expected = CHANGES[kind]
    fn = make_double()
    fn(before)
    fn(before)
    assert not caplog.records
    fn(now)
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert re.match(r"double compiled again, in [\d.e-]+ s\. Changed: ", message)
    assert f"Changed: {expected}" in message
    # And nothing else.
    assert "; x" not in message
    assert message.endswith("If you expect this, say so with max_compiles=2.")
    # Once.
    fn(now)
    fn(before)
    assert len(caplog.records) == 1


REMEDIES = {
    "shape": "Loader(remainder=...)",
    "dtype": "Convert to one dtype.",
    "weak type": "Make it with a dtype",
    "sharding": "Place it with filter_shard.",
    "a static field": "Pass a number that changes as an array",
    "a container": "Pass the same arguments, of the same structure.",
}


@pytest.mark.parametrize("kind", REMEDIES)
def test_a_compile_says_what_to_do(kind, caplog):
    fn = make_double()
    fn(CHANGES[kind][0])
    fn(CHANGES[kind][1])
    for each, remedy in REMEDIES.items():
        assert (remedy in caplog.text) == (each == kind)


def test_a_change_outside_of_the_arguments_is_said_too(caplog):
    fn = make_double()
    fn(X)
    with jax.default_matmul_precision("float32"):
        fn(X)
    (record,) = caplog.records
    assert "s. No argument differs; a JAX setting or the mesh in" in record.getMessage()


def test_the_nearest_compile_is_compared(caplog):
    fn = make_double()
    for argument in ((X, X, 1), (X[:4], X[:4], 2), (X[:4], X[:4], 3), (X, X, 3)):
        fn(argument)
    changes = [record.getMessage().partition("Changed: ")[2] for record in caplog.records]
    assert changes[0].startswith("x.0: shape (8,) -> (4,); x.1: shape (8,) -> (4,); x.2: 1")
    assert changes[1].startswith("x.2: 2 -> 3. ")
    # As near to the first, and not to the last.
    assert changes[2].startswith("x.2: 1 -> 3. ")


def test_a_few_of_many_changes_are_named(caplog):
    fn = make_double()
    fn([X] * 7)
    fn([X[:4]] * 7)
    assert "x.3: shape (8,) -> (4,); and 3 more. Keep" in caplog.text
    assert "x.4" not in caplog.text


def test_arguments_have_the_names_of_the_function(caplog):
    @eqxshard.filter_jit
    def fn(x, n=1, *rest, flag=False, **named):
        return x

    fn(X, 1)
    # The same program.
    fn(x=X, n=1)
    assert not caplog.records
    fn(X)
    fn(X, 1, flag=True)
    fn(X, n=2)
    fn(X, 1, X)
    fn(X, 1, other=X)
    for change in (
        "n: 1 -> absent.",
        "flag: absent -> True.",
        "n: absent -> 2.",
        "rest: absent -> tuple.",
        "named: absent -> dict.",
    ):
        assert change in caplog.text


def test_donated_arguments_are_described(caplog):
    fn = make_double(donate="all")
    fn(jnp.asarray(X))
    fn(jnp.asarray(X[:4]))
    assert "x: shape (8,) -> (4,)." in caplog.text


def test_the_seconds_are_those_of_the_compile(caplog):
    def slow(x):
        time.sleep(0.3)
        return x

    fn = eqxshard.filter_jit(slow)
    fn(X)
    fn(X[:4])
    seconds = re.search(r"in ([\d.e-]+) s\.", caplog.text)
    assert seconds and 0.3 <= float(seconds.group(1)) < 3


# What is no recompile


def test_lowering_is_no_compile(caplog):
    fn = make_double(max_compiles=1)
    fn.lower(X[:4]).compile()
    fn.lower(X)
    fn(X)
    assert not caplog.records


def test_functions_inside_others_and_under_transforms_are_no_recompiles(caplog):
    inner = make_double(max_compiles=1)
    inner(X)
    outer = eqxshard.filter_jit(lambda x: inner(x[:4]) + inner(x[4:]))
    np.testing.assert_array_equal(outer(X), 2 * (X[:4] + X[4:]))
    jax.vmap(inner)(np.stack([X, X]))
    jax.grad(lambda x: jnp.sum(inner(x)))(X[:5])
    assert not caplog.records


def test_what_compiles_while_a_function_is_traced_is_not_its_own():
    @eqxshard.filter_jit(max_compiles=1)
    def fn(x):
        jax.jit(lambda x: x * 3).lower(X).compile()
        return x * 2

    np.testing.assert_array_equal(fn(X), 2 * X)


def test_a_function_called_while_another_is_traced_leaves_it_watched(caplog):
    inner = make_double()
    outer = eqxshard.filter_jit(lambda x: inner(x))
    outer(X)
    outer(X[:4])
    (record,) = caplog.records
    assert "<lambda> compiled again" in record.getMessage()


# A budget


def test_compiles_beyond_the_budget_are_refused():
    fn = make_double(max_compiles=2)
    fn(X)
    fn(X[:4])
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"double would have to compile, and max_compiles=2 allows no more\. "
            r"Changed: x: shape \(4,\) -> \(5,\)\. Keep shapes the same;",
        ):
            fn(X[:5])
    # What is compiled still runs.
    np.testing.assert_array_equal(fn(X), 2 * X)
    message = "No argument differs; a JAX setting"
    with jax.default_matmul_precision("float32"), pytest.raises(ValueError, match=message):
        fn(X)


def test_compiles_within_the_budget_are_expected(caplog):
    fn = make_double(max_compiles=2)
    fn(X)
    fn(X[:4])
    assert not caplog.records


@pytest.mark.parametrize("lowered", [False, True])
def test_a_refused_call_donates_nothing(lowered):
    fn = make_double(donate="all", max_compiles=1)
    fn(jnp.asarray(X))
    x = jnp.asarray(X[:4])
    if lowered:
        fn.lower(x)
    with pytest.raises(ValueError, match="max_compiles=1"):
        fn(x)
    np.testing.assert_array_equal(x, X[:4])


def test_a_budget_is_positive():
    for make in (
        make_double,
        ft.partial(eqxshard.make_eval_step, lambda model, batch: {}),
    ):
        with pytest.raises(ValueError, match="max_compiles=0 must be at least 1, or None"):
            make(max_compiles=0)
