"""Compiles after the first: explained once, each with what changed."""

import dataclasses
import logging
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Named

import eqxshard

X = np.arange(8, dtype=np.float32)


class Scale(eqx.Module):
    """An array, a static field and a static leaf."""

    weight: Any
    power: int = eqx.field(static=True, default=1)
    activation: object = jnp.tanh


class Unequal:
    """Objects that are not equal to others, and cannot be shown or looked into."""

    def __repr__(self):
        raise RuntimeError("no text")

    def __getattr__(self, name):
        raise RuntimeError("no attributes")


def double(x, n=1):
    """Doubles the arrays of anything."""
    return jax.tree.map(lambda leaf: leaf * 2, eqx.filter(x, eqx.is_array))


def make_double():
    return eqxshard.filter_jit(double)


# What changed


CHANGES = {
    "shape": (X, X[:4], "x: float32[8] -> float32[4]."),
    "dtype": (X, X.astype(np.int32), "x: float32[8] -> int32[8]."),
    "weak type": (jnp.float32(2), jnp.asarray(2.0), "x: float32[] -> float32[] (weak ty"),
    "a number": ((X, 1), (X, 2), "x.1: 1 -> 2."),
    "nothing": ((X, None), (X, X), "x.1: None -> float32[8]."),
    "an object": ((X, len), (X, Unequal()), "x.1: builtin_function_or_method -> Unequal."),
    "a node without keys": (Named(X), Named(X[:4]), "x.0: float32[8] -> float32[4]."),
    "one more": ({"a": X}, {"a": X, "b": Scale(X)}, "x.b.weight: absent -> float32[8];"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_compile_says_what_changed_and_what_to_do(kind, caplog):
    before, now, expected = CHANGES[kind]
    fn = make_double()
    fn(before)
    fn(before)
    assert not caplog.records
    fn(now)
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert message.startswith(f"double compiles again. Changed: {expected}")
    assert "Loader(remainder=...)" in message
    # Once.
    fn(now)
    fn(before)
    assert len(caplog.records) == 1


def test_a_sharding_that_is_in_the_type_is_said(caplog):
    mesh = eqxshard.make_mesh(explicit=True)
    fn = make_double()
    for spec in (jax.P(), jax.P("data")):
        fn(jax.device_put(X, jax.NamedSharding(mesh, spec)))
    (record,) = caplog.records
    assert "Changed: x: float32[8] -> float32[8] P('data'). " in record.getMessage()


def test_long_values_and_many_changes_are_cut(caplog):
    fn = make_double()
    fn([X] * 7 + ["a" * 1000])
    fn([X[:4]] * 7 + ["b" * 1000])
    assert "x.3: float32[8] -> float32[4]; and 4 more. Keep" in caplog.text
    fn([X[:4]] * 7 + ["c" * 1000])
    assert "bb..." in caplog.text and "b" * 81 not in caplog.text


@pytest.mark.parametrize("what", ["a static field", "the class of a node", "a setting"])
def test_a_change_that_is_not_looked_into_is_said_in_general(what, caplog):
    fn = make_double()
    fn([X, Scale(X)])
    changed = {
        "a static field": [X, Scale(X, power=2)],
        "the class of a node": (X, Scale(X)),
        "a setting": [X, Scale(X)],
    }[what]
    precision = "float32" if what == "a setting" else None
    with jax.default_matmul_precision(precision):
        fn(changed)
    (record,) = caplog.records
    assert "No array and no number in its arguments differs. " in record.getMessage()


def test_arguments_have_the_names_of_the_function(caplog):
    @eqxshard.filter_jit
    def fn(x, n=1, *rest, flag=False):
        return x

    fn(X, 1)
    # The same program.
    fn(x=X, n=1)
    assert not caplog.records
    fn(X)
    assert "n: 1 -> absent." in caplog.records[-1].getMessage()
    fn(X, flag=True)
    assert "flag: absent -> True" in caplog.records[-1].getMessage()


# What is not logged


def test_functions_inside_others_and_under_transforms_are_no_recompiles(caplog):
    inner = make_double()
    inner(X)
    outer = eqxshard.filter_jit(lambda x: inner(x[:2]) + inner(x[2:4]))
    np.testing.assert_array_equal(outer(X), 2 * (X[:2] + X[2:4]))
    jax.vmap(inner)(np.stack([X, X]))
    jax.grad(lambda x: jnp.sum(inner(x)))(X[:5])
    assert not caplog.records
    # The outer one still is.
    outer(X[:6])
    (record,) = caplog.records
    assert "<lambda> compiles again" in record.getMessage()


def test_arguments_are_not_kept_alive():
    fn = make_double()
    x = jnp.asarray(X)
    fn(x)
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_a_nan_that_jax_looks_for_is_no_compile(caplog):
    fn = eqxshard.filter_jit(lambda x: x / x)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fn(jnp.zeros(3))
    assert not caplog.records


def test_a_trace_that_raises_is_no_compile(caplog):
    told = eqxshard.filter_jit(lambda x: x["b"])
    with pytest.raises(KeyError):
        told({"a": X})
    told({"b": X})
    assert not caplog.records


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Derived:
    """A field is computed when the node is made, and is no child."""

    x: Any
    twice: Any = None

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("x"), self.x),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        (x,) = children
        return cls(x, x * 2 if isinstance(x, jax.Array) else None)


@pytest.mark.parametrize("node", [Named, Derived])
def test_no_tracer_is_kept_or_compared(node, caplog):
    fn = eqxshard.filter_jit(lambda node: jax.tree.map(jnp.sum, jax.tree.leaves(node)))
    with jax.checking_leaks():
        for n in (8, 4):
            (total,) = fn(node(jnp.ones(n)))
            assert total == n
    (record,) = caplog.records
    assert "float32[8] -> float32[4]" in record.getMessage()


# Refused


@pytest.mark.versions
def test_equinox_refuses_more_traces_than_are_expected():
    fn = eqxshard.filter_jit(eqx.debug.assert_max_traces(double, max_traces=1))
    fn(X)
    with pytest.raises(RuntimeError, match="can only be traced 1 times"):
        fn(X[:4])
    np.testing.assert_array_equal(fn(X), 2 * X)
