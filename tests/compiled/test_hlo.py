import inspect

import jax
import jax.numpy as jnp
import pytest

from eqxshard.compiled._hlo import parse_module, parse_shapes


def compiled(fn, *args):
    return parse_module(jax.jit(fn).lower(*args).compile().as_text() or "")


def products(module):
    """The matrix products, and how often each runs."""
    found = [x for x in module.instructions() if x.opcode == "dot"]
    return {x.computation: module.runs(x.computation)[0] for x in found}


def repeat(x, times):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, None, length=times)[0]


X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


@pytest.mark.versions
def test_the_body_of_a_loop_runs_as_often_as_the_loop():
    module = compiled(lambda x: repeat(repeat(x, 5) @ x, 3), X)
    assert sorted(products(module).values(), key=str) == [1, 3, 5]
    inside = [module.runs(name)[1] for name in products(module)]
    assert sorted(inside) == [False, True, True]


@pytest.mark.versions
@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 7, 1), (3, 11, 2), (3, 12, 2), (-2, 5, 3), (9, 7, 1)]
)
def test_loops_may_start_anywhere_and_take_any_steps(start, stop, step):
    def count(x):
        def body(carry):
            return carry[0] + step, carry[1] @ carry[1]

        return jax.lax.while_loop(lambda c: c[0] < stop, body, (start, x))[1]

    text = jax.jit(count).lower(X).compile().as_text() or ""
    for shown in (text, text.replace("known_trip_count", "other")):
        counts = list(products(parse_module(shown)).values())
        # A compiler may remove code that never runs.
        assert counts == [len(range(start, stop, step))] or (start > stop and not counts)


@pytest.mark.versions
def test_loops_of_unknown_length_have_no_count():
    def grow(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9.0, lambda x: x @ x, x)

    assert list(products(compiled(grow, X)).values()) == [None]


@pytest.mark.versions
def test_instructions_lead_to_lines_of_code():
    def innermost(x):
        return x @ x  # This line.

    module = compiled(lambda x: innermost(x), X)
    (dot,) = [x for x in module.instructions() if x.opcode == "dot"]
    lines, start = inspect.getsourcelines(innermost)
    (offset,) = [i for i, line in enumerate(lines) if "# This line." in line]
    frame, caller, *_ = module.stack(dot)
    assert (frame.file, frame.line) == (caller.file, start + offset)
    assert frame.file == __file__
    here = "test_instructions_lead_to_lines_of_code"
    assert frame.function == f"{here}.<locals>.innermost"
    assert caller.function.startswith(f"{here}.<locals>.<lambda")
    assert dot.op_name.endswith("dot_general")


@pytest.mark.versions
def test_parts_of_tuples_that_are_written_with_a_number_sign():
    module = parse_module(
        "ENTRY %main (x: (f32[4], s32[])) -> s32[] {\n"
        "  %x = (f32[4]{0}, s32[]) parameter(0)\n"
        "  ROOT %y = s32[] negate(%x#1)\n"
        "}\n"
    )
    _, y = module.computations["main"]
    part = module.by_name("main")[y.operands[0]]
    assert (part.opcode, part.operands, part.attribute("index")) == (
        "get-tuple-element",
        ("x",),
        "1",
    )
    assert [str(shape) for shape in part.shapes] == ["s32[]"]


@pytest.mark.versions
@pytest.mark.parametrize(
    "text, dims, size",
    [
        ("f32[8,4]{1,0:T(8,128)}", (8, 4), 128),
        ("bf16[3]", (3,), 6),
        ("pred[<=5]", (5,), 5),
        ("s4[3]", (3,), 2),
        ("f8e4m3fn[2,2]", (2, 2), 4),
        ("token[]", (), 0),
    ],
)
def test_types_of_arrays(text, dims, size):
    (shape,) = parse_shapes(text)
    assert (shape.dims, shape.bytes) == (dims, size)


@pytest.mark.versions
def test_parts_of_an_instruction():
    module = parse_module(
        "ENTRY %main (x: f32[4]) -> f32[4] {\n"
        "  %x = f32[4]{0} parameter(0)\n"
        "  ROOT %y.1 = (f32[4]{0}, /*index=1*/s32[]) custom-call(f32[4] %x, %x),"
        ' dims={0,1}, kind=word, metadata={op_name="f(\\"a\\")/g"}\n'
        "}\n"
    )
    _, y = module.computations["main"]
    assert (y.name, y.opcode, y.operands) == ("y.1", "custom-call", ("x", "x"))
    assert (y.attribute("dims"), y.attribute("kind")) == ("{0,1}", "word")
    assert (y.attribute("other"), y.op_name) == (None, 'f(\\"a\\")/g')
    assert [str(shape) for shape in y.shapes] == ["f32[4]", "s32[]"]


#: A loop as partitioners write it: without annotations, and parts of tuples as `%p#0`.
LOOP = """
%body (p: (s32[], f32[])) -> (s32[], f32[]) {
  %p = (s32[], f32[]) parameter(0)
  %step = s32[] constant(STEP)
  %next = s32[] add(%p#0, %step)
  ROOT %out = (s32[], f32[]) tuple(%next, %p#1)
}
%condition (q: (s32[], f32[])) -> pred[] {
  %q = (s32[], f32[]) parameter(0)
  %last = s32[] LAST
  ROOT %less = pred[] compare(%q#0, %last), direction=LT
}
ENTRY %main (x: f32[]) -> (s32[], f32[]) {
  %x = f32[] parameter(0)
  %constant = s32[] constant(START)
  %start = s32[] copy(%constant)
  %first = (s32[], f32[]) tuple(%start, %x)
  ROOT %loop = (s32[], f32[]) while(%first), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    "start, last, step, times",
    [
        ("0", "constant(9)", "1", 9),
        ("1", "constant(9)", "2", 4),
        ("0", "negate(%q#0)", "1", None),
    ],
)
def test_without_annotations_a_loop_says_its_length_by_its_condition(
    start, last, step, times
):
    text = LOOP.replace("START", start).replace("LAST", last).replace("STEP", step)
    assert parse_module(text).runs("body") == (times, True)
