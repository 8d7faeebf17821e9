"""`equinox.error_if` in a model, on one device and on several."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RULES, Model, copied, lenient, make_batch, make_mesh, source

import eqxshard
from eqxshard.testing import collectives

OPTIM = lenient(optax.adam(1e-2))
KEY = jax.random.key(0)


def check(x, fails, message):
    return eqx.error_if(x, fails, message)


def in_scan(x, fails):
    def body(x, step):
        return check(x, fails & (step == 1), "in_scan"), None

    return jax.lax.scan(body, x, jnp.arange(3))[0]


def in_while(x, fails):
    def body(loop):
        step, x = loop
        return step + 1, check(x, fails & (step == 2), "in_while")

    loop = jnp.int32(0), jax.lax.stop_gradient(x)
    return x + 0 * jax.lax.while_loop(lambda loop: loop[0] < 4, body, loop)[1]


def in_while_under_vmap(x, fails):
    def one(x, length):
        def body(loop):
            step, x = loop
            return step + 1, check(x, fails & (step == 2), "in_while_under_vmap")

        loop = jnp.int32(0), jax.lax.stop_gradient(x)
        return jax.lax.while_loop(lambda loop: loop[0] < length, body, loop)[1]

    return x + 0 * jax.vmap(one)(x, jnp.arange(x.shape[0]))


def in_cond(x, fails):
    positive = x.sum() > 1e6
    return jax.lax.cond(positive, lambda x: x + 1, lambda x: check(x, fails, "in_cond"), x)


def in_checkpoint(x, fails):
    def inner(x):
        return 2 * check(x, fails, "in_checkpoint")

    return jax.checkpoint(inner)(x)


def in_custom_vjp(x, fails):
    @jax.custom_vjp
    def inner(x, fails):
        return check(x, fails, "in_custom_vjp")

    inner.defvjp(lambda x, fails: (inner(x, fails), None), lambda _, g: (g, None))
    return inner(x, fails)


def in_jit(x, fails):
    return eqx.filter_jit(lambda x: check(x, fails, "in_jit"))(x)


def one_of_several(x, fails):
    index = jnp.where(fails, 1, 0)
    return eqx.internal.branched_error_if(x, fails, index, ["other", "one_of_several"])


def on_each_device(x, fails):
    axes = ("data", "fsdp")

    def local(x, fails):
        return check(x, fails & (jax.lax.axis_index(axes) == 0), "on_each_device")

    mesh = jax.sharding.get_abstract_mesh()
    specs: dict = dict(in_specs=(jax.P(axes), jax.P()), out_specs=jax.P(axes))
    spread = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    return spread(x, fails)


CASES = [
    on_each_device,
    in_scan,
    in_while,
    in_while_under_vmap,
    in_cond,
    in_checkpoint,
    in_custom_vjp,
    in_jit,
    one_of_several,
]
SEEN = []
#: The callback is intended.
LINT: Any = {"callback": "off"}


def losses(model, batch, key):
    """Losses, after all checks. Of these, the one whose number is in the batch fails."""
    x = batch["x"]
    for number, case in enumerate(CASES):
        x = case(x, jnp.any(batch["failing"] == number))
    out = jax.vmap(eqx.nn.inference_mode(model))(check(x, jnp.any(x > 100), "x {large}"))
    # Other callbacks are left alone.
    jax.debug.callback(lambda n: SEEN.append(int(n)), jnp.max(batch["failing"]))
    return jnp.sum((out - batch["y"]) ** 2, axis=-1)


def batch_of(failing=-1):
    number = np.full(32, -1, np.int32)
    number[5] = failing
    return make_batch() | {"failing": number}


def placed(mesh):
    return {"mesh": make_mesh(mesh), "rule": RULES["fsdp"]}


@pytest.fixture(scope="module")
def eval_step():
    where = placed("data=1")
    step = eqxshard.make_eval_step(
        lambda model, batch: {"loss": losses(model, batch, KEY)}, lint=LINT, **where
    )
    return step, eqxshard.init_state(Model, OPTIM, key=KEY, **where).model


@pytest.mark.versions
@pytest.mark.parametrize("number, case", [*enumerate(CASES)])
def test_evaluation_reports_a_check(eval_step, number, case):
    step, model = eval_step
    with pytest.raises(
        eqx.EquinoxRuntimeError, match=f"EquinoxRuntimeError: {case.__name__}"
    ):
        step(model, batch_of(number))


@pytest.mark.slow
def test_training_reports_each_check():
    where = placed("data=2,fsdp=4")
    step = eqxshard.make_train_step(losses, OPTIM, accumulate=2, lint=LINT, **where)
    first = eqxshard.init_state(Model, OPTIM, key=KEY, **where)
    state = copied(first)
    SEEN.clear()
    for _ in range(3):
        state, metrics = step(state, batch_of())
        assert np.isfinite(metrics.compute()["loss"])
    jax.effects_barrier()
    assert set(SEEN) == {-1}
    for number, case in enumerate(CASES):
        with pytest.raises(eqx.EquinoxRuntimeError, match=case.__name__):
            step(copied(first), batch_of(number))
    large = batch_of() | {"x": np.full((32, 8), 1000, np.float32)}
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"x \{large\}"):
        step(first, large)


def checked_losses(model, batch, key):
    """Losses of a model whose inputs are checked."""
    x = eqx.error_if(batch["x"], jnp.any(jnp.abs(batch["x"]) > 100), "x is too large")
    out = jax.vmap(eqx.nn.inference_mode(model))(x)
    return jnp.sum((out - batch["y"]) ** 2, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["host", "device"])
def test_fit_and_evaluate_report_a_check(placement):
    where = placed("data=2,fsdp=4")
    arrays = source().gather(np.arange(100))
    arrays["x"][77] = 1000
    loader = eqxshard.Loader(
        eqxshard.data.ArraySource(arrays),
        batch_size=32,
        mesh=where["mesh"],
        shuffle=False,
        placement=placement,
    )
    state = eqxshard.init_state(Model, OPTIM, key=KEY, **where)
    eval_step = eqxshard.make_eval_step(
        lambda model, batch: {"loss": checked_losses(model, batch, KEY)}, **where
    )
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is too large"):
        eqxshard.evaluate(state.model, eval_step, loader)
    loader.seek(0)
    train_step = eqxshard.make_train_step(checked_losses, OPTIM, **where)
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is too large"):
        eqxshard.fit(state, train_step, loader, steps=4)


def test_a_check_that_holds_moves_nothing_between_devices():
    where = placed("data=2,fsdp=4")
    state = eqxshard.init_state(Model, OPTIM, key=KEY, **where)

    def bytes_moved(check):
        def loss_fn(model, batch, key):
            hidden = check(jax.vmap(model.first)(batch["x"]))
            out = jax.vmap(model.last)(jnp.tanh(hidden))
            return jnp.sum((out - batch["y"]) ** 2, axis=-1)

        train_step = eqxshard.make_train_step(loss_fn, OPTIM, **where)
        lowered = train_step.lower(state, make_batch())
        return sum(collectives(lowered.compile()).bytes.values())

    checked = bytes_moved(lambda x: check(x, jnp.any(x > 100), "too large"))
    # True if a value was too large on any device.
    assert checked <= bytes_moved(lambda x: x) + 8


@pytest.mark.parametrize("mesh", ["data=1", "data=2,fsdp=4"])
def test_a_check_in_the_condition_of_a_loop_is_reported(mesh):
    """No number comes out of there, so its callback tells the host."""

    def metric_fn(model, batch):
        def goes_on(x):
            return jnp.all(check(x, x.sum() > 1e6, "in a condition") < 3)

        return {"x": jax.lax.while_loop(goes_on, lambda x: x + 1, batch["x"])[:, 0]}

    where = placed(mesh)
    # The condition is over all examples.
    lint = {**LINT, "global-batch": "off"}
    eval_step = eqxshard.make_eval_step(metric_fn, lint=lint, **where)
    model = eqxshard.init_state(Model, OPTIM, key=KEY, **where).model
    batch = make_batch()
    for _ in range(2):
        moved = jax.lax.while_loop(lambda x: jnp.all(x < 3), lambda x: x + 1, batch["x"])
        measured = eval_step(model, batch).compute()["x"]
        assert measured == pytest.approx(float(moved[:, 0].mean()))
        with pytest.raises(eqx.EquinoxRuntimeError, match="in a condition"):
            eval_step(model, batch | {"x": np.full((32, 8), 1e6, np.float32)}).compute()


def test_a_loop_that_only_a_check_ends_ends():
    def metric_fn(model, batch):
        def body(loop):
            step, x = loop
            return step + 1, check(x, step > 20, "too many steps")

        x = jax.lax.while_loop(lambda loop: loop[1][0, 0] < 1e6, body, (0, batch["x"]))[1]
        return {"x": x[:, 0]}

    where = placed("data=2,fsdp=4")
    eval_step = eqxshard.make_eval_step(metric_fn, lint=LINT, **where)
    model = eqxshard.init_state(Model, OPTIM, key=KEY, **where).model
    with pytest.raises(eqx.EquinoxRuntimeError, match="too many steps"):
        eval_step(model, make_batch())
