"""Annotations of fields: unions, aliases, generics, strings."""

import sys
import types
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    NewType,
    Optional,
    TypeVar,
    TypeVarTuple,
    Union,
)

import equinox as eqx
import jax
import numpy as np
import pytest
from equinox import nn
from jaxtyping import Array, ArrayLike, Float, Int, PyTree, Shaped
from sharding_helpers import (
    Box,
    S,
    Swapped,
    T,
    Two,
    dims,
    dims_error,
    dims_of,
    module,
    names,
    shapes,
)
from sharding_helpers import struct as zeros
from typing_extensions import TypeAliasType

KEY = jax.random.key(0)
Ts = TypeVarTuple("Ts")
Up = Float[Array, "mlp embed"]
UP, ONE = zeros(4, 2), zeros(3)


# Optional fields, unions, aliases

Alias = Annotated[Up | None, "any text"]
Weight = NewType("Weight", Up)  # pyright: ignore


@pytest.mark.parametrize(
    "annotation",
    [
        Up | None,
        Optional[Up],  # noqa: UP045
        Union[None, Up],  # noqa: UP007
        Up | float,
        Up | list[Up],
        Up | Float[Array, "mlp embed"],
        Up | Int[Array, "mlp embed"],
        Up | Float[np.ndarray, "mlp embed"],
        Float[ArrayLike, "mlp embed"],
        Float[Array | np.ndarray, "mlp embed"],
        Up | jax.Array,
        Annotated[Up, "any text", 3],
        Optional[Annotated[Up, 3]],  # noqa: UP045
        Annotated[Up | None, "any text"],
        Alias,
        Weight,
        Final[Up],
        Shaped[Float[Array, " embed"], "mlp"],
        'Float[Array, "mlp embed"]',
        'Float[Array, "mlp embed"] | None',
        "Alias",
        "Up",
        "Final[Up]",
        Annotated["Up", 3],
        PyTree[Up],
    ],
    ids=str,
)
def test_an_annotation_is_found_inside_others(annotation):
    assert dims_of(annotation, zeros(4, 2)) == {"": ("mlp", "embed")}


# Inheritance and generics


class Sub(Box[Float[Array, "sub"]]):
    own: Up


class Deep(Sub):
    pass


class Both(Sub, Box):
    pass


class Renamed(Deep):
    value: Float[Array, " renamed"]  # pyright: ignore


class Forward(Box["Later"]):
    pass


class Nested(Box[list[T]]):
    pass


class Tree(Box[PyTree[T]], Generic[T]):
    pass


Later = Float[Array, "later"]
OldAlias = TypeAliasType("OldAlias", list[T], type_params=(T,))
Bounded = TypeVar("Bounded", bound=Float[Array, " bounded"])


class Bound(eqx.Module, Generic[Bounded]):
    value: Bounded


class Many(eqx.Module, Generic[*Ts]):
    items: tuple[*Ts]


class Mixin(eqx.Module):
    value: eqx.AbstractVar[Float[Array, " abstract"]]


class Concrete(Mixin):
    value: Float[Array, " concrete"]


@pytest.mark.parametrize(
    "annotation, value, expected",
    [
        (Box[Up], Box(UP), {"value": "mlp embed"}),
        (Box["Up"], Box(UP), {"value": "mlp embed"}),
        (Box[Box[Up]], Box(Box(UP)), {"value.value": "mlp embed"}),
        (Box[list[Up] | None], Box([UP]), {"value.0": "mlp embed"}),
        (Box[Up], [UP], {"0": None}),  # a wrong annotation says nothing
        (list[Box[Up]] | Box[Later], [Box(UP)], {"0.value": "mlp embed"}),
        (Box[Up] | Sub, Box(UP), {"value": "mlp embed"}),
        (Box[Up] | Box[Later], Box(ONE), {"value": "later"}),
        (Two[Up, Later], Two([UP], ONE), {"first.0": "mlp embed", "second": "later"}),
        (Swapped[Up, Later], Swapped([ONE], UP, (UP, ONE)),
         {"first.0": "later", "second": "mlp embed"}
         | {"third.0": "mlp embed", "third.1": "later"}),
        # The value tells the class, the annotation its arguments, through a base.
        (Two[Later, Up], Swapped([ONE], UP, (UP, ONE)),
         {"first.0": "later", "second": "mlp embed"}
         | {"third.0": "mlp embed", "third.1": "later"}),
        (Sub, Sub(ONE, UP), {"value": "sub", "own": "mlp embed"}),
        (Any, Sub(ONE, UP), {"value": "sub", "own": "mlp embed"}),
        (Box[Any], Sub(ONE, UP), {"value": "sub", "own": "mlp embed"}),
        (eqx.Module, Deep(ONE, UP), {"value": "sub", "own": "mlp embed"}),
        (Any, Both(ONE, UP), {"value": "sub", "own": "mlp embed"}),
        (Deep, Renamed(ONE, UP), {"value": "renamed", "own": "mlp embed"}),
        (Any, Forward(ONE), {"value": "later"}),
        (Nested[Up], Nested([UP]), {"value.0": "mlp embed"}),
        (OldAlias[Up], [UP], {"0": "mlp embed"}),
        (OldAlias[Box[Up]] | None, [Box(UP)], {"0.value": "mlp embed"}),
        (Tree[Up], Tree({"a": UP}), {"value.a": "mlp embed"}),
        # Several at once say nothing.
        (Many[Up], Many((UP,)), {"items.0": None}),
        (Many[Up, Later], Many((UP, ONE)), {"items.0": None, "items.1": None}),
        # Equinox's own are seldom given arguments.
        (nn.StateIndex, nn.StateIndex(ONE), {"init": None}),
        (nn.StateIndex[Up], nn.StateIndex(UP), {"init": "mlp embed"}),
        (Bound, Bound(ONE), {"value": "bounded"}),
        (Any, Bound(ONE), {"value": "bounded"}),
        (Mixin, Concrete(ONE), {"value": "concrete"}),
        # Where nobody said that it is a Box, nobody left an argument out.
        (Any, Box(UP), {"value": None}),
        (list, [Box(Sub(ONE, UP))], {"0.value.value": "sub", "0.value.own": "mlp embed"}),
        (Box, Box(Sub(ONE, UP)), {"value.value": "sub", "value.own": "mlp embed"}),
    ],
)  # fmt: skip
def test_type_variables_are_replaced_by_their_arguments(annotation, value, expected):
    expected = {
        path: text if text is None else names(text) for path, text in expected.items()
    }
    assert dims_of(annotation, value) == expected


def test_the_root_may_be_a_generic_module_itself():
    assert dims(Sub(ONE, UP)) == {"value": ("sub",), "own": ("mlp", "embed")}
    assert dims(Box(ONE)) == {"value": None}


def test_a_local_class_may_name_itself_and_its_type_variables():
    V = TypeVar("V")

    class Node(eqx.Module, Generic[V]):
        value: "V"
        children: "list[Node[V]]"

    tree = Node(UP, [Node(UP, [])])
    assert dims_of(Node[Up], tree) == {
        "value": ("mlp", "embed"),
        "children.0.value": ("mlp", "embed"),
    }


# Strings and new syntax

FUTURE = """
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Generic, NamedTuple, TypeVar

import equinox as eqx
from equinox import nn
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from nowhere import Nothing

T = TypeVar("T")

class Model(eqx.Module):
    count: ClassVar[int] = 3
    up: Float[Array, "mlp embed"]
    linear: list[Annotated[nn.Linear, "mlp embed"]]
    after: After[Float[Array, "after"]]
    final: Final[Float[Array, "final"]]
    missing: Nothing
    nested: list[Nothing] | None

class After(eqx.Module, Generic[T]):
    value: T
    pair: Pair[T] | None

class Pair(NamedTuple, Generic[T]):
    one: T
"""


@pytest.fixture
def execute(monkeypatch):
    """A new module of Python, from its text."""

    def run(text):
        made = types.ModuleType("made_up")
        monkeypatch.setitem(sys.modules, "made_up", made)
        exec(text, vars(made))
        return made

    return run


def test_postponed_annotations_are_read_one_by_one(execute):
    made = execute(FUTURE)
    after = made.After(ONE, made.Pair(ONE))
    linear = shapes(lambda: nn.Linear(2, 4, key=KEY))
    # An unresolvable annotation matters only if it leads to an array.
    model = made.Model(UP, [linear], after, ONE, "not an array", [None])
    assert dims(model) == {
        "up": ("mlp", "embed"),
        "linear.0.weight": ("mlp", "embed"),
        "linear.0.bias": ("mlp",),
        "after.value": ("after",),
        "after.pair.one": ("after",),
        "final": ("final",),
    }
    for field in ("missing", "nested"):
        broken = eqx.tree_at(lambda m: getattr(m, field), model, [linear])  # noqa: B023
        with pytest.raises(ValueError) as info:
            dims(broken)
        message = str(info.value)
        assert message.startswith(f"Model.{field}: ")
        assert "Nothing" in message
        assert "cannot be resolved (name 'Nothing' is not defined); import or" in message
        assert "at the top of made_up, outside of TYPE_CHECKING." in message


def test_a_default_does_not_hide_a_type_of_its_name(execute):
    field = "class Other(eqx.Module):\n    Up: Up = None\n"
    made = execute(FUTURE + 'Up = Float[Array, "mlp embed"]\n' + field)
    assert dims(made.Other(UP)) == {"Up": ("mlp", "embed")}


PEP695 = """
import equinox as eqx
from jaxtyping import Array, Float
from typing import Annotated
from equinox import nn

type Up = Float[Array, "mlp embed"]
type Either[A] = A | list[A] | None
type Layer = Annotated[nn.Linear, "mlp embed"]
type Nest = Up | list[Nest]

class Box[T](eqx.Module):
    value: T
    either: Either[T]

class Bound[T: Float[Array, "bound"]](eqx.Module):
    value: "T"

class Sub[T](Box[T]):
    own: "list[T]"

class Model(eqx.Module):
    up: Up
    layer: Layer
    box: Box[Up]
    sub: Sub[Float[Array, "sub"]]
    bound: Bound
    nest: Nest
    text: "Either[Up]"
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="new syntax of Python 3.12")
def test_type_parameters_and_type_statements(execute):
    made = execute(PEP695)
    model = made.Model(
        up=UP,
        layer=nn.Linear(2, 4, key=KEY),
        box=made.Box(UP, [UP]),
        sub=made.Sub(ONE, ONE, [ONE]),
        bound=made.Bound(ONE),
        nest=[[UP], UP],
        text=UP,
    )
    found = dims(model)
    assert {path for path, dims in found.items() if dims == ("mlp", "embed")} == {
        "up", "layer.weight", "box.value", "box.either.0", "nest.0.0", "nest.1", "text",
    }  # fmt: skip
    assert [found[f"sub.{path}"] for path in ("value", "either", "own.0")] == [("sub",)] * 3
    assert found["bound.value"] == ("bound",)
    assert found["layer.bias"] == ("mlp",)
    wrong = execute(
        "type Up = Flaot\nimport equinox\nclass Model(equinox.Module):\n    x: Up"
    )
    message = r"^Model\.x: Up cannot be resolved \(name 'Flaot' .* at the top of made_up"
    with pytest.raises(ValueError, match=message):
        dims(wrong.Model(UP))


@pytest.mark.skipif(sys.version_info < (3, 13), reason="new syntax of Python 3.13")
def test_a_type_parameter_may_have_a_default(execute):
    made = execute(
        PEP695.partition("class Box")[0]
        + 'class Box[T = Float[Array, "default"]](eqx.Module):\n    value: T\n'
        "class Model(eqx.Module):\n    box: Box\n    other: Box[Up]\n"
    )
    found = dims(made.Model(made.Box(ONE), made.Box(UP)))
    assert found == {"box.value": ("default",), "other.value": ("mlp", "embed")}
    assert dims(made.Box(ONE)) == {"value": ("default",)}


# Mistakes


@pytest.mark.parametrize(
    "annotation, value, message",
    [
        (Box[Up], Box(zeros(4)), 'Box.value: Float[Array, "mlp embed"] names more dims'),
        (Box[Up] | int, Box(zeros(4)), 'Box.value: Float[Array, "mlp embed"] names more'),
        (
            Box,
            Box(zeros(4)),
            "Box.value: T names no dims, because T has no argument; give it one where "
            'the class is a base or in an annotation: Box[Float[Array, "mlp embed"]].',
        ),
        (list[Box], [Box({"a": [zeros(4)]})], "Box.value: T names no dims"),
        (Two[Up, S], Two([UP], zeros(4)), "Two.second: S names no dims"),  # pyright: ignore
        (Box[Nested], Box(Nested([zeros(4)])), "Box.value: T names no dims"),
        (
            "Flaot[Array, 'mlp']",
            zeros(4),
            "Block.x: Flaot[Array, 'mlp'] cannot be resolved (name 'Flaot' is not "
            "defined); import or define its names at the top of ",
        ),
        ("list[Flaot]", [zeros(4)], "cannot be resolved (name 'Flaot' is not defined)"),
        ("Float[Array, 'a, b']", zeros(4), "cannot be resolved (Axes should be separated"),
        ("Float[", zeros(4), "cannot be resolved"),
    ],
)
def test_mistakes_are_named(annotation, value, message):
    assert message in dims_error(annotation, value)


def test_a_base_without_its_argument_is_named():
    with pytest.raises(ValueError, match=r"^Box\.value: T names no dims.* a base or in"):
        dims(module(Box)(zeros(4)))


def test_a_base_that_cannot_be_resolved_is_named():
    class Lost(Box["Nowhere"]):  # pyright: ignore
        pass

    with pytest.raises(
        ValueError, match=r"^class Lost cannot be resolved \(name 'Nowhere'"
    ):
        dims(Lost(ONE))
