"""Checkpoints that another version of eqxshard has written."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from checkpoint_helpers import copied, like, new_state
from helpers import assert_equal, make_mesh

import eqxshard
from eqxshard.checkpoint._manifest import write_checksums

#: Format 1: step 7 of a small state, on a mesh of 2 x 4 devices.
OLD = Path(__file__).parent / "written_by_0.1.0.zip"


@pytest.mark.versions
@pytest.mark.parametrize("mesh", ["fsdp=8", "data=1"])
def test_a_checkpoint_of_the_first_format_is_read_and_can_be_continued(tmp_path, mesh):
    shutil.unpack_archive(OLD, tmp_path)
    split = jax.NamedSharding(make_mesh(mesh), jax.P("fsdp"))
    whole = jax.NamedSharding(split.mesh, jax.P())
    numbers = np.arange(24, dtype=np.float32).reshape(8, 3)
    model = {
        "split": jax.device_put(numbers, split),
        "copies": jax.device_put(np.arange(5, dtype=np.int32), whole),
        "half": jax.device_put(jnp.full((2, 2), 0.5, jnp.bfloat16), whole),
    }
    step, key = (jax.device_put(x, whole) for x in (jnp.int32(7), jax.random.key(3)))
    state = eqxshard.TrainState(step, model, (), key)
    checkpointer = eqxshard.Checkpointer(tmp_path, max_to_keep=1, best="eval/loss")
    assert checkpointer.best_step() == 7
    assert_equal(checkpointer.restore(state), state)
    later = eqxshard.TrainState(step + 1, model, (), key)
    checkpointer.save(later, metrics={"eval/loss": 0.1})
    checkpointer.wait()
    assert checkpointer.steps() == [8]
    assert not (tmp_path / "7").exists()


def test_arrays_without_a_database_are_read(checkpoints, tmp_path):
    """Version 0.1.0 wrote them so to object stores, from where they may be copied."""
    folder = copied(checkpoints, tmp_path)
    checkpointer = eqxshard.Checkpointer(folder)
    state = checkpointer.restore(like())
    base = {"driver": "file", "path": f"{folder}/10/state/"}
    database = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    for name in database.list().result():
        file = folder / "10" / "arrays" / name.decode()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(database.read(name).result().value)
    shutil.rmtree(folder / "10" / "state")
    write_checksums(checkpointer.directory / "10")
    assert_equal(checkpointer.restore(like()), state)


def test_a_checkpoint_of_a_later_format_is_refused_and_stays(checkpoints, tmp_path):
    folder = copied(checkpoints, tmp_path)
    file = folder / "10" / "description.json"
    written = json.loads(file.read_text())
    assert written["version"] == eqxshard.__version__
    file.write_text(json.dumps({**written, "format": 99, "version": "9.8"}))
    checkpointer = eqxshard.Checkpointer(folder, max_to_keep=1)
    write_checksums(checkpointer.directory / "10")
    says = r"step 10 in .* was written by eqxshard 9\.8, in format 99, and this is .*; upd"
    for step in ("newest", 10):
        with pytest.raises(ValueError, match=says):
            checkpointer.restore(like(), step=step)
    assert int(checkpointer.restore(like(), step=8).step) == 8
    checkpointer.save(new_state())
    checkpointer.wait()
    assert 10 in checkpointer.steps()
