import jax
import numpy as np
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard import testing


class Text:
    """A compiled function of another platform: only its text."""

    input_shardings = output_shardings = ()

    def __init__(self, text):
        self.text = text

    def lower(self):
        return self

    def compile(self):
        return self

    def as_text(self):
        return self.text


@pytest.mark.versions
def test_no_collectives():
    found = testing.assert_collectives(Text("HloModule jit_f\n"))
    assert (found, str(found)) == ((), "no collectives")


@pytest.mark.versions
def test_collectives_of_a_step(split):
    state, step, batch = split
    compiled = step.lower(state, batch).compile()
    found = testing.collectives(compiled)
    assert found.counts.keys() == {"all-gather", "all-reduce"}
    gathered = {shape for op in found if op.kind == "all-gather" for shape in op.shapes}
    assert gathered == {"f32[4,8]", "f32[4]", "f32[8]"}
    assert found.bytes["all-gather"] == 4 * (32 + 4 + 8)
    assert {op.axes for op in found if op.kind == "all-gather"} == {("fsdp",)}
    assert " fsdp " in str(found)
    assert found.times == found.counts
    assert testing.assert_collectives(compiled, exactly=found.counts) == found
    reduces = found.counts["all-reduce"]
    at_most = {"all-reduce": reduces + 1}
    testing.assert_collectives(compiled, exactly={"all-gather": 3}, at_most=at_most)
    with pytest.raises(AssertionError) as error:
        testing.assert_collectives(compiled, at_most={"all-gather": 2})
    assert "has 3 all-gather instead of at most 2; " in str(error.value)
    assert f"{reduces} all-reduce instead of at most 0" in str(error.value)
    assert "f32[4,8]" in str(error.value) and "128" in str(error.value)


@pytest.mark.versions
def test_a_collective_in_a_loop_counts_once_but_runs_in_every_iteration():
    mesh = make_mesh("fsdp=8")

    @eqxshard.filter_jit
    def powers(x):
        def body(x, _):
            x = eqxshard.filter_shard(x @ x, NamedSharding(mesh, P("fsdp")))
            return eqxshard.filter_shard(x, NamedSharding(mesh, P())), None

        return jax.lax.scan(body, x, None, length=5)[0]

    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P()))
    found = testing.collectives(powers, x)
    assert found.times["all-gather"] == 5 * found.counts["all-gather"] > 0


@pytest.mark.versions
def test_unknown_kinds_are_errors():
    with pytest.raises(ValueError, match=r"'all_gather' is not a kind .*; use one of all-"):
        testing.assert_collectives(Text(""), at_most={"all_gather": 1})
