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


#: As XLA writes it for a GPU: asynchronous, combined and in loops.
GPU = """
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %x, f32[] %y), metadata={op_name="all-reduce(x)"}
}

%inner (p: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %scatter = ((bf16[32]{0}), bf16[4]{0}) reduce-scatter-start(bf16[32]{0} %q), to_apply=%add
  ROOT %done.1 = bf16[4]{0} reduce-scatter-done(%scatter)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = (f32[2,4]{1,0:T(8,128)}, f32[16,4]{1,0:T(8,128)}) all-gather-start(f32[2,4] %p)
  %all-gather-done.7 = f32[16,4]{1,0:T(8,128)} all-gather-done(%start)
  %loop = (s32[]) while(%t), condition=%test, body=%inner, THREE
}

%unbounded (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %permute = (pred[3]{0}, /*index=1*/s4[5]{0}) collective-permute-done(%other)
}

%test (p: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(s32[] %a, s32[] %b), direction=LT
}

ENTRY %main.3_spmd (p: f32[8]) -> f32[8] {
  %reduced = (f32[4]{0}, f32[], /*index=2*/c64[2]{0}) all-reduce(%a, %b, %c), to_apply=%add
  %loop.1 = (s32[]) while(%t), condition=%test, body=%body, FIVE
  %loop.2 = (s32[], f32[8]{0}) while(%tuple), condition=%test, body=%unbounded
  ROOT %all-to-all.1 = u8[7]{0} all-to-all(u8[7]{0} %all-reduce.9), metadata={op_name="x"}
}
"""
for word, times in {"THREE": 3, "FIVE": 5}.items():
    trips = f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    GPU = GPU.replace(word, trips)


@pytest.mark.versions
def test_asynchronous_and_combined_collectives_count_once():
    found = testing.collectives(Text(GPU))
    ops = {op.kind: op for op in found.ops}
    assert len(ops) == len(found.ops) == 5
    assert ops["all-reduce"].shapes == ("f32[4]", "f32[]", "c64[2]")
    assert ops["all-gather"].shapes == ("f32[16,4]",)
    assert found.bytes == {
        "all-reduce": 4 * 4 + 4 + 2 * 8,
        "all-gather": 16 * 4 * 4,
        "reduce-scatter": 4 * 2,
        "all-to-all": 7,
        "collective-permute": 3 + 3,
    }
    assert found.counts == dict.fromkeys(found.bytes, 1)
    assert found.times == {
        "all-reduce": 1,
        "all-gather": 5,
        "reduce-scatter": 15,
        "all-to-all": 1,
        "collective-permute": None,
    }


@pytest.mark.versions
def test_no_collectives():
    found = testing.assert_collectives(Text("HloModule jit_f\n"))
    assert (found.ops, str(found)) == ((), "no collectives")


@pytest.mark.versions
def test_collectives_of_a_step(split):
    state, step, batch = split
    compiled = step.lower(state, batch).compile()
    found = testing.collectives(compiled)
    assert found.counts.keys() == {"all-gather", "all-reduce"}
    gathered = {shape for op in found.ops if op.kind == "all-gather" for shape in op.shapes}
    assert gathered == {"f32[4,8]", "f32[4]", "f32[8]"}
    assert found.bytes["all-gather"] == 4 * (32 + 4 + 8)
    assert {op.axes for op in found.ops if op.kind == "all-gather"} == {("fsdp",)}
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
