import jax
import numpy as np
import optax
import pytest
import restore_memory
from helpers import make_mesh

import eqxshard


@pytest.mark.slow
def test_restoring_takes_the_state_and_no_more_than_a_shard_of_it():
    results = restore_memory.measure(2**30)
    assert results.keys() == restore_memory.SPLITS.keys()
    for split, result in results.items():
        assert result.state == 2**30 and result.shard == 2**25
        assert result.state <= result.peak <= result.allowed, (split, result)


def test_parts_that_lie_across_chunks_are_read_whole(tmp_path):
    def make_model(key):
        # Several chunks, whatever the dims are split by.
        return {"x": jax.random.normal(key, (3, 1000, 1008))}

    def where(mesh, *axes):
        rule = eqxshard.by_path({r".*\.x|x": jax.P(*axes)})
        rule = eqxshard.first_match(rule, eqxshard.replicate())
        return {"key": jax.random.key(0), "mesh": make_mesh(mesh), "rule": rule}

    optim = optax.sgd(1.0)
    for axes in ((None, None, None), (None, "fsdp", None), (None, None, "fsdp")):
        folder = tmp_path / "-".join(map(str, axes))
        state = eqxshard.init_state(make_model, optim, **where("fsdp=2", *axes))
        checkpointer = eqxshard.Checkpointer(folder)
        checkpointer.save(state)
        checkpointer.wait()
        for mesh, *split in (
            ("fsdp=8", None, "fsdp", None),
            ("fsdp=8", None, None, "fsdp"),
            ("data=2,fsdp=4", None, "data", "fsdp"),
        ):
            like = eqxshard.abstract_state(make_model, optim, **where(mesh, *split))
            restored = checkpointer.restore(like).model["x"]
            assert restored.sharding.spec == jax.P(*split)
            np.testing.assert_array_equal(restored, state.model["x"])
