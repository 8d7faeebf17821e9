"""Saving, restoring and resuming."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_helpers import OPTIM, like, new_state, placed
from grades import on_versions
from helpers import (
    MESHES,
    RULES,
    Model,
    assert_close,
    assert_equal,
    make_loader,
    squared_errors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import eqxshard


@pytest.mark.parametrize(
    "mesh", on_versions(MESHES, ["fsdp=8", "data=2,fsdp=4"], MESHES.keys() - {"data=4"})
)
@pytest.mark.parametrize("rule", RULES)
def test_a_state_is_restored_bit_for_bit_into_any_sharding(checkpoints, mesh, rule):
    folder, state = checkpoints
    target = like(**placed(mesh, rule))
    restored = eqxshard.Checkpointer(folder).restore(target)
    assert_equal(restored, state)
    ours, theirs = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (restored, state))
    assert len(ours) == len(theirs)
    wanted = [x.sharding for x in jax.tree.leaves(target) if hasattr(x, "sharding")]
    for leaf, there in zip(ours, wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(there, leaf.ndim)


class Everything(eqx.Module):
    """An array of each type that a state may have, and an empty one."""

    arrays: dict[str, jax.Array]

    def __init__(self, key):
        types = ("bfloat16", "float16", "float32", "int8", "uint32", "bool", "complex64")
        types += ("float8_e4m3fn", "int4")
        self.arrays = {
            name: jax.random.normal(key, (8, 3)).astype(name) for name in types
        } | {
            "empty": jnp.zeros((0, 3)),
            "scalar": jnp.float32(3),
            "a/b c": jnp.arange(3),
            "new_key": jax.random.split(key, 3),
            "old_key": jax.random.PRNGKey(0),
            "mask": jnp.full((2,), -jnp.inf),
        }


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_type_of_array_comes_back(tmp_path, rule):
    where = placed("data=2,fsdp=4", rule)
    if rule == "fsdp":
        # Rows of three and scalars cannot be split; the point is those that are.
        where["rule"] = eqxshard.fsdp(min_size=8)
    state = new_state(Everything, optax.sgd(1.0), **where)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    assert_equal(checkpointer.restore(like(Everything, optax.sgd(1.0), **where)), state)
    assert_equal(checkpointer.restore(like(Everything, optax.sgd(1.0))), state)


def test_the_state_may_be_donated_as_soon_as_it_is_saved(tmp_path, train_step):
    state = new_state()
    expected = jax.tree.map(lambda x: np.asarray(x), eqx.filter(state.model, eqx.is_array))
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    for batch in make_loader(epochs=2):
        state, _ = train_step(state, batch)
    checkpointer.wait()
    restored = checkpointer.restore(like(), step=0)
    assert_equal(
        eqx.filter(restored.model, eqx.is_array), jax.tree.map(jnp.asarray, expected)
    )


def test_leaves_of_the_model_that_differ_are_named(checkpoints):
    class Other(eqx.Module):
        first: eqx.nn.Linear
        last: eqx.nn.Linear
        extra: jax.Array
        permutation: jax.Array

        def __init__(self, key):
            self.first = eqx.nn.Linear(8, 32, key=key)
            self.last = eqx.nn.Linear(32, 5, use_bias=False, key=key)
            self.extra = jnp.zeros(3)
            self.permutation = jnp.zeros(8)

    folder, _ = checkpoints
    with pytest.raises(ValueError) as error:
        eqxshard.Checkpointer(folder).restore(like(Other, optax.sgd(1.0)))
    says = str(error.value)
    assert "model.extra float32[3] is missing there" in says
    assert "model.last.bias float32[4] is only there" in says
    assert "model.last.weight is float32[4,32] there, not float32[5,32]" in says
    assert "model.permutation is int32[8] there, not float32[8]" in says
    assert "model.first.weight" not in says
    # The arrays of the optimizer's state are only counted.
    assert "; and 9 more; use the model" in says and "opt_state" not in says


def test_a_part_of_a_model_is_read_for_fine_tuning(checkpoints):
    folder, state = checkpoints
    checkpointer = eqxshard.Checkpointer(folder)
    fresh = Model(jax.random.key(9))
    head = eqx.nn.Linear(32, 7, key=jax.random.key(9))
    fresh = eqx.tree_at(lambda model: model.last, fresh, head)
    with pytest.raises(ValueError, match=r"model.last.bias is float32\[4\] there, not"):
        checkpointer.restore_model(fresh)
    body = eqx.tree_at(lambda m: m.last, jax.tree.map(lambda _: True, fresh), False)
    tuned = checkpointer.restore_model(fresh, only=body)
    assert_equal(tuned.first, state.model.first)
    assert tuned.last.weight is head.weight
    whole = checkpointer.restore_model(eqx.filter_eval_shape(Model, jax.random.key(0)))
    assert_equal(whole, state.model)


def test_a_missing_checkpoint_is_named(tmp_path, checkpoints):
    empty = eqxshard.Checkpointer(tmp_path / "none")
    assert empty.steps() == []
    with pytest.raises(FileNotFoundError, match=f"no checkpoint in {tmp_path}/none; use"):
        empty.restore(like())
    with pytest.raises(FileNotFoundError, match=r"step 5 in .*; use one of: step 4, step"):
        eqxshard.Checkpointer(checkpoints[0]).restore(like(), step=5)


# Runs


@pytest.mark.versions
@settings(max_examples=6, deadline=None)
@given(stop=st.integers(1, 9), every=st.integers(1, 5))
def test_a_resumed_run_is_the_run_that_never_stopped(
    tmp_path_factory, train_step, checkpoints, stop, every
):
    _, whole = checkpoints
    folder = tmp_path_factory.mktemp("run")
    checkpointer = eqxshard.Checkpointer(folder, save_every=every)
    eqxshard.fit(
        new_state(), train_step, make_loader(), steps=stop, checkpointer=checkpointer
    )
    checkpointer = eqxshard.Checkpointer(folder, save_every=every)
    state = checkpointer.restore(like())
    assert int(state.step) == stop
    resumed = eqxshard.fit(
        state, train_step, make_loader(), steps=10, checkpointer=checkpointer
    )
    assert_equal(resumed, whole)


def splits_layers():
    split = eqxshard.by_path(
        {r"first\.weight": jax.P("tensor"), r"last\.weight": jax.P(None, "tensor")}
    )
    return eqxshard.first_match(split, eqxshard.replicate())


@pytest.mark.slow
def test_a_run_on_eight_devices_continues_on_any(tmp_path):
    """FSDP over 8; then data parallel on 8, 4, 2 and 1, and tensor x data."""
    fsdp = placed("fsdp=8", "fsdp")
    reports = []

    class Tracker:
        def log(self, step, values):
            reports.append((step, values["train/loss"], values["train/index"]))

        def close(self, error=None):
            pass

    def loss_fn(model, batch, key):
        return squared_errors(model, batch, key), {"index": batch["index"]}

    def go_on(where, state, steps, checkpointer=None):
        reports.clear()
        step = eqxshard.make_train_step(loss_fn, OPTIM, **where)
        state = eqxshard.fit(
            state,
            step,
            make_loader(mesh=where["mesh"]),
            steps=steps,
            log_every=1,
            trackers=[Tracker()],
            checkpointer=checkpointer,
        )
        return state, list(reports)

    checkpointer = eqxshard.Checkpointer(tmp_path, save_every=6, max_to_keep=9)
    state, whole = go_on(fsdp, new_state(**fsdp), 30, checkpointer)
    tensor_mesh = eqxshard.make_mesh(data=4, tensor=2)
    targets = [placed(f"data={n}", "replicate") for n in (8, 4, 2, 1)]
    targets.append({"mesh": tensor_mesh, "rule": splits_layers()})
    for where in targets:
        # In the middle of an epoch of four batches, whose last is padded.
        resumed = eqxshard.Checkpointer(tmp_path).restore(like(**where), step=6)
        resumed, rest = go_on(where, resumed, 30)
        assert [(step, index) for step, _, index in rest] == [
            (step, index) for step, _, index in whole[6:]
        ]
        ours, theirs = ([loss for _, loss, _ in run] for run in (rest, whole[6:]))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        assert_close(resumed, state)


def test_checkpoints_are_saved_by_time_at_reports(tmp_path, train_step, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def slowly(state, batch):
        now[0] += 1.0
        return train_step(state, batch)

    checkpointer = eqxshard.Checkpointer(tmp_path, max_to_keep=9, save_every_seconds=5.0)
    eqxshard.fit(
        new_state(),
        slowly,
        make_loader(),
        steps=24,
        log_every=3,
        checkpointer=checkpointer,
    )
    # Reports are at 3, 4, 6, 8, 9, 12, ... for epochs end, too.
    assert checkpointer.steps() == [6, 12, 18, 24]


@pytest.mark.parametrize(
    "options, seed, says",
    [
        ({"max_to_keep": 0}, 0, "max_to_keep=0"),
        ({"save_every_seconds": 0.0}, 0, "save_every_seconds=0.0"),
        ({"mode": "best"}, 0, "mode='best'"),
        ({}, 0, "of step 10, and the run starts from step 0; restore"),
        ({}, 1, "seed was 0 and is 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    checkpoints, train_step, unannotated, options, seed, says
):
    def run():
        checkpointer = eqxshard.Checkpointer(checkpoints[0], **options)
        state = checkpointer.restore(like()) if seed else new_state()
        loader = make_loader(seed=seed)
        eqxshard.fit(state, train_step, loader, steps=12, checkpointer=checkpointer)

    with pytest.raises(ValueError, match=says):
        run()
