import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    RULES,
    assert_close,
    assert_equal,
    compiles,
    make_batch,
    make_loader,
    make_mesh,
    once,
    squared_errors,
    stack,
)
from step_helpers import (
    OPTIM,
    SPLITS,
    WEIGHTS,
    make,
    mean_of_x,
    setup,
)

import eqxshard
from eqxshard.sharding import batch_sharding

TESTS = Path(__file__).parents[1]


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


@pytest.mark.versions
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("mesh, rule", SPLITS)
def test_a_step_equals_one_written_by_hand(mesh, rule, weight):
    state, train_step = setup(mesh, rule)
    batch = make_batch(weight=WEIGHTS[weight])
    given = np.ones(32, np.float32) if WEIGHTS[weight] is None else batch["__weight__"]
    loss, params, opt_state = by_hand(state, batch, given)
    state, metrics = train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.weight, given.sum(), rtol=1e-6)
    assert_close(eqx.filter(state.model, eqx.is_inexact_array), params)
    assert_close(state.opt_state, opt_state)
    assert int(state.step) == 1


# Compilation


@pytest.mark.versions
@pytest.mark.parametrize("mesh, rule", SPLITS)
def test_a_step_traces_and_compiles_once(mesh, rule):
    state, train_step = make(mesh, rule)
    sharding = batch_sharding(make_mesh(mesh))
    with compiles("train_step") as events:
        for seed in range(6):
            if seed == 4:  # Neither looking at a state nor changing it compiles anew.
                state = eqx.tree_at(
                    lambda s: s.model.last.bias, state, replace_fn=jnp.zeros_like
                )
            batch = eqxshard.filter_shard(make_batch(seed=seed), sharding)
            state, _ = train_step(state, batch)
    assert sorted(events) == [
        "backend_compile_duration",
        "jaxpr_to_mlir_module_duration",
        "jaxpr_trace_duration",
    ]


@pytest.mark.slow
def test_the_program_is_the_same_in_every_process():
    """Or the cache would miss, and processes would disagree on a collective."""
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
        rule = eqxshard.first_match(eqxshard.by_path(specs), eqxshard.replicate())
        optim = optax.adam(1e-3)
        both = dict(mesh=mesh, rule=rule)
        state = eqxshard.init_state(Model, optim, key=jax.random.key(0), **both)
        train_step = eqxshard.make_train_step(squared_errors, optim, **both)
        text = train_step.lower(state, make_batch()).as_text()
        print(hashlib.sha256(text.encode()).hexdigest())
    """
    texts = set()
    for seed in range(2):
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), TESTS],
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": str(seed)},
        )
        assert out.returncode == 0, out.stderr[-2000:]
        texts.add(out.stdout)
    assert len(texts) == 1


def test_a_compile_is_explained_or_refused_and_the_state_is_whole(caplog):
    state, train_step = make("data=8", "replicate")
    for rows in (32, 24):
        state, _ = train_step(state, make_batch(rows))
    # A compile for another number of batches is expected.
    state, _ = train_step.many(state, stack([make_batch()]))
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "train_step of squared_errors compiles again. Changed: batch.x: float32[32,8] -> "
        "float32[24,8]; batch.y: float32[32,4] -> float32[24,4]. Keep shapes,"
    )
    limits = [
        (make("data=8", "replicate", once(squared_errors)), "can only be traced 1 times"),
        (make("data=8", "replicate", max_compiles=1), "allows no more. Changed: batch.x"),
    ]
    for (state, train_step), message in limits:
        state, _ = train_step(state, make_batch())
        with pytest.raises((RuntimeError, eqxshard.UsageError), match=message):
            train_step(state, make_batch(24))
        state, _ = train_step(state, make_batch())
        assert int(state.step) == 2
    with pytest.raises(eqxshard.UsageError, match="max_compiles=0 must be at least 1"):
        make("data=8", "replicate", max_compiles=0)


@pytest.mark.parametrize("lint", ["warn", "off"])
def test_a_trace_that_failed_does_not_count_as_a_compile(lint):
    state, train_step = make("data=8", "replicate", max_compiles=1, lint=lint)
    for _ in range(2):
        with pytest.raises(KeyError, match="y"):
            train_step(state, {"x": make_batch()["x"]})
    state, _ = train_step(state, make_batch())
    assert int(state.step) == 1


@pytest.mark.slow
def test_the_programs_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr("eqxshard.training._step.MAX_PROGRAMS", 2)
    traces = []

    def losses(model, batch, key, scale):
        traces.append(None)
        return scale(squared_errors(model, batch, key))

    def scaling(factor):
        return lambda losses: factor * losses

    state, train_step = make("data=1", "replicate", losses, lint="off")
    first, second = scaling(1), scaling(2)
    for scale in (first, second, first, second, first):
        state, _ = train_step(state, make_batch(), scale)
    assert len(traces) == 2
    gone = weakref.ref(second)
    del second, scale
    # A third one replaces the second, which has not been used for longest.
    for scale in (scaling(3), first):
        state, _ = train_step(state, make_batch(), scale)
    assert len(traces) == 3
    gc.collect()
    assert gone() is None


def test_compiler_options_reach_xla_beside_our_own(tmp_path):
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    state, train_step = make("data=2", "replicate", compiler_options=dump)
    train_step(state, make_batch())
    (debug,) = tmp_path.glob("*jit_train_step*debug_options*")
    assert "LIBRARY_FUSION_TYPE_REDUCE" not in debug.read_text()


def test_a_state_of_another_rule_or_mesh_is_no_recompile(caplog):
    train_step = eqxshard.make_train_step(squared_errors, OPTIM)
    eval_step = eqxshard.make_eval_step(lambda model, batch: {"x": batch["x"].sum(1)})
    for mesh, rule in ("data=8", "replicate"), ("data=2,fsdp=4", "fsdp"):
        state, _ = train_step(make(mesh, rule)[0], make_batch())
        eval_step(state.model, make_batch())
    assert not caplog.records


@pytest.mark.slow
def test_three_thousand_steps_do_not_deadlock():
    """It runs in a process of its own: a deadlock of simulated devices ends in an abort."""
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
        rows = eqxshard.sharding.batch_sharding(mesh)
        batch = jax.device_put(np.ones((8, 4), np.float32), rows)
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


@pytest.mark.slow
def test_threads_may_share_a_step():
    batches = [make_batch(seed=seed) for seed in range(3)]

    def train(train_step, batch):
        state = make("data=1", "replicate")[0]
        for _ in range(40):
            state, _ = train_step(state, batch)
        return state.model

    expected = [train(make("data=1", "replicate")[1], batch) for batch in batches]
    shared, found = make("data=1", "replicate")[1], {}

    def run(number):
        found[number] = train(shared, batches[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for number, model in enumerate(expected):
        assert_equal(found[number], model)


# Donation


@pytest.mark.versions
@pytest.mark.parametrize("mesh, rule", [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_every_buffer_of_the_state_is_reused(mesh, rule):
    """Warnings of unused donations are errors here."""
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


def test_a_state_that_was_donated_is_refused():
    """JAX 0.10 would crash."""
    state, train_step = setup()
    eval_step = eqxshard.make_eval_step(mean_of_x)
    model = state.model
    train_step(state, make_batch())
    with pytest.raises(ValueError, match="this state was donated to an earlier step"):
        train_step(state, make_batch())
    with pytest.raises(ValueError, match="an array of the model was donated"):
        eval_step(model, make_batch())
    with pytest.raises(ValueError, match="this state was donated to an earlier step"):
        eqxshard.fit(state, train_step, make_loader(), steps=1)
    with pytest.raises(ValueError, match=r"argument of total was donated .*; use what"):
        total(model)
    options: Any = dict(optim=optax.sgd(0.1), mesh=make_mesh(), rule=eqxshard.replicate())
    with pytest.raises(ValueError, match=r"make_model returns, was donated .*; use those"):
        eqxshard.init_state(lambda key: model, key=jax.random.key(0), **options)
    with pytest.raises(ValueError, match=r"the key, .* was donated .*; use those"):
        eqxshard.init_state(lambda key: model, key=state.key, **options)


@eqxshard.filter_jit
def total(model):
    return jnp.sum(model.last.weight)


def test_a_state_of_which_any_array_is_gone_is_refused():
    first, train_step = setup()
    first, _ = train_step(first, make_batch())
    # A state that shares the model, which its own step takes.
    other = eqx.tree_at(lambda s: s.model, setup()[0], first.model)
    train_step(other, make_batch())
    deleted, _ = train_step(setup()[0], make_batch())
    jax.tree.leaves(deleted.opt_state)[-1].delete()
    for state in (first, deleted):
        for call in (train_step, lambda s, b: train_step.many(s, stack([b] * 2))):
            with pytest.raises(ValueError, match="this state was donated to an earlier st"):
                call(state, make_batch())


def test_a_batch_that_is_gone_or_on_other_devices_is_refused():
    state, train_step = setup()
    state, _ = train_step(state, make_batch())
    eval_step = eqxshard.make_eval_step(mean_of_x)
    gone = eqxshard.filter_shard(make_batch(), batch_sharding(make_mesh()))
    gone["x"].delete()
    # JAX 0.10 would crash on the same devices in another order.
    turned = eqxshard.make_mesh(devices=jax.devices()[::-1])
    elsewhere = eqxshard.filter_shard(make_batch(), batch_sharding(turned))
    for call in (train_step, lambda state, batch: eval_step(state.model, batch)):
        with pytest.raises(
            ValueError, match=r"of the batch was donated .*, or deleted; take"
        ):
            call(state, gone)
        with pytest.raises(ValueError, match=r"x is sharded as .*; make the loader with"):
            call(state, elsewhere)
    there = eqxshard.make_eval_step(mean_of_x, mesh=turned, rule=RULES["replicate"])
    with pytest.raises(ValueError, match=r"the model is on .*; make both with the same"):
        there(state.model, make_batch())


def test_a_batch_may_hold_an_array_of_the_state():
    def losses(model, batch, key):
        return jnp.mean(jax.vmap(model.first)(batch["x"]) ** 2, axis=-1)

    def rows(state):
        return state.model.first.weight

    state, train_step = setup("data=1", loss_fn=losses)
    for _ in range(2):
        copy = np.asarray(rows(state))
        bias = np.asarray(state.model.first.bias)
        expected = np.mean((copy @ copy.T + bias) ** 2)
        state, metrics = train_step(state, {"x": rows(state)})
        assert metrics.compute()["loss"] == pytest.approx(float(expected), rel=1e-5)


# States from elsewhere


def test_a_state_of_numpy_arrays_is_placed():
    state, train_step = make("data=2,fsdp=4", "fsdp")
    expected, _ = make("data=2,fsdp=4", "fsdp")[1](state, make_batch())
    state, _ = make("data=2,fsdp=4", "fsdp")
    on_host = jax.tree.map(
        lambda x: np.asarray(x) if eqx.is_array(x) else x, (state.model, state.opt_state)
    )
    state = eqx.tree_at(lambda s: (s.model, s.opt_state), state, on_host)
    # Lint looks at where the step takes arrays, too.
    eqxshard.lint(train_step, state, make_batch())
    state, _ = train_step(state, make_batch())
    assert_equal(state.model, expected.model)
    weight = state.model.first.weight
    assert weight.sharding == expected.model.first.weight.sharding
    # The arrays on the host are left as they are, and may be used again.
    again = eqx.tree_at(lambda s: (s.model, s.opt_state), state, on_host)
    again = eqx.tree_at(lambda s: s.step, again, jnp.zeros_like(again.step))
    again, _ = train_step.many(again, stack([make_batch()]))
    assert_close(again.model, expected.model)


def test_a_state_of_another_mesh_rule_or_optimizer_is_refused(unannotated):
    state, _ = setup("data=2,fsdp=4", "fsdp")
    elsewhere = (
        r"is sharded as P.* on 8 x cpu \(data=2, fsdp=4\), and the step expects P.* on .*; "
        "make the state and the step with the same mesh and rule"
    )
    for mesh, rule in [("data=2,fsdp=4", "replicate"), ("data=4", "fsdp")]:
        own, step = make(mesh, rule)
        with pytest.raises(ValueError, match=elsewhere):
            step(state, make_batch())
        step(own, make_batch())
        with pytest.raises(ValueError, match=elsewhere):
            step(state, make_batch())


@pytest.mark.slow
def test_an_array_that_is_twice_in_a_state_is_copied():
    # In a process of its own: donating an array twice crashes simulated devices.
    code = textwrap.dedent("""
        import jax
        jax.config.update("jax_num_cpu_devices", 8)
        import equinox as eqx, numpy as np, optax
        import eqxshard

        def make_model(key):
            online, target = (eqx.nn.MLP(8, 8, 8, 1, key=k) for k in jax.random.split(key))
            return {"online": online, "target": target, "key": key}

        def loss_fn(model, batch, key):
            out, aim = (jax.vmap(model[name])(batch) for name in ("online", "target"))
            return ((out - jax.lax.stop_gradient(aim)) ** 2).mean(axis=-1)

        for sizes in ({"data": 1}, {"data": 2, "fsdp": 4}):
            count = int(np.prod(list(sizes.values())))
            mesh = eqxshard.make_mesh(**sizes, devices=jax.devices()[:count])
            where = {"mesh": mesh, "rule": eqxshard.fsdp(min_size=1)}
            optim = optax.sgd(0.1)
            state = eqxshard.init_state(make_model, optim, key=jax.random.key(0), **where)
            step = eqxshard.make_train_step(loss_fn, optim, **where)
            batch = np.ones((16, 8), np.float32)
            for _ in range(3):
                state, metrics = step(state, batch)
                same = state.model["online"], state.key
                where_to = lambda s: (s.model["target"], s.model["key"])
                state = eqx.tree_at(where_to, state, same)
            state, metrics = step(state, batch)
            keys = map(jax.random.key_data, (state.key, state.model["key"]))
            np.testing.assert_array_equal(*keys)
            print(float(metrics["loss"]))
    """)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # From the second step on, both are the same.
    assert run.stdout.split() == ["0.0", "0.0"]
