"""States restored into others: renamed, extended, cut, with another optimizer."""

import re
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from checkpoint_helpers import like, new_state, placed
from grades import graded
from helpers import assert_equal, lenient

import eqxshard
from eqxshard.sharding._leaves import array_leaves

ADAM = lenient(optax.adam(1e-2))
STEP = 7


class Net(eqx.Module):
    first: eqx.nn.Linear
    blocks: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, key, depth=2, width=4):
        first, last, *keys = jax.random.split(key, 2 + depth)
        self.first = eqx.nn.Linear(8, 16, key=first)
        self.blocks = [eqx.nn.Linear(16, 16, key=key) for key in keys]
        self.head = eqx.nn.Linear(16, width, key=last)


class Renamed(eqx.Module):
    """The same model, with `layers` for `blocks` and one more field."""

    first: eqx.nn.Linear
    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear
    scale: jax.Array

    def __init__(self, key):
        net = Net(key)
        self.first, self.layers, self.head = net.first, net.blocks, net.head
        self.scale = jax.random.normal(key, (16,))


def fsdp() -> dict[str, Any]:
    return placed("fsdp=8", "replicate") | {"rule": eqxshard.fsdp(min_size=64)}


def numbered(state):
    """The state after some steps: each array has values of its own."""
    leaves, rest = eqx.partition(state, eqx.is_inexact_array)
    numbers = iter(range(1000))
    leaves = jax.tree.map(lambda x: x + next(numbers), leaves)
    return eqx.tree_at(lambda s: s.step, eqx.combine(leaves, rest), jnp.int32(STEP))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of `Net` with Adam."""
    state = numbered(new_state(Net, ADAM, **fsdp()))
    return save(tmp_path_factory.mktemp("net"), state)


def save(folder, state):
    checkpointer = eqxshard.Checkpointer(folder)
    checkpointer.save(state)
    checkpointer.wait()
    return folder, state


def arrays(state):
    return dict(array_leaves(state))


def assert_made_of(restored, saved, fresh, sources):
    """Equal bit for bit to the saved arrays in `sources`, by path, and else to new ones."""
    saved, fresh = arrays(saved), arrays(fresh)
    for path, leaf in arrays(restored).items():
        if path in sources:
            assert_equal(leaf, saved[sources[path]])
        else:
            assert_equal(leaf, fresh[path])
        assert leaf.sharding.is_equivalent_to(fresh[path].sharding, leaf.ndim)


def same(state, but=()):
    return {x: x for x in arrays(state) if not any(part in x for part in but)}


def test_renamed_and_added_fields_go_with_their_moments(saved, tmp_path, caplog):
    folder, state = shutil.copytree(saved[0], tmp_path / "copy"), saved[1]
    checkpointer = eqxshard.Checkpointer(folder)
    fresh = new_state(Renamed, ADAM, seed=1)
    with pytest.raises(ValueError) as error:
        checkpointer.restore(fresh)
    hint = "give missing='init' and unused='drop' to train or restore if this is "
    hint += "meant (and rename={OLD: NEW} "
    assert hint in str(error.value)
    rename = {"model.blocks": "model.layers"}
    with pytest.raises(ValueError, match=r"model.scale .* is missing there; .* missing='i"):
        checkpointer.restore(fresh, rename=rename)
    assert not caplog.records
    restored = checkpointer.restore(fresh, rename=rename, missing="init")
    sources = {x.replace("blocks", "layers"): x for x in arrays(state)}
    assert_made_of(restored, state, fresh, sources)
    says = caplog.messages[-1]
    assert (
        "initialized 3 (model.scale, opt_state.0.mu.scale, opt_state.0.nu.scale);" in says
    )
    assert "renamed 12 (model.blocks.0.weight -> model.layers.0.weight, " in says
    # A run goes on, and does not need the line, nor is it in the way.
    checkpointer.save(eqx.tree_at(lambda s: s.step, restored, jnp.int32(STEP + 1)))
    checkpointer.wait()
    for options in ({}, {"rename": rename, "missing": "init"}):
        assert_equal(checkpointer.restore(fresh, **options).model, restored.model)
    assert len(caplog.records) == 1


def clipped(rate):
    return lenient(optax.chain(optax.clip(1.0), optax.adam(rate)))


SCHEDULE = optax.cosine_decay_schedule(1e-2, 100)

OPTIMIZERS = {
    "another": (lenient(optax.sgd(1e-2, momentum=0.9)), {}, ["opt_state"]),
    "schedule": (lenient(optax.adam(SCHEDULE)), {}, []),
    "chain": (clipped(SCHEDULE), {"opt_state.0": "opt_state.1.0"}, []),
}


@pytest.mark.parametrize("name", graded(OPTIMIZERS, quick=["chain"], slow=["another"]))
def test_another_optimizer_keeps_what_it_shares(saved, name):
    folder, state = saved
    optim, rename, anew = OPTIMIZERS[name]
    fresh = new_state(Net, optim, seed=1, **fsdp())
    with pytest.raises(ValueError, match="missing='init'"):
        eqxshard.Checkpointer(folder).restore(fresh)
    restored = eqxshard.Checkpointer(folder).restore(
        fresh, rename=rename, missing="init", unused="drop"
    )

    def moved(path):
        old = next((old for old in rename if path.startswith(f"{old}.")), None)
        return path if old is None else rename[old] + path.removeprefix(old)

    sources = {moved(path): path for path in same(state, but=anew)}
    assert_made_of(restored, state, fresh, sources)


def only_head(model):
    return eqx.tree_at(lambda m: m.head, jax.tree.map(lambda _: False, model), True)


@pytest.mark.slow
def test_parts_are_frozen_thawed_and_given_another_optimizer(saved, tmp_path):
    """Adam for all; then the head alone; then all, the head with its moments."""
    folder, state = saved
    checkpointer = eqxshard.Checkpointer(folder)
    trainable = only_head(eqx.filter_eval_shape(Net, jax.random.key(0)))
    frozen = new_state(Net, ADAM, seed=1, **fsdp(), trainable=trainable)
    with pytest.raises(ValueError, match=r"first.weight .* is only there.*unused='drop' "):
        checkpointer.restore(frozen)
    head = checkpointer.restore(frozen, unused="drop")
    assert_made_of(head, state, frozen, same(frozen))
    folder, head = save(tmp_path, head)
    parts: dict[Any, Any] = {"head": ADAM, "rest": optax.sgd(1e-2, momentum=0.9)}
    label = lambda path, _: "head" if path[0].name == "head" else "rest"  # noqa: E731
    optim = lenient(
        optax.partition(parts, lambda x: jax.tree_util.tree_map_with_path(label, x))
    )
    fresh = new_state(Net, optim, seed=2)
    inner = "opt_state.inner_states.head.inner_state"
    restored = eqxshard.Checkpointer(folder).restore(
        fresh, rename={"opt_state": inner}, missing="init"
    )
    moved = {x.replace("opt_state", inner): x for x in arrays(head)}
    assert_made_of(restored, head, fresh, moved)


class Normed(eqx.Module):
    norms: list[eqx.nn.BatchNorm]

    def __init__(self, key, depth=1):
        self.norms = [eqx.nn.BatchNorm(8, "batch", mode="batch") for _ in range(depth)]


@pytest.mark.slow
def test_the_numbered_parts_of_a_models_own_state_are_not_mixed_up(tmp_path, caplog):
    """One more BatchNorm, of the same size: nobody knows whose statistics are whose."""
    make = eqx.nn.make_with_state(Normed)
    state = new_state(make, ADAM)
    numbers = jax.tree.map(lambda x: x + 5, state.model_state)
    folder, state = save(tmp_path, eqx.tree_at(lambda s: s.model_state, state, numbers))
    fresh = new_state(lambda key: make(key, depth=2), ADAM, seed=1)
    checkpointer = eqxshard.Checkpointer(folder)
    with pytest.raises(ValueError, match="model_state"):
        checkpointer.restore(fresh, missing="init")
    restored = checkpointer.restore(fresh, missing="init", unused="drop")
    assert_equal(restored.model_state, fresh.model_state)
    assert_equal(restored.model.norms[0], state.model.norms[0])
    assert "dropped 3 (model_state.0" in caplog.messages[-1]
    # Who knows says so.
    rename = {"model_state.0": "model_state.2", "model_state.1": "model_state.3"}
    restored = checkpointer.restore(fresh, rename=rename, missing="init")
    mine, theirs = arrays(restored), arrays(state)
    assert_equal(mine["model_state.3.1"], theirs["model_state.1.1"])
    assert_equal(mine["model_state.1.1"], arrays(fresh)["model_state.1.1"])


@pytest.mark.slow
def test_a_part_of_another_shape_begins_anew_once(saved, tmp_path):
    folder, state = shutil.copytree(saved[0], tmp_path / "copy"), saved[1]
    wide = lambda key: Net(key, width=6)  # noqa: E731
    checkpointer = eqxshard.Checkpointer(folder)
    fresh = new_state(wide, ADAM, seed=1)
    says = "model.head.weight is float32[4,16] there, not float32[6,16]; "
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        checkpointer.restore(fresh, missing="init", unused="drop")
    remedy = (
        "give rename={PATH: None} and missing='init' to begin anew with what has another"
    )
    assert remedy in str(error.value)
    options = {"rename": {"model.head": None}, "missing": "init"}
    restored = checkpointer.restore(fresh, **options)
    assert_made_of(restored, state, fresh, same(state, but=["head"]))
    # In the same script, started again, it is not begun once more.
    step = jnp.int32(STEP + 1)
    new = eqx.tree_at(lambda s: s.step, restored, step)
    checkpointer.save(new)
    checkpointer.wait()
    again = new_state(wide, ADAM, seed=2)
    assert_equal(eqxshard.Checkpointer(folder).restore(again, **options), new)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"rename": {"model.heat": "model.tail"}}, "at model.heat.*did you mean 'model.he"),
        (
            {"rename": {"model.first": "model.head"}},
            "model.first.weight and model.head.weight of .* would both be mod",
        ),
        ({"missing": "init"}, "model.scale is missing in .*; give restore a state of init"),
    ],
    ids=["typo", "two", "no values"],
)
def test_what_cannot_be_meant_is_refused(saved, options, says):
    with pytest.raises(ValueError, match=says):
        eqxshard.Checkpointer(saved[0]).restore(
            like(Renamed, ADAM), **{"rename": {"model.blocks": "model.layers"}, **options}
        )


@pytest.mark.slow
def test_an_average_begins_with_the_weights_that_were_saved(saved):
    folder, state = saved
    checkpointer = eqxshard.Checkpointer(folder)
    optim = lenient(optax.chain(optax.adam(1e-2), eqxshard.ema_weights(0.9)))
    fresh = new_state(Net, optim, seed=1, **placed(), load=checkpointer.restore_model)
    restored = checkpointer.restore(
        fresh, rename={"opt_state": "opt_state.0"}, missing="init"
    )
    assert_equal(eqxshard.ema_model(restored), state.model)


def test_a_model_is_read_under_its_new_names(saved):
    folder, state = saved
    model = Renamed(jax.random.key(1))
    rename = {"model.blocks": "model.layers"}
    checkpointer = eqxshard.Checkpointer(folder)
    found = checkpointer.restore_model(model, rename=rename, missing="init")
    assert_equal(found.layers, state.model.blocks)
    assert found.scale is model.scale
    shapes = eqx.filter_eval_shape(Renamed, jax.random.key(1))
    found = checkpointer.restore_model(shapes, rename=rename, missing="init")
    assert isinstance(found.scale, jax.ShapeDtypeStruct)
