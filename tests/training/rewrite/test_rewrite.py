"""Rewritten programs return what plain JAX returns, whatever is in them."""

import traceback
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded, on_versions
from helpers import RULES, make_mesh
from jax.experimental import io_callback
from jax.extend import core
from rewrite_programs import GROUPS
from step_helpers import call_rewritten

import eqxshard
from eqxshard.training._jit import step_rules
from eqxshard.training.rewrite._checks import Errors
from eqxshard.training.rewrite._convolutions import fast_convolutions
from eqxshard.training.rewrite._jaxprs import equations, map_jaxpr, open_jaxpr

#: The least number of primitives that the programs of the sweep have together.
PRIMITIVES = 165
#: Many of the programs are over the whole batch.
LINT: Any = {"callback": "off", "global-batch": "off"}
SGD = optax.sgd(1.0)
BATCH = {"x": np.asarray(jax.random.normal(jax.random.key(1), (8, 4)))}


@pytest.fixture(autouse=True)
def as_users_run():
    """Other libraries mix dtypes and ranks, which our tests forbid everybody else."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make_weights(programs):
    """A matrix for each program, whose gradient depends on that program alone."""
    return lambda key: {
        name: 0.3 * jax.random.normal(jax.random.fold_in(key, i), (4, 4))
        for i, name in enumerate(programs)
    }


def measure(programs, weights, batch):
    """A number for each program, from all that it returns."""

    def number(leaf):
        leaf = jnp.asarray(leaf)
        real = jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf.astype(jnp.float32)
        return jnp.mean(jnp.sin(real))

    outs = {name: fn(weights[name], batch["x"]) for name, fn in programs.items()}
    return {name: sum(map(number, jax.tree.leaves(out))) for name, out in outs.items()}


def assert_close(ours, theirs):
    for name, value in theirs.items():
        # One rounds to bfloat16 on the way.
        rtol, atol = (2e-2, 1e-3) if name == "half" else (2e-4, 2e-5)
        np.testing.assert_allclose(ours[name], value, rtol, atol, err_msg=name)


class Sweep:
    """The programs of a group, in a train step and an eval step, and as JAX runs them."""

    def __init__(self, group, mesh="data=1"):
        self.trained, others = GROUPS[group]
        self.all = self.trained | others
        where: dict[str, Any] = {"mesh": make_mesh(mesh), "rule": RULES["fsdp"]}
        self.state = eqxshard.init_state(
            make_weights(self.all), SGD, key=jax.random.key(0), **where
        )
        self.weights = jax.tree.map(np.asarray, self.state.model)

    def loss(self, weights, batch):
        return sum(measure(self.trained, weights, batch).values(), jnp.float32(0))

    def measure(self, weights, batch):
        values = measure(self.all, weights, batch)
        return values, jax.grad(self.loss)(weights, batch) if self.trained else {}

    def check(self):
        """Compare the values and gradients of the steps with those of plain JAX."""
        values, gradients = jax.jit(self.measure)(self.weights, BATCH)
        eval_step = eqxshard.make_eval_step(
            lambda weights, batch: measure(self.all, weights, batch),
            lint=LINT,
        )
        assert_close(eval_step(self.state.model, BATCH).compute(), values)
        if not self.trained:
            return
        train_step = eqxshard.make_train_step(
            lambda weights, batch, key: self.loss(weights, batch),
            SGD,
            lint=LINT,
        )
        state, metrics = train_step(self.state, BATCH)
        assert "nonfinite" not in metrics.compute()
        ours = jax.tree.map(lambda a, b: a - np.asarray(b), self.weights, state.model)
        assert_close(ours, gradients)


# Those of the solvers take minutes, and have few primitives that the others do not have.
@pytest.mark.slow
@pytest.mark.parametrize("group", on_versions(GROUPS, GROUPS.keys() - {"solvers"}))
def test_steps_return_what_jax_returns(group):
    Sweep(group).check()


@pytest.mark.parametrize(
    "group", graded(["linalg", "control flow", "solvers"], slow=["linalg", "control flow"])
)
def test_steps_on_eight_devices_return_what_jax_returns_on_one(group):
    Sweep(group, "data=2,fsdp=4").check()


@pytest.mark.slow
def test_rewritten_programs_are_well_formed_and_have_most_primitives(record_property):
    met = set()
    # Programs that take long to trace have few that the others do not have.
    for group in GROUPS.keys() - {"solvers"}:
        sweep = Sweep(group)
        jaxpr = jax.make_jaxpr(sweep.measure)(sweep.weights, BATCH)
        met |= {eqn.primitive.name for eqn in equations(jaxpr)}
        rewritten = step_rules(make_mesh("data=1"), Errors()).rewrite(jaxpr)
        core.check_jaxpr(open_jaxpr(rewritten))
    record_property("primitives", len(met))
    print(f"{len(met)} primitives: {' '.join(sorted(met))}")
    assert len(met) >= PRIMITIVES


@pytest.mark.slow
def test_without_rewrites_steps_return_the_same(monkeypatch):
    monkeypatch.setenv("EQXSHARD_REWRITE", "off")
    forbid = lambda *_: pytest.fail("rewritten")  # noqa: E731
    monkeypatch.setattr("eqxshard.training._jit.step_rules", forbid)
    Sweep("convolutions").check()


# One program


def make(loss_fn, mesh="data=1", **options):
    """A state of one weight, and a train step of a loss function."""
    where: dict[str, Any] = {"mesh": make_mesh(mesh), "rule": RULES["fsdp"]}
    make_model = lambda key: eqx.nn.Linear(4, 4, key=key)  # noqa: E731
    state = eqxshard.init_state(make_model, SGD, key=jax.random.key(0), **where)
    return state, eqxshard.make_train_step(loss_fn, SGD, lint=LINT, **options)


def test_the_switch_is_on_or_off(monkeypatch):
    monkeypatch.setenv("EQXSHARD_REWRITE", "no")
    state, train_step = make(lambda model, batch, key: jnp.sum(model.weight))
    with pytest.raises(ValueError, match="EQXSHARD_REWRITE is 'no'; set it to 'on' or"):
        train_step(state, BATCH)


def broken(_):
    raise KeyError("num_consts")


def wrong(jaxpr):
    """The first array of each equation, in another type."""
    apply = lambda inputs: [inputs[0].astype(jnp.bfloat16)]  # noqa: E731
    return dict.fromkeys(range(len(jaxpr.eqns)), apply)


def swapped(mesh, errors):
    """Rewrites to the same values in another order, and so of other types."""
    swap = lambda jaxpr: jaxpr.replace(outvars=jaxpr.outvars[::-1])  # noqa: E731
    return types.SimpleNamespace(rewrite=lambda jaxpr: map_jaxpr(swap, jaxpr))


@pytest.mark.versions
@pytest.mark.parametrize(
    "name, rewrite",
    [
        ("fast_convolutions", broken),
        ("fast_convolutions", wrong),
        ("step_rules", swapped),
    ],
)
def test_what_cannot_be_rewritten_runs_as_it_was(name, rewrite, monkeypatch):
    monkeypatch.setattr(f"eqxshard.training._jit.{name}", rewrite)
    solves = lambda model, batch, key: jnp.linalg.solve(model.weight, batch["x"].T).sum(0)  # noqa: E731
    with pytest.warns(RuntimeWarning, match="could not rewrite a step") as warned:
        losses = [
            step(state, BATCH)[1]["loss"] for state, step in (make(solves), make(solves))
        ]
    assert len(warned) == 1
    weight = np.asarray(make(solves)[0].model.weight)
    expected = np.linalg.solve(weight, BATCH["x"].T).sum(0).mean()
    np.testing.assert_allclose(losses, [expected] * 2, rtol=1e-3)


@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
def test_a_mistake_in_a_loss_keeps_its_line(mesh):
    def loss_fn(model, batch, key):
        return jnp.sum(batch["x"] @ model.weight[:3], axis=1)

    state, train_step = make(loss_fn, mesh)
    with pytest.raises(TypeError, match="dot_general") as raised:
        train_step(state, BATCH)
    names = [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert "loss_fn" in names and "_rewrite_or_leave" not in names


def test_effects_happen_once_and_in_order():
    seen = []

    def see(step):
        seen.append(("loop", int(step)))
        return np.float32(step)

    def loss_fn(model, batch, key):
        x = eqx.error_if(batch["x"], jnp.any(jnp.isnan(batch["x"])), "nan")

        def body(carry, step):
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            io_callback(see, shape, step, ordered=True)
            return eqx.error_if(carry, step > 9, "long") + 1, None

        jax.debug.callback(lambda n: seen.append(("first", int(n))), 1, ordered=True)
        total, _ = jax.lax.scan(body, jnp.float32(0), jnp.arange(3))
        jax.debug.callback(lambda n: seen.append(("last", int(n))), total, ordered=True)
        return jnp.sum((x @ model.weight) ** 2, axis=1)

    state, train_step = make(loss_fn)
    train_step(state, BATCH)
    jax.effects_barrier()
    assert seen == [("first", 1), *(("loop", n) for n in range(3)), ("last", 3)]


ODD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}


@pytest.mark.parametrize("odd", ODD)
def test_values_that_are_not_finite_stay_where_plain_jax_has_them(odd, size=3):
    """Checked in the outputs and gradients of a convolution, a bias and a pool."""

    def loss(weight, bias, x):
        y = jax.lax.conv(x, weight, (1, 1), "SAME") + bias[:, None, None]
        ones = (1, 1, 2, 2)
        pooled = jax.lax.reduce_window(y, 0.0, jax.lax.add, ones, ones, "VALID")
        return jnp.sum(pooled, axis=(1, 2, 3)), pooled

    def gradients(weight, bias, x):
        total = lambda *args: jnp.sum(loss(*args)[0])  # noqa: E731
        return loss(weight, bias, x), jax.grad(total, (0, 1, 2))(weight, bias, x)

    rng = np.random.default_rng(0)
    shapes = (2, 1, size, size), (2,), (3, 1, 9, 9)
    weight, bias, x = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    x[1, 0, 4, 3] = ODD[odd]
    fast = lambda *args: call_rewritten(gradients, fast_convolutions, *args)  # noqa: E731
    ours, theirs = jax.jit(fast)(weight, bias, x), jax.jit(gradients)(weight, bias, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
