import json
import logging
import os
import re
import shutil
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
    assert_close,
    assert_equal,
    lenient,
    make_loader,
    make_mesh,
    squared_errors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eqxshard
from eqxshard._sealed import seal

OPTIM = lenient(optax.adam(1e-2))


def placed(mesh="data=8", rule="replicate") -> dict[str, Any]:
    return {"mesh": make_mesh(mesh), "rule": RULES[rule]}


def new_state(make_model: Any = Model, optim=OPTIM, seed=0, **where):
    where = where or placed()
    return eqxshard.init_state(make_model, optim, key=jax.random.key(seed), **where)


def like(make_model: Any = Model, optim=OPTIM, **where):
    where = where or placed()
    return eqxshard.abstract_state(make_model, optim, key=jax.random.key(1), **where)


@pytest.fixture(scope="module")
def train_step():
    return eqxshard.make_train_step(squared_errors, OPTIM, **placed())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, train_step):
    """Of steps 4, 8 and 10, and the state at the end."""
    folder = tmp_path_factory.mktemp("run")
    checkpointer = eqxshard.Checkpointer(folder, every=4)
    state = eqxshard.fit(
        new_state(), train_step, make_loader(), steps=10, checkpointer=checkpointer
    )
    return folder, state


def copied(checkpoints, tmp_path):
    folder, _ = checkpoints
    return shutil.copytree(folder, tmp_path / "copy")


# Saving and restoring


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rule", RULES)
def test_a_state_is_restored_bit_for_bit_to_where_it_is_to_lie(checkpoints, mesh, rule):
    folder, state = checkpoints
    target = like(**placed(mesh, rule))
    restored = eqxshard.Checkpointer(folder).restore(target)
    assert_equal(restored, state)
    ours, theirs = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (restored, state))
    assert len(ours) == len(theirs)
    wanted = [x.sharding for x in jax.tree.leaves(target) if hasattr(x, "sharding")]
    for leaf, there in zip(ours, wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(there, leaf.ndim)


def test_there_are_the_last_ones_and_they_say_what_they_are(checkpoints):
    folder, _ = checkpoints
    checkpointer = eqxshard.Checkpointer(folder)
    assert checkpointer.steps() == [4, 8, 10]
    described = checkpointer.description(10)
    assert described == json.loads((folder / "10" / "description.json").read_text())
    assert described["step"] == 10
    assert described["leaves"]["model.first.weight"] == {
        "shape": [32, 8],
        "dtype": "float32",
        "spec": [],
    }
    assert described["mesh"]["data"] == 8
    assert described["loader"]["step"] == 10
    assert described["versions"]["jax"] == jax.__version__
    assert described["metrics"]["train/loss"] > 0


def test_a_state_like_another_says_where_it_would_be():
    for mesh, rule in (("fsdp=8", "fsdp"), ("data=2,fsdp=4", "fsdp")):
        state, stand_in = new_state(**placed(mesh, rule)), like(**placed(mesh, rule))
        shapes = [x for x in jax.tree.leaves(stand_in) if not callable(x)]
        arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
        found = [x for x in shapes if isinstance(x, jax.ShapeDtypeStruct)]
        for shape, array in zip(found, arrays, strict=True):
            assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
            assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


class Everything(eqx.Module):
    """One array of every type that a state may have, and one of no size."""

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


def test_batch_norms_state_and_the_scale_of_a_loss_come_back(tmp_path):
    def make_model(key):
        return eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")

    where: dict[str, Any] = {
        **placed(),
        "precision": eqxshard.Precision(compute=jnp.float16),
    }
    state = new_state(make_model, optax.sgd(1.0), **where)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    restored = checkpointer.restore(like(make_model, optax.sgd(1.0), **where))
    assert restored.model_state is not None and restored.loss_scale is not None
    assert_equal(restored, state)


def test_floating_point_types_may_be_others_than_they_were(checkpoints):
    folder, state = checkpoints
    half = {**placed(), "precision": eqxshard.Precision(params=jnp.bfloat16)}
    restored = eqxshard.Checkpointer(folder).restore(like(**half))
    weight = restored.model.first.weight
    assert weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(weight, state.model.first.weight.astype(jnp.bfloat16))


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


# What a run does


@settings(max_examples=6, deadline=None)
@given(stop=st.integers(1, 9), every=st.integers(1, 5))
def test_a_resumed_run_is_the_run_that_never_stopped(
    tmp_path_factory, train_step, checkpoints, stop, every
):
    _, whole = checkpoints
    folder = tmp_path_factory.mktemp("run")
    checkpointer = eqxshard.Checkpointer(folder, every=every)
    eqxshard.fit(
        new_state(), train_step, make_loader(), steps=stop, checkpointer=checkpointer
    )
    checkpointer = eqxshard.Checkpointer(folder, every=every)
    state = checkpointer.restore(like())
    assert int(state.step) == stop
    resumed = eqxshard.fit(
        state, train_step, make_loader(), steps=10, checkpointer=checkpointer
    )
    assert_equal(resumed, whole)


@pytest.mark.parametrize("mesh, rule", [("data=4", "replicate"), ("fsdp=8", "fsdp")])
def test_a_run_goes_on_on_another_mesh(checkpoints, tmp_path, mesh, rule):
    folder, whole = copied(checkpoints, tmp_path), checkpoints[1]
    where = placed(mesh, rule)
    step = eqxshard.make_train_step(squared_errors, OPTIM, **where)
    state = eqxshard.Checkpointer(folder).restore(like(**where), step=4)
    state = eqxshard.fit(state, step, make_loader(mesh=where["mesh"]), steps=10)
    assert_close(state, whole)


def test_the_last_ones_and_the_best_one_are_kept(tmp_path, train_step):
    accuracies = iter([0.1, 0.9, 0.9, 0.5, 0.3, 0.2])
    checkpointer = eqxshard.Checkpointer(tmp_path, keep=2, every=1, best="eval/accuracy")
    assert checkpointer.best_step() is None
    eqxshard.fit(
        new_state(),
        train_step,
        make_loader(),
        epochs=6,
        checkpointer=checkpointer,
        evaluate=lambda model: {"accuracy": next(accuracies)},
    )
    assert checkpointer.steps() == [12, 23, 24]
    assert checkpointer.best_step() == 12
    smallest = eqxshard.Checkpointer(tmp_path, best="eval/accuracy", mode="min")
    assert smallest.best_step() == 24


def test_checkpoints_are_saved_by_time_at_reports(tmp_path, train_step, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def slowly(state, batch):
        now[0] += 1.0
        return train_step(state, batch)

    checkpointer = eqxshard.Checkpointer(tmp_path, keep=9, every_seconds=5.0)
    eqxshard.fit(
        new_state(),
        slowly,
        make_loader(),
        steps=24,
        log_every=3,
        checkpointer=checkpointer,
        stall_seconds=None,
    )
    # Reports are at 3, 4, 6, 8, 9, 12, ... for epochs end, too.
    assert checkpointer.steps() == [6, 12, 18, 24]


def test_what_was_reported_is_what_is_saved(tmp_path, train_step):
    lines = []

    class Tracker:
        def log(self, step, values):
            lines.append((step, dict(values)))

        def close(self):
            pass

    checkpointer = eqxshard.Checkpointer(tmp_path, every=3)
    eqxshard.fit(
        new_state(),
        train_step,
        make_loader(),
        steps=7,
        log_every=50,
        trackers=[Tracker()],
        checkpointer=checkpointer,
        evaluate=lambda model: {"answer": 42.0},
    )
    assert [step for step, _ in lines] == [3, 4, 6, 7]
    assert checkpointer.description(7)["metrics"] == lines[-1][1]
    assert lines[-1][1]["eval/answer"] == 42.0


def test_a_run_that_is_done_stays_as_it_is(checkpoints, train_step, tmp_path):
    folder = copied(checkpoints, tmp_path)
    checkpointer = eqxshard.Checkpointer(folder)
    state = checkpointer.restore(like())
    again = eqxshard.fit(
        state, train_step, make_loader(), steps=10, checkpointer=checkpointer
    )
    assert_equal(again, checkpoints[1])
    assert checkpointer.steps() == [4, 8, 10]


# What is refused


def test_a_run_does_not_start_among_anothers_checkpoints(checkpoints, train_step):
    folder, _ = checkpoints
    with pytest.raises(ValueError, match="of step 10, and the run starts from step 0; re"):
        eqxshard.fit(
            new_state(),
            train_step,
            make_loader(),
            steps=4,
            checkpointer=eqxshard.Checkpointer(folder),
        )


def test_a_run_does_not_go_on_with_other_batches(checkpoints, train_step, tmp_path):
    checkpointer = eqxshard.Checkpointer(copied(checkpoints, tmp_path))
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        eqxshard.fit(
            checkpointer.restore(like()),
            train_step,
            make_loader(seed=1),
            steps=12,
            checkpointer=checkpointer,
        )


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path, train_step):
    (tmp_path / "2024" / "thesis").mkdir(parents=True)
    checkpointer = eqxshard.Checkpointer(tmp_path)
    says = f"{tmp_path} has '2024', which is no checkpoint of eqxshard; give the run a"
    with pytest.raises(ValueError, match=re.escape(says)):
        eqxshard.fit(
            new_state(), train_step, make_loader(), steps=2, checkpointer=checkpointer
        )
    checkpointer.save(new_state())
    with pytest.raises(OSError, match="which is no checkpoint of eqxshard"):
        checkpointer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["2024"]


def test_a_folder_that_cannot_be_is_named_before_the_run(tmp_path, train_step):
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        says = f"checkpoints cannot be written to {tmp_path / folder}: "
        with pytest.raises(ValueError, match=says):
            eqxshard.fit(
                new_state(),
                train_step,
                make_loader(),
                steps=2,
                checkpointer=eqxshard.Checkpointer(tmp_path / folder),
            )
    with pytest.raises(ValueError, match=r"'nowhere://x' is on no file system that is kn"):
        eqxshard.Checkpointer("nowhere://x")


def test_the_loader_may_be_used_for_something_else_meanwhile(tmp_path, train_step):
    def run(steps, state):
        loader = make_loader()
        seen = []

        def noting(state, batch):
            seen.append(np.asarray(batch["index"]).tolist())
            return train_step(state, batch)

        def evaluate(model):
            loader.seek(1)
            return {"first": float(next(iter(loader))["index"][0])}

        eqxshard.fit(
            state,
            noting,
            loader,
            steps=steps,
            evaluate=evaluate,
            checkpointer=eqxshard.Checkpointer(tmp_path, every=4),
        )
        return seen

    first = run(8, new_state())
    rest = run(12, eqxshard.Checkpointer(tmp_path).restore(like()))
    shutil.rmtree(tmp_path)
    assert first + rest == run(12, new_state())


def test_a_loader_without_a_position_will_do(tmp_path, train_step):
    loader = make_loader()

    class Plain:
        def __len__(self):
            return len(loader)

        def __iter__(self):
            return iter(loader)

        def seek(self, step):
            loader.seek(step)

    checkpointer = eqxshard.Checkpointer(tmp_path, every=2)
    eqxshard.fit(new_state(), train_step, Plain(), steps=3, checkpointer=checkpointer)
    state = checkpointer.restore(like(), step=2)
    assert checkpointer.description(3)["loader"] is None
    with pytest.raises(ValueError, match="of step 3, and the run starts from step 2"):
        eqxshard.fit(state, train_step, Plain(), steps=3, checkpointer=checkpointer)


def test_what_was_being_saved_is_written_when_a_run_fails(tmp_path, train_step):
    class Fails:
        def log(self, step, values):
            if step == 6:
                raise RuntimeError

        def close(self):
            pass

    checkpointer = eqxshard.Checkpointer(tmp_path, every=5)
    with pytest.raises(RuntimeError):
        eqxshard.fit(
            new_state(),
            train_step,
            make_loader(),
            steps=9,
            log_every=1,
            trackers=[Fails()],
            checkpointer=checkpointer,
        )
    assert int(eqxshard.Checkpointer(tmp_path).restore(like()).step) == 5


def test_every_leaf_that_differs_is_named(checkpoints):
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
    assert "model.extra float32[3] is not in it" in says
    assert "model.last.bias float32[4] is only in it" in says
    assert "model.last.weight is of shape [4, 32] in it, not [5, 32]" in says
    assert "model.permutation is of type int32 in it, not float32" in says
    assert "opt_state.0.mu.first.weight float32[32, 8] is only in it" in says
    assert "model.first.weight" not in says


def test_a_part_of_a_model_is_read_for_fine_tuning(checkpoints):
    folder, state = checkpoints
    checkpointer = eqxshard.Checkpointer(folder)
    fresh = Model(jax.random.key(9))
    head = eqx.nn.Linear(32, 7, key=jax.random.key(9))
    fresh = eqx.tree_at(lambda model: model.last, fresh, head)
    with pytest.raises(ValueError, match=r"model.last.bias is of shape \[4\] in it, not"):
        checkpointer.restore_model(fresh)
    body = eqx.tree_at(lambda m: m.last, jax.tree.map(lambda _: True, fresh), False)
    tuned = checkpointer.restore_model(fresh, only=body)
    assert_equal(tuned.first, state.model.first)
    assert tuned.last.weight is head.weight
    whole = checkpointer.restore_model(eqx.filter_eval_shape(Model, jax.random.key(0)))
    assert_equal(whole, state.model)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path, checkpoints):
    empty = eqxshard.Checkpointer(tmp_path / "none")
    assert empty.steps() == []
    with pytest.raises(FileNotFoundError, match=f"no checkpoint in {tmp_path}/none; start"):
        empty.restore(like())
    with pytest.raises(FileNotFoundError, match=r"step 5 in .*; there is: step 4, step 8"):
        eqxshard.Checkpointer(checkpoints[0]).restore(like(), step=5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"keep": 0}, "keep=0"),
        ({"every": -1}, "every=-1"),
        ({"every_seconds": 0.0}, "every_seconds=0.0"),
        ({"mode": "best"}, "mode='best'"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path, unannotated, options, message):
    with pytest.raises(ValueError, match=message):
        eqxshard.Checkpointer(tmp_path, **options)


def test_nan_is_never_saved(tmp_path, train_step, caplog):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    state = new_state()
    state = eqx.tree_at(lambda s: s.model.first.bias, state, jnp.full((32,), jnp.nan))
    checkpointer.save(state)
    checkpointer.wait()
    assert checkpointer.steps() == []
    assert "step 0 has NaN in it and was not saved" in caplog.text


# Damage


def files_of(folder):
    """One of each kind of file of a checkpoint, by its path below it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder) for path in paths]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damage_is_seen_and_the_one_before_is_used(checkpoints, tmp_path_factory, data):
    folder = copied(checkpoints, tmp_path_factory.mktemp("damaged"))
    newest = folder / "10"
    file = newest / data.draw(st.sampled_from(files_of(newest)), label="file")
    content = bytearray(file.read_bytes())
    kinds = ["delete", *(["flip", "cut"] if content else ["grow"])]
    kind = data.draw(st.sampled_from(kinds), label="kind")
    if kind == "delete":
        file.unlink()
    else:
        where = data.draw(st.integers(0, max(len(content) - 1, 0)), label="where")
        if kind == "flip":
            content[where] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        content = content[:where] if kind == "cut" else content + b"x" * (kind == "grow")
        file.write_bytes(content)
    checkpointer = eqxshard.Checkpointer(folder)
    restored = checkpointer.restore(like())
    step = int(restored.step)
    if (newest / "checksums.txt").exists():
        # What was cut from it may be the end of its last line.
        assert step == 8 or shutil_same(checkpoints[0] / "10", newest)
    else:
        assert step == 8 and checkpointer.steps() == [4, 8]


def shutil_same(one, other):
    """Whether all files are the same, but for the ends of lines."""
    return all(
        (one / file).read_text("latin-1").strip()
        == (other / file).read_text("latin-1").strip()
        for file in files_of(one)
    )


def test_damage_is_reported_and_written_over(checkpoints, tmp_path, train_step, caplog):
    folder = copied(checkpoints, tmp_path)
    (folder / "10" / "description.json").write_text("{")
    checkpointer = eqxshard.Checkpointer(folder)
    with caplog.at_level(logging.WARNING):
        state = checkpointer.restore(like())
    assert "step 10 in" in caplog.text and "description.json is not what" in caplog.text
    with pytest.raises(ValueError, match=r"step 10 .* is damaged: description.json"):
        checkpointer.restore(like(), step=10)
    eqxshard.fit(state, train_step, make_loader(), steps=10, checkpointer=checkpointer)
    assert_equal(eqxshard.Checkpointer(folder).restore(like(), step=10), checkpoints[1])


@pytest.mark.parametrize("how", ["folder", "nothing", "other"])
def test_what_is_sealed_and_no_checkpoint_is_damaged(checkpoints, tmp_path, how):
    folder = copied(checkpoints, tmp_path)
    shutil.rmtree(folder / "10")
    (folder / "10").mkdir()
    if how == "folder":
        (folder / "10" / "checksums.txt").mkdir()
    if how == "nothing":
        (folder / "10" / "checksums.txt").touch()
    if how == "other":
        (folder / "10" / "description.json").write_text("[]")
        seal(folder / "10")
    checkpointer = eqxshard.Checkpointer(folder)
    with pytest.raises(ValueError, match=r"of step 10 in .* is damaged: .*; use another"):
        checkpointer.restore(like(), step=10)
    # Once it was found damaged, it is in nobody's way.
    state = checkpointer.restore(like(), step=8)
    checkpointer.check_start(8, make_loader())
    assert_equal(eqxshard.Checkpointer(folder).restore(like()), state)


def test_where_all_are_damaged_there_is_nothing_to_restore(checkpoints, tmp_path):
    folder = copied(checkpoints, tmp_path)
    for step in (4, 8, 10):
        (folder / str(step) / "description.json").unlink()
    with pytest.raises(ValueError, match=r"all checkpoints in .* are damaged \(step 10: d"):
        eqxshard.Checkpointer(folder).restore(like())


def test_what_a_killed_run_was_writing_does_not_count_and_goes(checkpoints, tmp_path):
    folder = copied(checkpoints, tmp_path)
    os.rename(folder / "8", folder / "8.orbax-checkpoint-tmp")
    (folder / "10" / "checksums.txt").unlink()
    (folder / "notes").mkdir()
    checkpointer = eqxshard.Checkpointer(folder)
    assert checkpointer.steps() == [4]
    state = checkpointer.restore(like())
    checkpointer.save(eqx.tree_at(lambda s: s.step, state, state.step + 1))
    checkpointer.wait()
    assert sorted(os.listdir(folder)) == ["4", "5", "eqxshard.txt", "notes"]


# Other meshes


def splits_layers():
    return eqxshard.by_path(
        {r"first\.weight": jax.P("tensor"), r"last\.weight": jax.P(None, "tensor")}
    )


@pytest.mark.slow
def test_a_run_on_eight_devices_goes_on_on_any(tmp_path):
    """FSDP over 8; then data parallel on 8, 4, 2 and 1, and tensor x data."""
    fsdp = placed("fsdp=8", "fsdp")
    reports = []

    class Tracker:
        def log(self, step, values):
            reports.append((step, values["train/loss"], values["train/index"]))

        def close(self):
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

    checkpointer = eqxshard.Checkpointer(tmp_path, every=6, keep=9)
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
