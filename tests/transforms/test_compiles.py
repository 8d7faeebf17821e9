"""Compiles after the first: explained once, each with what changed, or refused."""

import functools as ft
import logging
import re
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax.extend import core

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
    """Objects that cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no text")


class Nameless(Broken):
    """Objects that do not even have attributes."""

    def __getattr__(self, name):
        raise RuntimeError("no attributes")


@dataclass
class Undescribed:
    """Objects that JAX can flatten, with a field that cannot be read."""

    x: Any
    late: int = field(init=False)

    def __getattribute__(self, name):
        if name == "late":
            raise RuntimeError("too early")
        return super().__getattribute__(name)


jax.tree_util.register_pytree_with_keys(
    Undescribed,
    lambda node: (((jax.tree_util.GetAttrKey("x"), node.x),), None),
    lambda _, children: Undescribed(*children),
)


def double(x, n=1):
    """Doubles the arrays of anything."""
    return jax.tree.map(lambda leaf: leaf * 2, eqx.filter(x, eqx.is_array))


def make_double(**options):
    return eqxshard.filter_jit(double, **options)


def placed(spec, order: Any = slice(None)):
    mesh = make_mesh()
    mesh = jax.sharding.Mesh(mesh.devices.flatten()[order].reshape(-1), ("data",))
    return jax.device_put(X, jax.NamedSharding(mesh, spec))


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
    "the order of devices": (
        placed(jax.P("data")),
        placed(jax.P("data"), [0, 7, 2, 3, 4, 5, 6, 1]),
        "x: sharding P('data',) on 8 x cpu (data=8), devices 1, 7 -> devices 7, 1.",
    ),
    "devices": (
        placed(jax.P("data"), slice(4)),
        placed(jax.P("data"), slice(4, None)),
        "x: sharding P('data',) on 4 x cpu (data=4), devices 0, 1, 2, 3 -> "
        "devices 4, 5, 6, 7.",
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
    "shape": "Keep shapes the same. If you expect this",
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


@pytest.mark.parametrize("name", ["batch", "batches", "x"])
def test_the_loader_is_named_for_batches_only(name, caplog):
    fn = eqxshard.filter_jit(lambda batch=None, batches=None, x=None: (batch, batches, x))
    fn(**{name: (X,)})
    fn(**{name: (X[:4],)})
    remedy = "Keep shapes the same. Loader(remainder=...) pads or drops the last batch."
    assert (remedy in caplog.text) == (name == "batch")
    assert "Keep shapes the same." in caplog.text


@pytest.mark.parametrize("kind", [Broken, Nameless])
def test_values_that_cannot_be_shown_are_named_by_their_type(kind, caplog):
    fn, name = make_double(), kind.__name__
    for value in (Unequal(), kind(), kind()):
        fn((X, value))
    assert f"x.1: Unequal() -> {name}. " in caplog.text
    assert f"x.1: {name} -> another object like it. " in caplog.text


def test_what_cannot_be_described_stops_no_call(caplog):
    fn = make_double()
    fn(X)
    fn(Undescribed(X))
    assert re.search(r"x: float32\[8\] -> [\w.]*test_compiles\.Undescribed\.", caplog.text)


def test_a_long_value_is_cut(caplog):
    class Shown:
        def __repr__(self):
            shown.append(self)
            return "Shown()"

    shown = []
    fn = make_double()
    fn((X, 1))
    fn((X, frozenset({tuple(Shown() for _ in range(1000))})))
    assert 0 < len(shown) < 20
    assert "x.1: 1 -> frozenset({(Shown(), Shown()," in caplog.text
    fn((X, "a" * 1000))
    assert "aa..." in caplog.text and "a" * 81 not in caplog.text


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


# What is not counted


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


def test_an_event_without_a_name_is_ignored(caplog):
    def fn(x):
        for event in ("jaxpr_to_mlir_module_duration", "backend_compile_duration"):
            event = f"/jax/core/compile/{event}"
            jax.monitoring.record_scalar(event, 0.0)
            jax.monitoring.record_event_duration_secs(event, 1.0)
        return x

    strict = eqxshard.filter_jit(fn, max_compiles=1)
    strict(X)
    # Now the events come when no compile is left.
    with pytest.raises(ValueError, match="max_compiles=1"):
        strict(X[:4])


def test_arguments_are_not_kept_alive():
    fn = make_double()
    x = jnp.asarray(X)
    fn(x)
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_functions_made_after_all_listeners_were_cleared_are_watched(caplog):
    jax.monitoring.clear_event_listeners()
    fn = make_double()
    fn(X)
    fn(X[:4])
    (record,) = caplog.records
    assert "double compiled again" in record.getMessage()


# A budget


@eqxshard.filter_jit(max_compiles=1)
def fails_for_four(x):
    """Is traced and lowered for any number, and compiles for any but 4."""
    if x.shape[0] != 4:
        return x
    return jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_a_compile_that_fails_is_not_counted():
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="nowhere"):
            fails_for_four(X[:4])
    fails_for_four(X)
    with pytest.raises(ValueError, match=r"Changed: x: shape \(8,\) -> \(4,\)"):
        fails_for_four(X[:4])


def test_an_error_of_lowering_is_not_replaced():
    primitive = core.Primitive("unknown")
    primitive.def_abstract_eval(lambda x: x)
    fn = eqxshard.filter_jit(
        lambda x: primitive.bind(x) if x.shape[0] == 4 else x, max_compiles=1
    )
    fn(X)
    with pytest.raises(NotImplementedError, match="unknown"):
        fn(X[:4])


def test_compiles_beyond_the_budget_are_refused():
    fn = make_double(max_compiles=2)
    fn(X)
    fn(X[:4])
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"double would have to compile, and max_compiles=2 allows no more\. "
            r"Changed: x: shape \(4,\) -> \(5,\)\. Keep shapes the same\.",
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
