import functools as ft
import gc
import weakref
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard

MESH = eqxshard.make_mesh(data=2, fsdp=4)
WHOLE = NamedSharding(MESH, P())
SPLIT = NamedSharding(MESH, P("fsdp"))
X = np.arange(8, dtype=np.float32)


class Scale(eqx.Module):
    """Arrays, a static leaf, a static field, and methods compiled in two ways."""

    weight: jax.Array
    activation: Callable
    power: int = eqx.field(static=True)

    def __init__(self, weight=2.0, activation=jnp.tanh, power=1):
        self.weight = jnp.full(8, weight)
        self.activation = activation
        self.power = power

    def __call__(self, x):
        return self.activation(self.weight * x) ** self.power

    def plus(self, x, *, bias):
        return self(x) + bias

    @eqxshard.filter_jit
    def compiled(self, x):
        return self(x)

    @eqxshard.filter_jit(donate="all-except-first")
    def donating(self, x):
        return self(x)


def traced(fn):
    """The function, and a list that grows by one each time that it is traced."""
    traces = []

    @ft.wraps(fn)
    def counted(*args, **kwargs):
        traces.append(None)
        return fn(*args, **kwargs)

    return counted, traces


# Filtering


def apply(model, x, *more, scale=1.0, activation=None, **rest):
    y = scale * model(x)
    for other in more:
        y = y + other
    for name in sorted(rest):
        y = y * rest[name]
    return y if activation is None else activation(y)


CALLS = {
    "module": (apply, (Scale(), X), {}),
    "static argument": (apply, (Scale(), X), {"scale": 3.0, "activation": jnp.cos}),
    "variable arguments": (apply, (Scale(), X, X, X), {"a": X, "b": 0.5}),
    "trees": (
        lambda t: {"out": [t["a"][0] + t["b"], t["c"]]},
        ({"a": (X,), "b": X, "c": 1},),
        {},
    ),
    "callable module": (Scale(), (X,), {}),
    "bound method": (Scale().plus, (X,), {"bias": jnp.ones(8)}),
    "nothing": (lambda: None, (), {}),
    "results that are modules": (
        lambda m, x: (
            eqx.tree_at(lambda m: m.weight, m, m.weight + x),
            "name",
            3,
            None,
            jnp.sin,
        ),
        (Scale(power=3), X),
        {},
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_it_computes_what_equinox_does(call):
    fn, args, kwargs = CALLS[call]
    ours = eqxshard.filter_jit(fn)(*args, **kwargs)
    theirs = eqx.filter_jit(fn)(*args, **kwargs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert eqx.tree_equal(ours, theirs)


def test_the_programs_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr("eqxshard.transforms._filter_jit.MAX_PROGRAMS", 2)
    fn, traces = traced(lambda add, x: add(x))
    jitted = eqxshard.filter_jit(fn)

    def adding(number):
        return lambda x: x + number

    first, second = adding(1), adding(2)
    for _ in range(2):
        jitted(first, X)
        jitted(second, X)
    jitted(first, X)
    assert len(traces) == 2
    gone = weakref.ref(second)
    del second
    # A third one replaces the second, which has not been used for longest.
    np.testing.assert_array_equal(jitted(adding(3), X), X + 3)
    jitted(first, X)
    assert len(traces) == 3
    gc.collect()
    assert gone() is None


def test_methods():
    model = Scale()
    for method in (model.compiled, model.donating):
        np.testing.assert_allclose(method(jnp.asarray(X)), model(X), rtol=1e-6)
    np.testing.assert_allclose(Scale.compiled(model, X), model(X), rtol=1e-6)


@pytest.mark.versions
def test_it_composes_with_other_transforms():
    square = eqxshard.filter_jit(lambda model, x: jnp.sum(model.weight * x**2))
    model = Scale(weight=3.0)
    np.testing.assert_allclose(jax.grad(square, argnums=1)(model, jnp.asarray(X)), 6 * X)
    np.testing.assert_allclose(eqx.filter_grad(square)(model, X).weight, X**2)
    rows = jax.vmap(square, in_axes=(None, 0))(model, np.stack([X, 2 * X]))
    np.testing.assert_allclose(rows[1], 4 * rows[0])
    np.testing.assert_allclose(jax.jit(lambda x: square(model, x))(X), rows[0])


# One trace for each program


@pytest.mark.versions
def test_arrays_trace_once_and_static_values_anew():
    fn, traces = traced(lambda x, n, f: f(x) * n)
    jitted = eqxshard.filter_jit(fn)
    for x, n, f, count in [
        (X, 2, jnp.sin, 1),
        (X + 1, 2, jnp.sin, 1),
        (X, 3, jnp.sin, 2),
        (X, 2, jnp.cos, 3),
        (X, 2, jnp.sin, 3),
        (X[:4], 2, jnp.sin, 4),
        # Equal, and of another type.
        (X, 2.0, jnp.sin, 5),
    ]:
        # By keyword and by position it is one program, and `lower` traces it, too.
        jitted.lower(jax.ShapeDtypeStruct(x.shape, x.dtype), n, f)
        np.testing.assert_allclose(jitted(x, f=f, n=n), f(x) * n, rtol=1e-6)
        assert len(traces) == count


def test_arrays_of_the_function_are_arguments_and_not_constants():
    model = Scale()
    text = eqxshard.filter_jit(model).lower(X).as_text()
    assert "jit_Scale" in text
    assert "%arg1: tensor<8xf32>" in text


# Donation


def add_one(x):
    return x + 1


def donate(how):
    """The arguments of a call that are deleted."""
    args = [jnp.full(8, float(i)) for i in range(3)]
    jitted = eqxshard.filter_jit(lambda *args: jax.tree.map(add_one, args), donate=how)
    for i, x in enumerate(jitted(*args)):
        np.testing.assert_array_equal(x, np.full(8, i + 1.0))
    return [i for i, x in enumerate(args) if x.is_deleted()]


@pytest.mark.versions
@pytest.mark.parametrize(
    "how, deleted",
    [
        ("none", []),
        ("all", [0, 1, 2]),
        ("all-except-first", [1, 2]),
        (2, [2]),
        ((), []),
        ([0, 2], [0, 2]),
    ],
)
def test_donation_deletes_what_was_named(how, deleted):
    assert donate(how) == deleted


def test_donation_of_modules_and_keywords():
    def step(model, x, scale=1.0, state=None, *, extra):
        return jax.tree.map(lambda x: x * scale, (model.weight, x, state, extra))

    def deleted(how):
        model, x, state, extra = Scale(), jnp.ones(8), jnp.ones(8), jnp.ones(8)
        # `scale` is left out, and the state keeps its position.
        eqxshard.filter_jit(step, donate=how)(model, x, extra=extra, state=state)
        return [leaf.is_deleted() for leaf in (model.weight, x, state, extra)]

    assert deleted(0) == [True, False, False, False]
    assert deleted(3) == [False, False, True, False]
    assert deleted((1, 3)) == [False, True, True, False]
    assert deleted("all") == [True] * 4
    assert deleted("all-except-first") == [False, True, True, True]
    # An argument without a position is not donated in place of one that was left out.
    extra = jnp.ones(8)
    eqxshard.filter_jit(step, donate=2)(Scale(), jnp.ones(8), extra=extra)
    assert not extra.is_deleted()


@pytest.mark.parametrize(
    "make", [lambda m: m, lambda m: m.__call__], ids=["module", "method"]
)
def test_arrays_of_the_function_are_never_donated(make):
    model, x = Scale(), jnp.ones(8)
    eqxshard.filter_jit(make(model), donate="all")(x)
    assert x.is_deleted()
    assert not model.weight.is_deleted()


@pytest.mark.parametrize("how", ["first", None, -1, False, (0, "all")])
def test_donate_is_checked(how, unannotated):
    with pytest.raises(
        ValueError, match="is not 'none', 'all', 'all-except-first', or one"
    ):
        eqxshard.filter_jit(lambda x, y: x, donate=how)


def test_a_position_to_donate_must_exist():
    with pytest.raises(ValueError, match=r"\(2,\), but only accepts 2 positional"):
        eqxshard.filter_jit(lambda x, y, *, z: x, donate=2)


# Shardings


def test_shardings_of_a_module_as_a_rule_decides():
    model = Scale()
    places = eqxshard.shardings(model, MESH, eqxshard.fsdp(min_size=1))
    jitted = eqxshard.filter_jit(
        lambda model: eqx.tree_at(lambda m: m.weight, model, model.weight + 1),
        donate="all",
        out_shardings=places,
    )
    once = jitted(model)
    twice = jitted(once)
    assert once.weight.is_deleted()
    assert twice.weight.sharding == SPLIT
    assert twice.activation is jnp.tanh
    np.testing.assert_array_equal(twice.weight, np.full(8, 4.0))


def test_out_shardings_are_a_prefix_of_the_result():
    def fn(x):
        return {"a": [x + 1, "name"], "b": x + 2, "c": x + 3}

    x = jax.device_put(X, WHOLE)
    out = eqxshard.filter_jit(fn, out_shardings=SPLIT)(x)
    assert [out[name].sharding.spec for name in "bc"] == [P("fsdp")] * 2
    assert out["a"][1] == "name"
    places = {"a": SPLIT, "b": None, "c": WHOLE}
    out = eqxshard.filter_jit(fn, out_shardings=places)(x)
    assert [out["a"][0].sharding.spec, out["c"].sharding.spec] == [P("fsdp"), P()]
    # From one device to the mesh.
    assert eqxshard.filter_jit(lambda x: x, out_shardings=SPLIT)(X).sharding == SPLIT


def test_shardings_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match=r"a\.0 \(6,\).* over fsdp=4, which does not"):
        eqxshard.filter_jit(lambda x: {"a": [x]}, out_shardings=SPLIT)(X[:6])


# lower


@pytest.mark.versions
def test_lower_takes_shapes_and_static_values():
    jitted = eqxshard.filter_jit(lambda model, x, n: model(x) * n, donate=1)
    shapes = eqx.filter_eval_shape(Scale)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=SPLIT)
    lowered = jitted.lower(shapes, x, n=2)
    assert isinstance(lowered, jax.stages.Lowered)
    compiled = lowered.compile()
    assert compiled.input_shardings[0][1].is_equivalent_to(SPLIT, 1)
    assert "f32[2]" in (compiled.as_text() or "")


# What is neither an array nor hashable


class Unhashable:
    def __call__(self, x):
        return x

    def __eq__(self, other):
        return self is other


def test_what_is_not_hashable_is_named():
    jitted = eqxshard.filter_jit(lambda x, *, options=None: (x, options))
    advice = "neither an array nor hashable; make it an array, or something hashable"
    for fn, path in [
        (lambda: jitted([X, {"a": {1, 2}}]), r"args\.0\.1\.a is a set"),
        (lambda: jitted(X, options=bytearray()), r"kwargs\.options is a bytearray"),
        (lambda: eqxshard.filter_jit(lambda x: (x, {1}))(X), r"result\.1 is a set"),
        (lambda: eqxshard.filter_jit(Unhashable()), r"fn is a Unhashable"),
    ]:
        with pytest.raises(TypeError, match=f"^{path}, {advice}"):
            fn()
