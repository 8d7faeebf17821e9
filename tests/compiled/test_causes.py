import jax
import pytest
from plan_helpers import OPTIM, RULE
from transformer import Transformer, make_tokens, next_token_losses

import eqxshard
from eqxshard.compiled._causes import Causes
from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.sharding._leaves import array_leaves

SIZES = {"data": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def found():
    """The causes of a compiled step's collectives, by the fused text of CPUs."""
    mesh = eqxshard.make_mesh(data=2, fsdp=4)
    state = eqxshard.abstract_state(
        Transformer, OPTIM, key=jax.random.key(0), mesh=mesh, rule=RULE
    )
    step = eqxshard.make_train_step(next_token_losses, OPTIM)
    compiled = step.lower(state, make_tokens(16)).compile()
    module = parse_module(compiled.as_text() or "")
    arrays = list(enumerate(array_leaves(state.model), start=1))
    paths = {f"arrays[{number}]": path for number, (path, _) in arrays}
    shapes = {path: x.sharding.shard_shape(x.shape) for _, (path, x) in arrays}
    causes = Causes(module, SIZES, paths, shapes)
    return [(op, causes) for op in find_collectives(module, 8)]


@pytest.mark.slow
def test_gathered_arrays_are_followed_through_fusions_and_loops(found):
    gathers = [(op, causes) for op, causes in found if op.kind == "all-gather"]
    inside = {path for op, c in gathers if op.in_loop for path in c.leaves(op)}
    assert {"blocks.mlp.up", "blocks.mlp.bias", "blocks.attention.out"} <= inside
    outside = {path for op, c in gathers if not op.in_loop for path in c.leaves(op)}
    assert {"embedding", "position"} <= outside
    for op, causes in gathers:
        assert len(causes.leaves(op)) <= len(op.shapes)


def test_every_line_is_one_of_the_user(found):
    frames = [causes.frame(op) for op, causes in found]
    lines = {frame.place for frame in frames if frame}
    files = {line.split(":")[0] for line in lines}
    assert "transformer.py" in files
    # The optimizer is wrapped in the last, and what it returns is checked to be finite.
    assert files <= {"transformer.py", "test_causes.py", "helpers.py"}


SUM = """
ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8] parameter(0)
  ROOT %sum = f32[4,8] all-reduce(%a), replica_groups=GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("groups", "leaves"),
    # Along `data`, along `tensor` and along both.
    [("{{0,2},{1,3}}", ("up",)), ("{{0,1},{2,3}}", ()), ("{{0,1,2,3}}", ("up",))],
)
def test_sums_over_other_axes_are_of_no_array(groups, leaves):
    module = parse_module(SUM.replace("GROUPS", groups))
    causes = Causes(module, {"data": 2, "tensor": 2}, {}, {"up": (4, 8)})
    (operation,) = find_collectives(module, 4)
    assert causes.leaves(operation) == leaves


TWO = """
ENTRY %main (a: f32[4,8], b: f32[8]) -> f32[40] {
  %a = f32[4,8] parameter(0)
  %b = f32[8] parameter(1)
  %flat = f32[32] bitcast(%a)
  %joined = f32[40] concatenate(%flat, %b), dimensions={0}
  ROOT %sum = f32[40] all-reduce(%joined), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}
"""


def test_gradients_that_the_compiler_joins_are_all_named():
    # None of them is as large as all.
    shapes = {"up": (8, 4), "bias": (8,), "other": (40,), "down": (2, 8)}
    causes = Causes(parse_module(TWO), SIZES, {}, shapes)
    (operation,) = find_collectives(parse_module(TWO), 8)
    assert causes.leaves(operation) == ("bias", "up")


def test_what_the_loop_over_layers_reduces_is_of_layers(found):
    named = {
        path
        for op, causes in found
        if op.in_loop and op.kind in ("all-reduce", "reduce-scatter")
        for path in causes.leaves(op)
    }
    # The embedding is not named, though each of its rows has the dims of a layer's bias.
    assert "blocks.mlp.up" in named
    assert {path.split(".")[0] for path in named} == {"blocks"}


#: The gradients of six layers are made one after the other, for each of two microbatches.
LAYERS = """
%layer (t: (f32[6,4], f32[4])) -> (f32[6,4], f32[4]) {
  %t = (f32[6,4], f32[4]) parameter(0)
  %all = f32[6,4] get-tuple-element(%t), index=0
  %x = f32[4] get-tuple-element(%t), index=1
  %sum = f32[4] all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %row = f32[1,4] bitcast(%sum)
  %new = f32[6,4] dynamic-update-slice(%all, %row, %i, %zero)
  ROOT %r = (f32[6,4], f32[4]) tuple(%new, %x)
}

%microbatch (t: (f32[6,4], f32[4])) -> (f32[6,4], f32[4]) {
  %t = (f32[6,4], f32[4]) parameter(0)
  %x = f32[4] get-tuple-element(%t), index=1
  %sum = f32[4] all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %w = (f32[6,4], f32[4]) while(%t), condition=%c, body=%layer
}

ENTRY %main (t: (f32[6,4], f32[4])) -> (f32[6,4], f32[4]) {
  %t = (f32[6,4], f32[4]) parameter(0)
  ROOT %w = (f32[6,4], f32[4]) while(%t), condition=%c, body=%microbatch
}
"""


def test_a_matrix_outside_the_loop_is_no_stack_of_layers():
    module = parse_module(LAYERS)
    shapes = {"head.weight": (4, 4), "head.bias": (4,), "blocks.bias": (6, 4)}
    causes = Causes(module, SIZES, {}, shapes)
    inner, outer = find_collectives(module, 8)
    assert causes.leaves(inner) == ("blocks.bias",)
    assert causes.leaves(outer) == ("head.bias",)
