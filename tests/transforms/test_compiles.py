"""Compiles after the first: explained once, each with what changed, or refused."""

import dataclasses
import logging
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Named, make_mesh

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


class Broken:
    """Objects that cannot be shown or looked into."""

    def __repr__(self):
        raise RuntimeError("no text")

    def __getattr__(self, name):
        raise RuntimeError("no attributes")


def double(x, n=1):
    """Doubles the arrays of anything."""
    return jax.tree.map(lambda leaf: leaf * 2, eqx.filter(x, eqx.is_array))


def make_double(**options):
    return eqxshard.filter_jit(double, **options)


# What changed


CHANGES = {
    "shape": (X, X[:4], "x: float32[8] -> float32[4]."),
    "weak type": (jnp.float32(2), jnp.asarray(2.0), "x: float32[] -> float32[] (weak ty"),
    "a static value": ((X, 1), (X, 2), "x.1: 1 -> 2."),
    "a static field": (Scale(X), Scale(X, power=2), "x.power: 1 -> 2."),
    "a function": (
        Scale(X, activation=jnp.tanh),
        Scale(X, activation=make_mesh),
        "x.activation: jax.numpy.tanh -> helpers.make_mesh.",
    ),
    "an equal text": ((X, Unequal()), (X, Unequal()), "x.1: Unequal() -> another like it."),
    "a node without keys": (Named(X), Named(X[:4]), "x.0: float32[8] -> float32[4]."),
    "its static part": (Named(X, "a"), Named(X, "b"), "x (static): 'a' -> 'b'."),
    "one more": ({"a": X}, {"a": X, "b": Scale(X)}, "x.b: absent -> Scale."),
    "a container": ([X, X], (X, X), "x: list -> tuple."),
    "not to be shown": ((X, Unequal()), (X, Broken()), "x.1: Unequal() -> Broken."),
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
    assert "Loader(remainder=...)" in message and message.endswith("with max_compiles=2.")
    # Once.
    fn(now)
    fn(before)
    assert len(caplog.records) == 1


def test_long_values_and_many_changes_are_cut(caplog):
    fn = make_double()
    fn([X] * 7 + ["a" * 1000])
    fn([X[:4]] * 7 + ["b" * 1000])
    assert "x.3: float32[8] -> float32[4]; and 4 more. Keep" in caplog.text
    fn([X[:4]] * 7 + ["c" * 1000])
    assert "bb..." in caplog.text and "b" * 81 not in caplog.text


def test_a_change_outside_of_the_arguments_is_said_too(caplog):
    fn = make_double()
    fn(X)
    with jax.default_matmul_precision("float32"):
        fn(X)
    (record,) = caplog.records
    assert (
        "No argument differs in its shapes, dtypes or static parts; a"
        in record.getMessage()
    )


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


# What is not counted


def test_functions_inside_others_and_under_transforms_are_no_recompiles(caplog):
    inner = make_double(max_compiles=1)
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


def test_a_nan_that_jax_looks_for_is_no_compile():
    fn = eqxshard.filter_jit(lambda x: x / x, max_compiles=1)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fn(jnp.zeros(3))


def test_a_trace_that_raises_is_no_compile(caplog):
    fn = eqxshard.filter_jit(lambda x: x["b"], max_compiles=1)
    for _ in range(2):
        with pytest.raises(KeyError, match="b"):
            fn({"a": X})
    np.testing.assert_array_equal(fn({"b": X}), X)
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


# A budget


@pytest.mark.versions
def test_compiles_beyond_the_budget_are_refused_and_donate_nothing(caplog):
    fn = make_double(max_compiles=2, donate="all")
    fn(jnp.asarray(X))
    fn(jnp.asarray(X[:4]))
    for _ in range(2):
        x = jnp.asarray(X[:5])
        with pytest.raises(
            ValueError,
            match=r"double would have to compile, and max_compiles=2 allows no more\. "
            r"Changed: x: float32\[4\] -> float32\[5\]\. Keep shapes",
        ):
            fn(x)
        np.testing.assert_array_equal(x, X[:5])
    # What is compiled still runs.
    np.testing.assert_array_equal(fn(jnp.asarray(X)), 2 * X)
    assert not caplog.records


def test_a_budget_is_positive():
    with pytest.raises(ValueError, match="max_compiles=0 must be at least 1, or None"):
        make_double(max_compiles=0)
