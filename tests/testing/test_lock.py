import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RULES, make_mesh
from jax.sharding import PartitionSpec as P

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


class Locked:
    """Locks a model under a rule, and returns the text of the file."""

    def __init__(self, file):
        self.file = file

    def __call__(self, tree=None, rule=None, mesh="data=2,fsdp=4", **options):
        tree = embedding() if tree is None else tree
        rule = rule or RULES["fsdp"]
        testing.assert_sharding_lock(self.file, tree, make_mesh(mesh), rule, **options)
        return self.file.read_text()


@pytest.fixture
def locked(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("EQXSHARD_UPDATE_LOCKS", raising=False)
    return Locked(tmp_path / "locks" / "model.lock")


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


def test_changes_are_listed(locked):
    locked()
    with pytest.raises(AssertionError) as error:
        locked(rule=eqxshard.replicate())
    lines = str(error.value).splitlines()
    assert lines[0] == f"{locked.file} differs:"
    assert lines[1:3] == ["  embed: P(fsdp) -> P()", "  head.0: P(fsdp) -> P()"]
    assert "run this test once with EQXSHARD_UPDATE_LOCKS=1" in lines[3]
    with pytest.raises(AssertionError) as error:
        locked(tree={"embed": embedding(8).embed, "tail": np.ones(2)}, mesh="fsdp=8")
    assert str(error.value).splitlines()[1:-1] == [
        "  mesh: 8 x cpu (data=2, fsdp=4) -> 8 x cpu (fsdp=8)",
        "  embed: float32[16,8] P(fsdp) -> float32[8,8] P(fsdp)",
        "  + tail: float64[2] P()",
        "  - head.0: int16[4] P(fsdp)",
    ]


def test_collectives_are_locked_too(locked):
    mesh, batch = make_mesh("data=2,fsdp=4"), jnp.ones((8, 8))

    def place(rule):
        return eqxshard.filter_shard(
            embedding(), eqxshard.shardings(embedding(), mesh, rule)
        )

    whole, split = place(eqxshard.replicate()), place(RULES["fsdp"])
    text = locked(whole, step=total, batch=batch)
    assert text.endswith("P()\n[collectives]\n")
    assert locked(whole, step=total, batch=batch) == text
    counts = testing.collectives(total, split, batch).counts
    with pytest.raises(AssertionError) as error:
        locked(split, step=total, batch=batch)
    added = [line for line in str(error.value).splitlines() if line.startswith("  +")]
    assert len(added) == len(counts) > 0
    for kind, count in counts.items():
        name = kind if count == 1 else f"{kind}s"
        assert any(f"+{count} {name} (0 -> " in line for line in added)
    locked(split, step=total, batch=batch, update=True)
    with pytest.raises(AssertionError, match=rf"-{counts['all-reduce']} all-reduce"):
        locked(whole, step=total, batch=batch)
    with pytest.raises(AssertionError, match="collectives: no step was given"):
        locked(split)
    file = locked.file
    file.write_text(file.read_text().replace(" bytes", "0 bytes"))
    file.write_text(file.read_text().replace(f"jax {jax.__version__}", "jax 0.9.1"))
    with pytest.raises(AssertionError, match=r"\n  \d+ all-.*0 -> .* bytes\n") as error:
        locked(split, step=total, batch=batch)
    assert error.match(rf"written with jax 0.9.1, and this is {jax.__version__}, whose XLA")


def test_a_lock_is_written_on_request_and_not_in_ci(locked, monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match=r"model\.lock is missing, and CI does not"):
        locked()
    monkeypatch.setenv("EQXSHARD_UPDATE_LOCKS", "1")
    assert "P(fsdp)" in locked()
    assert "P(fsdp)" not in locked(rule=eqxshard.replicate())
    assert "P(fsdp)" not in locked(rule=eqxshard.replicate(), update=False)
    with pytest.raises(AssertionError, match=r"embed: P\(\) -> P\(fsdp\)"):
        locked(update=False)


def test_arrays_on_a_mesh_keep_their_sharding(split, locked):
    state, _, _ = split
    text = locked(state, rule=eqxshard.replicate())
    assert "model.weight: float32[4,8] P(None, fsdp)\n" in text
    with pytest.raises(ValueError, match=r"step is on .*data=2, fsdp=4\), not on 8 x"):
        locked(state, mesh="fsdp=8")


def test_an_invalid_file_is_an_error(locked):
    locked()
    locked.file.write_text(locked.file.read_text() + "<<<<<<< HEAD\n")
    with pytest.raises(
        ValueError, match="line 8 is not valid in a lock file: '<<<<<<< HEAD'"
    ):
        locked()
