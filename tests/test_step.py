import functools
import os
import subprocess
import sys
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    MESHES,
    RULES,
    Model,
    arrays,
    assert_close,
    assert_equal,
    compiles,
    lenient,
    make_batch,
    make_mesh,
    squared_errors,
    stack,
)
from jax.sharding import PartitionSpec as P

import eqxshard

OPTIM = lenient(optax.adam(1e-2))
KEY = jax.random.key(0)


def make(mesh, rule, loss_fn=squared_errors, optim=OPTIM, **options):
    """A state, and a step that nobody has called yet."""
    mesh, rule = make_mesh(mesh), RULES[rule]
    state = eqxshard.init_state(Model, optim, key=KEY, mesh=mesh, rule=rule)
    return state, eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule, **options)


make_once = functools.cache(make)


def setup(mesh="data=8", rule="replicate", **options):
    """A fresh state, and a step that may be compiled already."""
    state, train_step = make_once(mesh, rule, **options)
    return jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, state), train_step


def by_hand(state, batch, weight):
    """The same step, written with nothing but JAX on one device."""
    params, static = eqx.partition(state.model, eqx.is_inexact_array)
    params, opt_state = jax.device_put((params, state.opt_state), jax.devices()[0])
    static = jax.device_put(eqx.filter(static, eqx.is_array), jax.devices()[0])
    static = eqx.combine(static, eqx.partition(state.model, eqx.is_array)[1])
    key = jax.random.fold_in(jax.device_put(state.key, jax.devices()[0]), int(state.step))

    def mean(params):
        losses = squared_errors(eqx.combine(params, static), batch, key)
        return jnp.sum(losses * weight) / jnp.sum(weight)

    loss, grads = jax.value_and_grad(mean)(params)
    updates, opt_state = OPTIM.update(grads, opt_state, params)
    return loss, eqx.apply_updates(params, updates), opt_state


WEIGHTS = {"even": None, "padded": np.arange(32) < 27, "uneven": np.linspace(0, 3, 32)}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_a_step_is_what_one_would_write_by_hand(mesh, rule, weight):
    state, train_step = setup(mesh, rule)
    batch = make_batch(weight=WEIGHTS[weight])
    given = np.ones(32, np.float32) if WEIGHTS[weight] is None else batch["weight"]
    loss, params, opt_state = by_hand(state, batch, given)
    state, metrics = train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.weight, given.sum(), rtol=1e-6)
    assert_close(eqx.filter(state.model, eqx.is_inexact_array), params)
    assert_close(state.opt_state, opt_state)
    assert int(state.step) == 1


def test_losses_and_metrics_may_be_scalars_or_one_per_example():
    def per_example(model, batch, key):
        losses = squared_errors(model, batch, key)
        return losses, {"double": 2 * losses, "first": batch["x"][:, 0] > 0}

    def scalars(model, batch, key):
        losses, metrics = per_example(model, batch, key)
        return jnp.mean(losses), jax.tree.map(
            lambda x: jnp.mean(x.astype(jnp.float32)), metrics
        )

    (one, step_one), (two, step_two) = setup(loss_fn=per_example), setup(loss_fn=scalars)
    one, metrics_one = step_one(one, make_batch())
    two, metrics_two = step_two(two, make_batch())
    assert_close(one, two)
    assert metrics_one.compute() == pytest.approx(metrics_two.compute(), rel=1e-5)
    assert metrics_one.compute().keys() == {"loss", "double", "first"}
    expected = np.mean(make_batch()["x"][:, 0] > 0)
    assert metrics_one.compute()["first"] == pytest.approx(expected)


def test_losses_of_another_shape_are_refused():
    state, train_step = setup(loss_fn=lambda m, b, key: squared_errors(m, b, key)[:, None])
    with pytest.raises(ValueError, match=r"loss has shape \(32, 1\) for a batch of 32"):
        train_step(state, make_batch())


def test_a_metric_may_not_take_the_name_of_the_loss():
    def loss_fn(model, batch, key):
        losses = squared_errors(model, batch, key)
        return losses, {"loss": losses}

    state, train_step = setup(loss_fn=loss_fn)
    with pytest.raises(ValueError, match="a metric is named 'loss'"):
        train_step(state, make_batch())


def test_batches_may_be_any_pytree():
    def loss_fn(model, batch, key):
        return squared_errors(model, {"x": batch[0], "y": batch[1]}, key)

    one, step_one = setup()
    two, step_two = setup(loss_fn=loss_fn)
    batch = make_batch()
    one, _ = step_one(one, batch)
    two, _ = step_two(two, (batch["x"], jnp.asarray(batch["y"])))
    assert_equal(one, two)


def without_dropout(model, batch, key):
    return squared_errors(eqx.nn.inference_mode(model), batch, key)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("data=2,fsdp=2", "fsdp")])
def test_accumulation_is_exact_whatever_the_weights(mesh, rule, weight):
    whole, whole_step = setup(mesh, rule, loss_fn=without_dropout)
    parts, parts_step = setup(mesh, rule, loss_fn=without_dropout, accumulate=4)
    for seed in range(3):
        batch = make_batch(seed=seed, weight=WEIGHTS[weight])
        whole, whole_metrics = whole_step(whole, batch)
        parts, parts_metrics = parts_step(parts, batch)
        assert parts_metrics.compute() == pytest.approx(whole_metrics.compute(), rel=1e-5)
    assert_close(whole, parts)


def test_accumulated_parts_get_keys_of_their_own():
    def noise(model, batch, key):
        return squared_errors(model, batch, key), {"noise": jax.random.uniform(key)}

    state, train_step = setup(loss_fn=noise, accumulate=4)
    seen = set()
    for seed in range(4):
        state, metrics = train_step(state, make_batch(seed=seed))
        seen.add(round(metrics.compute()["noise"], 6))
    key = jax.random.fold_in(state.key, 0)
    alone = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(4)]
    assert len(seen) == 4 and any(
        x == pytest.approx(np.mean(alone), abs=1e-5) for x in seen
    )


def test_accumulation_that_does_not_divide_is_refused():
    state, train_step = setup(accumulate=3)
    with pytest.raises(ValueError, match="accumulate=3 parts; use a multiple of 24"):
        train_step(state, make_batch())
    state, train_step = setup(accumulate=8)
    with pytest.raises(ValueError, match="accumulate=8 parts; use a multiple of 64"):
        train_step(state, make_batch())


@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_many_steps_in_one_dispatch_are_the_same_steps(mesh, rule):
    batches = [make_batch(seed=seed) for seed in range(5)]
    one, train_step = setup(mesh, rule)
    losses = []
    for batch in batches:
        one, metrics = train_step(one, batch)
        losses.append(float(metrics["loss"]))
    two, train_step = setup(mesh, rule)
    two, metrics = train_step.many(two, stack(batches))
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    assert metrics.compute()["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert_close(one, two)
    assert int(two.step) == 5


# What must not be computed with: a batch whose loss, or one whose gradient alone, is not
# finite (the root's slope at 0 is infinite).
def rooted(model, batch, key):
    return squared_errors(model, batch, key) + 0 * jnp.sqrt(
        jnp.abs(batch["x"][:, 0] * jnp.sum(model.last.bias))
    )


BAD = {
    "nan": lambda batch: {
        **batch,
        "x": np.where(np.arange(32)[:, None] == 7, np.nan, batch["x"]),
    },
    "infinite": lambda batch: {**batch, "y": batch["y"] + np.float32(np.inf)},
    "gradient only": lambda batch: {**batch, "x": 0 * batch["x"]},
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("fsdp=8", "fsdp")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(mesh, rule, bad):
    state, train_step = setup(mesh, rule, loss_fn=rooted)
    state, _ = train_step(state, make_batch())
    before = arrays((state.model, state.opt_state))
    _, good = train_step(setup(mesh, rule, loss_fn=rooted)[0], make_batch(seed=1))
    state, metrics = train_step(state, BAD[bad](make_batch(seed=1)))
    for path, array in arrays((state.model, state.opt_state)).items():
        np.testing.assert_array_equal(array, before[path], err_msg=path)
    assert int(state.step) == 2
    assert metrics.compute()["nonfinite"] == 1
    both = eqxshard.Metrics.stack([metrics, good]).compute()
    assert both == pytest.approx({**good.compute(), "nonfinite": 1})
    state, metrics = train_step(state, make_batch(seed=2))
    assert "nonfinite" not in metrics.compute()
    assert not np.array_equal(state.model.last.weight, before["[0].last.weight"])


def test_nonfinite_raise_says_which_step_and_ignore_does_not_look():
    state, train_step = setup(nonfinite="raise")
    state, _ = train_step(state, make_batch())
    with pytest.raises(FloatingPointError, match="not finite in step 2; look at its batch"):
        train_step(state, BAD["nan"](make_batch()))
    state, train_step = setup(nonfinite="ignore")
    state, _ = train_step(state, BAD["nan"](make_batch()))
    assert np.isnan(state.model.last.weight).all()


@pytest.mark.parametrize(
    "options, message",
    [({"accumulate": 0}, "accumulate=0"), ({"nonfinite": "stop"}, "nonfinite='stop'")],
)
def test_options_that_make_no_sense_are_refused(options, message, unannotated):
    with pytest.raises(ValueError, match=message):
        setup(**options)


@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_a_step_traces_and_compiles_once(mesh, rule):
    state, train_step = make(mesh, rule)
    places = eqxshard.batch_sharding(make_mesh(mesh))
    with compiles("train_step") as events:
        for seed in range(6):
            if seed == 4:  # Neither looking at a state nor changing it compiles anew.
                state = eqx.tree_at(
                    lambda s: s.model.last.bias, state, replace_fn=jnp.zeros_like
                )
            batch = eqxshard.filter_shard(make_batch(seed=seed), places)
            state, _ = train_step(state, batch)
    assert sorted(events) == [
        "backend_compile_duration",
        "jaxpr_to_mlir_module_duration",
        "jaxpr_trace_duration",
    ]


@pytest.mark.parametrize("mesh, rule", [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_every_buffer_of_the_state_is_used_again(mesh, rule):
    """Warnings of donation in vain are errors here."""
    state, train_step = setup(mesh, rule)
    state, _ = train_step(state, make_batch())

    def leaves():
        return [x for x in jax.tree.leaves(state) if eqx.is_array(x)]

    def pointers():
        return {
            shard.data.unsafe_buffer_pointer()
            for leaf in leaves()
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            for shard in leaf.addressable_shards
        }

    old_leaves, old = leaves(), pointers()
    memory: Any = train_step.lower(state, make_batch()).compile().memory_analysis()
    per_device = (
        sum(
            leaf.addressable_shards[0].data.nbytes
            for leaf in old_leaves
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        )
        + jax.random.key_data(state.key).nbytes
    )
    assert memory.alias_size_in_bytes == per_device
    state, _ = train_step(state, make_batch())
    assert all(leaf.is_deleted() for leaf in old_leaves)
    assert pointers() == old


def test_a_step_hands_the_batch_back():
    state, train_step = setup()
    batch = eqxshard.filter_shard(make_batch(), eqxshard.batch_sharding(make_mesh()))
    train_step(state, batch)
    assert not any(leaf.is_deleted() for leaf in batch.values())


def collectives(text):
    names = (
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
    )
    found = [line.split("=", 1)[1] for line in text.splitlines() if " = " in line]
    return [line for line in found for name in names if f" {name}(" in line]


def test_fsdp_gathers_weights_and_splits_the_batch():
    """Left alone, XLA would rather split the features than gather the weights."""
    width = 64
    mesh, rule = make_mesh("fsdp=8"), eqxshard.fsdp(min_size=width * width)
    optim = lenient(optax.sgd(0.1))
    state = eqxshard.init_state(
        lambda key: eqx.nn.MLP(width, width, width, 3, key=key),
        optim,
        key=KEY,
        mesh=mesh,
        rule=rule,
    )

    def loss_fn(model, batch, key):
        return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, axis=-1)

    train_step = eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule)
    batch = {"x": np.ones((32, width), np.float32)}
    lowered = train_step.lower(state, batch)
    # Four gradients, and as many old and new parameters, are told to lie split.
    split = [line for line in lowered.as_text().splitlines() if '[{"fsdp"}, {}]' in line]
    assert sum("sharding_constraint" in line for line in split) == 12
    text: Any = lowered.compile().as_text()
    gathers = [line for line in collectives(text) if " all-gather(" in line]
    assert len(gathers) == 4
    assert all(f"f32[{width},{width}]" in line for line in gathers)
    dots = [line for line in text.splitlines() if " dot(" in line]
    assert dots and all("f32[4,64]" in line or "f32[64,64]" in line for line in dots)
    assert not any("all-to-all" in line or "permute" in line for line in collectives(text))


def test_three_thousand_steps_do_not_deadlock():
    """In a process of its own: a deadlock of simulated devices ends in an abort."""
    program = """
        import jax
        jax.config.update("jax_num_cpu_devices", 8)
        import equinox as eqx, numpy as np, optax, eqxshard
        mesh, rule, optim = eqxshard.make_mesh(), eqxshard.replicate(), optax.adam(1e-3)
        state = eqxshard.init_state(
            lambda key: eqx.nn.MLP(4, 1, 4, 2, key=key), optim, key=jax.random.key(0),
            mesh=mesh, rule=rule,
        )
        train_step = eqxshard.make_train_step(
            lambda model, batch, key: jax.vmap(model)(batch)[:, 0] ** 2, optim, mesh=mesh,
            rule=rule,
        )
        batch = jax.device_put(np.ones((8, 4), np.float32), eqxshard.batch_sharding(mesh))
        for _ in range(3000):
            state, metrics = train_step(state, batch)
        print(int(state.step))
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert out.stdout.strip() == "3000", out.stderr[-2000:]


def mean_of_x(model, batch):
    out = jax.vmap(lambda x: model(x, key=jax.random.key(0)))(batch["x"])
    return {"x": batch["x"][:, 0], "out": out[:, 0], "scalar": jnp.float32(3)}


@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_an_eval_step_measures_and_donates_nothing(mesh, rule):
    state, _ = setup(mesh, rule)
    eval_step = eqxshard.make_eval_step(mean_of_x, mesh=make_mesh(mesh), rule=RULES[rule])
    weight = WEIGHTS["uneven"]
    batch = make_batch(weight=weight)
    metrics = eval_step(state.model, batch)
    again = eval_step(state.model, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if eqx.is_array(x))
    assert_equal(metrics, again)
    means = metrics.compute()
    assert means["x"] == pytest.approx(
        np.average(batch["x"][:, 0], weights=weight), rel=1e-4
    )
    assert means["scalar"] == pytest.approx(3)
    # In inference mode there is no dropout.
    quiet = eqx.nn.inference_mode(jax.device_put(state.model, jax.devices()[0]))
    expected = np.average(jax.vmap(quiet)(batch["x"])[:, 0], weights=weight)
    assert means["out"] == pytest.approx(expected, rel=1e-4)


def test_an_eval_step_compiles_once():
    state, train_step = setup()
    eval_step = eqxshard.make_eval_step(
        mean_of_x, mesh=make_mesh(), rule=RULES["replicate"]
    )
    with compiles("eval_step") as events:
        for seed in range(3):
            eval_step(state.model, make_batch(seed=seed))
            state, _ = train_step(state, make_batch(seed=seed))
    assert len(events) == 3


SHAPES = {
    "indivisible": (make_batch(12), "batch size 12 does not divide over data=8"),
    "empty": (make_batch(0), "batch size 0 is not a size"),
    "scalar": ({**make_batch(), "z": 3.0}, r"'z': \(1?,?\).* same leading ax"),
    "uneven": ({**make_batch(), "y": make_batch(16)["y"]}, "same leading ax"),
    "nothing": ({}, "same leading ax"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_that_do_not_fit_are_refused_and_the_state_is_kept(shape):
    batch, message = SHAPES[shape]
    state, train_step = setup()
    eval_step = eqxshard.make_eval_step(
        mean_of_x, mesh=make_mesh(), rule=RULES["replicate"]
    )
    for call in (
        lambda: train_step(state, batch),
        lambda: train_step.many(state, jax.tree.map(lambda x: np.asarray(x)[None], batch)),
        lambda: eval_step(state.model, batch),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    state, _ = train_step(state, make_batch())
    assert int(state.step) == 1


def test_a_state_that_was_donated_is_refused():
    """JAX 0.10 would crash."""
    state, train_step = setup()
    eval_step = eqxshard.make_eval_step(
        mean_of_x, mesh=make_mesh(), rule=RULES["replicate"]
    )
    model = state.model
    train_step(state, make_batch())
    with pytest.raises(ValueError, match="this state was donated to an earlier step"):
        train_step(state, make_batch())
    with pytest.raises(ValueError, match="donated to an earlier step, and its model"):
        eval_step(model, make_batch())


def test_a_state_of_another_mesh_rule_or_optimizer_is_refused(unannotated):
    state, _ = setup("data=2,fsdp=4", "fsdp")
    lies = r"lies as P.* on 8 x cpu \(data=2, fsdp=4\), and the step has it as P.* on "
    for mesh, rule in [("data=2,fsdp=4", "replicate"), ("data=4", "fsdp")]:
        own, step = make(mesh, rule)
        with pytest.raises(ValueError, match=lies):
            step(state, make_batch())
        step(own, make_batch())
        with pytest.raises(ValueError, match=lies):
            step(state, make_batch())
    other = make("data=2,fsdp=4", "fsdp", optim=lenient(optax.sgd(0.1)))[1]
    with pytest.raises(ValueError, match="use the optimizer, and trainable="):
        other(state, make_batch())
    with pytest.raises(
        TypeError, match="a Model is not a TrainState; make one with init_state"
    ):
        other(state.model, make_batch())


def test_a_state_may_be_moved_to_another_mesh():
    state, step = setup("data=2,fsdp=4", "fsdp")
    other, other_step = setup("data=4")
    state, _ = step(state, make_batch())
    other, _ = other_step(other, make_batch())
    moved = eqxshard.filter_shard(state, other.step.sharding)
    assert_close(
        other_step(moved, make_batch(seed=1))[0], other_step(other, make_batch(seed=1))[0]
    )


def test_metrics_that_are_no_dict_are_refused():
    state, train_step = setup(loss_fn=lambda m, b, key: (squared_errors(m, b, key), 3.0))
    with pytest.raises(TypeError, match="metrics is a float; return a dict"):
        train_step(state, make_batch())
    eval_step = eqxshard.make_eval_step(
        lambda model, batch: batch["x"], mesh=make_mesh(), rule=RULES["replicate"]
    )
    with pytest.raises(
        TypeError, match="metric_fn returned is an array; return a dict of metrics"
    ):
        eval_step(state.model, make_batch())


class Wide(eqx.Module):
    """Its width is a shape, and nothing else of it says so."""

    weight: jax.Array

    def __call__(self, x, key):
        return jnp.tanh(x @ self.weight) @ self.weight.T[:, :4]


def test_one_step_serves_models_of_several_shapes():
    mesh, rule = make_mesh("data=2,fsdp=4"), eqxshard.fsdp(min_size=200)
    train_step = eqxshard.make_train_step(squared_errors, OPTIM, mesh=mesh, rule=rule)
    for width, spec in [(4, P()), (64, P(None, "fsdp")), (4, P())]:
        state = eqxshard.init_state(
            lambda key, width=width: Wide(jax.random.normal(key, (8, width))),
            OPTIM,
            key=KEY,
            mesh=mesh,
            rule=rule,
        )
        by_hand = jax.tree.map(lambda x: x.copy(), state)
        for given in (state, by_hand):
            state, _ = train_step(given, make_batch())
            assert (
                state.model.weight.sharding.spec
                == state.opt_state[0].mu.weight.sharding.spec
            )
            assert state.model.weight.sharding.spec == spec


@pytest.mark.parametrize("rule", RULES)
def test_a_state_may_come_from_the_host(rule):
    state, train_step = setup("fsdp=8", rule)
    twin, _ = setup("fsdp=8", rule)
    key = jax.random.key_data(state.key)
    saved = eqx.filter(
        jax.device_get(eqx.tree_at(lambda s: s.key, state, key)), eqx.is_array
    )
    saved = eqx.tree_at(lambda s: s.key, saved, jax.random.wrap_key_data(saved.key))
    back = eqx.combine(saved, eqx.filter(state, eqx.is_array, inverse=True))
    with compiles("train_step") as events:
        back, _ = train_step(back, make_batch())
        twin, _ = train_step(twin, make_batch())
        back, _ = train_step(back, make_batch(seed=1))
    twin, _ = train_step(twin, make_batch(seed=1))
    assert_equal(back, twin)
    assert len(events) <= 3


def test_parameters_keep_their_type():
    """Whatever type an optimizer's updates are of."""
    mesh, rule = make_mesh(), RULES["replicate"]
    optim = lenient(optax.adam(1e-2, mu_dtype=jnp.float32))
    for nonfinite in ("skip", "ignore"):
        state = eqxshard.init_state(
            lambda key: Wide(jax.random.normal(key, (8, 8), jnp.bfloat16)),
            optim,
            key=KEY,
            mesh=mesh,
            rule=rule,
        )

        def loss_fn(model, batch, key):
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch)
            return squared_errors(model, half, key)

        train_step = eqxshard.make_train_step(
            loss_fn, optim, mesh=mesh, rule=rule, nonfinite=nonfinite
        )
        with jax.numpy_dtype_promotion("standard"), compiles("train_step") as events:
            state, metrics = train_step(state, make_batch())
            for seed in range(2):
                state, metrics = train_step(state, make_batch(seed=seed))
        assert state.model.weight.dtype == jnp.bfloat16
        assert metrics.totals["loss"].dtype == jnp.float32
        assert len(events) == 3


def test_an_optimizer_may_ask_for_the_loss():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    optim = optax.chain(optax.sgd(0.0), plateau)
    mesh, rule = make_mesh(), RULES["replicate"]
    with jax.numpy_dtype_promotion("standard"):
        state = eqxshard.init_state(Model, optim, key=KEY, mesh=mesh, rule=rule)
        train_step = eqxshard.make_train_step(without_dropout, optim, mesh=mesh, rule=rule)
        state, metrics = train_step(state, make_batch())
        for _ in range(3):
            state, _ = train_step(state, make_batch())
    assert state.opt_state[1].best_value == pytest.approx(metrics.compute()["loss"])
    assert state.opt_state[1].scale < 1


def test_a_model_without_parameters_takes_steps():
    mesh, rule = make_mesh(), RULES["replicate"]
    state = eqxshard.init_state(
        lambda key: Wide(jnp.ones((8, 8), jnp.int32)), OPTIM, key=KEY, mesh=mesh, rule=rule
    )

    def loss_fn(model, batch, key):
        return jnp.sum(batch["x"] @ model.weight.astype(jnp.float32), axis=-1)

    train_step = eqxshard.make_train_step(loss_fn, OPTIM, mesh=mesh, rule=rule)
    state, metrics = train_step(state, make_batch())
    assert int(state.step) == 1 and "nonfinite" not in metrics.compute()


def test_the_step_that_is_not_finite_is_named_among_many():
    state, train_step = setup(nonfinite="raise")
    state, _ = train_step(state, make_batch())
    batches = [make_batch(seed=1), BAD["nan"](make_batch()), *map(make_batch, (32, 32))]
    with pytest.raises(FloatingPointError, match="not finite in step 3"):
        train_step.many(state, stack(batches))


def test_batches_that_lie_elsewhere_are_refused():
    state, train_step = setup()
    batch = jax.device_put(make_batch(), jax.devices()[0])
    with pytest.raises(
        ValueError, match=r"batch entry x lies as .*; place it with filter_shard"
    ):
        train_step(state, batch)
    with pytest.raises(ValueError, match=r"'weight' has shape \(32, 1\) for 32 examples"):
        train_step(state, make_batch(weight=np.ones((32, 1))))


def test_losses_that_are_no_numbers_are_refused():
    for value, kind in [(None, "NoneType"), ({"a": 1.0}, "dict")]:
        state, train_step = setup(loss_fn=lambda m, b, key, value=value: value)
        with pytest.raises(TypeError, match=f"loss is a {kind}; return an array"):
            train_step(state, make_batch())


def test_meshes_that_are_not_ours_are_refused():
    mesh = jax.make_mesh((8,), ("data",))
    for make_it in (
        lambda: make_mesh_less(mesh),
        lambda: eqxshard.make_train_step(
            squared_errors, OPTIM, mesh=mesh, rule=RULES["fsdp"]
        ),
        lambda: eqxshard.make_eval_step(mean_of_x, mesh=mesh, rule=RULES["fsdp"]),
    ):
        with pytest.raises(
            ValueError, match=r"has the axes \('data',\).*eqxshard.make_mesh"
        ):
            make_it()


def make_mesh_less(mesh):
    return eqxshard.init_state(Model, OPTIM, key=KEY, mesh=mesh, rule=RULES["fsdp"])


def test_the_program_is_the_same_in_every_process():
    """Or no compilation could be kept, and processes would disagree on a collective."""
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import hashlib, jax
        jax.config.update("jax_num_cpu_devices", 8)
        import optax, eqxshard
        from helpers import Model, make_batch, squared_errors
        from jax.sharding import PartitionSpec as P
        mesh = eqxshard.make_mesh(data=2, fsdp=2, tensor=2)
        specs = {"first.weight": P(("fsdp", "tensor"), "data")}
        rule = eqxshard.by_path(specs)
        optim = optax.adam(1e-3)
        both = dict(mesh=mesh, rule=rule)
        state = eqxshard.init_state(Model, optim, key=jax.random.key(0), **both)
        train_step = eqxshard.make_train_step(squared_errors, optim, **both)
        text = train_step.lower(state, make_batch()).as_text()
        print(hashlib.sha256(text.encode()).hexdigest())
    """
    texts = set()
    for seed in range(3):
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), os.path.dirname(__file__)],
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": str(seed)},
        )
        assert out.returncode == 0, out.stderr[-2000:]
        texts.add(out.stdout)
    assert len(texts) == 1


def train(mesh, rule):
    state, train_step = setup(mesh, rule)
    losses = []
    for step in range(20):
        batch = make_batch(seed=step % 4, weight=WEIGHTS["padded"])
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state.model


@pytest.fixture(scope="module")
def one_device():
    losses, model = train("data=1", "replicate")
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    return losses, model


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "data=1"])
def test_every_loss_is_that_of_one_device(mesh, rule, one_device):
    """The first invariant: meshes and rules change where, and not what."""
    losses, model = train(mesh, rule)
    np.testing.assert_allclose(losses, one_device[0], rtol=3e-6)
    assert_close(model, one_device[1])
