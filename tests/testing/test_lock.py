"""Locks of shardings, and of plans that are made by hand."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RULES, make_mesh
from jax.sharding import PartitionSpec as P
from plan_helpers import made_by_hand

import eqxshard
from eqxshard import testing


class Embedding(eqx.Module):
    embed: jax.Array
    head: list[jax.Array]
    scale: float = 2.0


def embedding(rows=16):
    return Embedding(jnp.ones((rows, 8)), [jnp.zeros(4, jnp.int16)])


@eqxshard.filter_jit
def total(tree, batch):
    return sum(jnp.sum(x @ x.T) for x in (tree.embed, batch))


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("EQXSHARD_UPDATE_LOCKS", raising=False)


@pytest.fixture
def locked(tmp_path):
    """Locks a model under a rule, and returns the text of the file."""
    file = tmp_path / "locks" / "model.lock"

    def lock(tree=None, rule=RULES["fsdp"], mesh="data=2,fsdp=4", **options):
        tree = embedding() if tree is None else tree
        testing.assert_sharding_lock(file, tree, make_mesh(mesh), rule, **options)
        return file.read_text()

    lock.file = file  # pyright: ignore[reportFunctionMemberAccess]
    return lock


def changes(lock, *args, **options):
    """The lines of a diff, which ends with the remedy."""
    with pytest.raises(AssertionError, match="run this test once with EQX") as error:
        lock(*args, **options)
    head, *lines, _ = str(error.value).splitlines()
    assert head.endswith(" differs:")
    return [line.strip() for line in lines]


def test_the_text_of_a_lock(locked):
    rule = eqxshard.by_path({"embed": P(("data", "fsdp"), None), "head": P(None)})
    text = locked(rule=rule)
    assert locked(rule=rule) == text
    assert text == (
        "# The sharding of each array, and the collectives of the compiled step. Written "
        "by\n# eqxshard.testing with jax "
        f"{jax.__version__}; write it again with EQXSHARD_UPDATE_LOCKS=1.\n"
        "[mesh]\n8 x cpu (data=2, fsdp=4)\n"
        "[arrays]\nembed: float32[16,8] P((data, fsdp))\nhead.0: int16[4] P()\n"
    )


def test_changes_are_a_diff(locked):
    locked()
    assert changes(locked, rule=eqxshard.replicate()) == [
        *("-embed: float32[16,8] P(fsdp)", "-head.0: int16[4] P(fsdp)"),
        *("+embed: float32[16,8] P()", "+head.0: int16[4] P()"),
    ]
    tree = {"embed": embedding().embed, "tail": np.ones(2)}
    assert changes(locked, tree=tree, mesh="fsdp=8") == [
        *("-8 x cpu (data=2, fsdp=4)", "+8 x cpu (fsdp=8)"),
        *("-head.0: int16[4] P(fsdp)", "+tail: float64[2] P()"),
    ]


def test_collectives_are_locked_too(locked):
    mesh, batch = make_mesh("data=2,fsdp=4"), jnp.ones((8, 8))

    def place(rule):
        placed = eqxshard.shardings(embedding(), mesh, rule)
        return eqxshard.filter_shard(embedding(), placed)

    whole, split = place(eqxshard.replicate()), place(RULES["fsdp"])
    text = locked(whole, step=total, batch=batch)
    assert text.endswith("P()\n[collectives]\n")
    assert locked(whole, step=total, batch=batch) == text
    found = testing.collectives(total, split, batch)
    lines = [f"+{k}: {n}, {found.bytes[k]} bytes" for k, n in found.counts.items()]
    assert lines and {*lines} <= {*changes(locked, split, step=total, batch=batch)}
    locked.file.unlink()
    locked(split, step=total, batch=batch)
    assert "-[collectives]" in changes(locked, split)


def test_a_lock_is_written_on_request_and_not_in_ci(locked, monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match=r"model\.lock is missing, and CI does not"):
        locked()
    monkeypatch.setenv("EQXSHARD_UPDATE_LOCKS", "1")
    assert "P(fsdp)" in locked()
    assert "P(fsdp)" not in locked(rule=eqxshard.replicate())
    monkeypatch.delenv("EQXSHARD_UPDATE_LOCKS")
    assert "+embed: float32[16,8] P(fsdp)" in changes(locked)


GATHER = testing.Collective(
    kind="all-gather",
    axes=("fsdp",),
    shapes=("f32[16,8]",),
    bytes=512,
    sent=384,
    times=4,
    in_loop=True,
    line="model.py:12",
    function="MLP.__call__",
    leaves=("up", "down"),
    hidden=0.5,
)
REDUCE = dataclasses.replace(
    GATHER,
    **dict(kind="all-reduce", axes=("data", "fsdp"), sent=7, times=1, in_loop=False),
    **dict(leaves=(), line=None, function=None),
)
NAME = "fsdp all-gather of up, down in model.py MLP.__call__"


def test_plans_are_locked_by_what_they_send(tmp_path):
    file = tmp_path / "plan.txt"

    def lock(*collectives):
        memory = 1, 1, 1, 1, 1, 1, 7, None
        plan = made_by_hand(memory, collectives, mesh={"data": 2, "fsdp": 4})
        testing.assert_plan_lock(file, plan)

    lock(GATHER, REDUCE)
    assert file.read_text().splitlines()[2:] == [
        *("backend: gpu", "devices: 8 x NVIDIA H200 141GB HBM3e", "mesh: data=2 x fsdp=4"),
        "data,fsdp all-reduce: 1 x 7 bytes",
        f"{NAME}: 4 x 384 bytes in a loop",
    ]
    # Other lines and schedules change nothing.
    lock(REDUCE, dataclasses.replace(GATHER, line="model.py:20", hidden=0.0))
    # The forward and the backward gather of a weight are two.
    twice = f"{NAME}: 4 x 384 bytes in a loop + 4 x 384 bytes in a loop"
    assert changes(lock, GATHER, GATHER, REDUCE)[1] == f"+{twice}"
    outside = dataclasses.replace(GATHER, times=1, in_loop=False, sent=4 * 384)
    assert changes(lock, outside, REDUCE) == [
        f"-{NAME}: 4 x 384 bytes in a loop",
        f"+{NAME}: 1 x 1536 bytes",
    ]
    both = f"+{NAME}: 1 x 1536 bytes + 4 x 384 bytes in a loop"
    assert changes(lock, GATHER, REDUCE, outside)[1] == both
