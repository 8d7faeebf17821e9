"""Annotations of fields: unions, aliases, inheritance, strings."""

import sys
import types
from typing import Annotated, Any

import equinox as eqx
import jax
import pytest
from equinox import nn
from jaxtyping import Array, ArrayLike, Float
from sharding_helpers import dims, dims_of, names, shapes
from sharding_helpers import struct as zeros

KEY = jax.random.key(0)
Up = Float[Array, "mlp embed"]
UP, ONE = zeros(4, 2), zeros(3)

Alias = Annotated[Up | None, "any text"]


@pytest.mark.parametrize(
    "annotation",
    [
        Up | None,
        Up | list[Up],
        Float[ArrayLike, "mlp embed"],
        Annotated[Up | None, "any text", 3],
        Alias,
        'Float[Array, "mlp embed"] | None',
        "Alias",
    ],
    ids=str,
)
def test_an_annotation_is_found_inside_others(annotation):
    assert dims_of(annotation, zeros(4, 2)) == {"": ("mlp", "embed")}


class Base(eqx.Module):
    value: Float[Array, " base"]
    own: Up


class Sub(Base):
    value: Float[Array, " sub"]  # pyright: ignore


class Mixin(eqx.Module):
    value: eqx.AbstractVar[Float[Array, " abstract"]]


class Concrete(Mixin):
    value: Float[Array, " concrete"]


@pytest.mark.parametrize(
    "annotation, value, expected",
    [
        (Base, Sub(ONE, UP), {"value": "sub", "own": "mlp embed"}),
        (Any, Base(ONE, UP), {"value": "base", "own": "mlp embed"}),
        (Mixin, Concrete(ONE), {"value": "concrete"}),
        (list["Sub"], [Sub(ONE, UP)], {"0.value": "sub", "0.own": "mlp embed"}),
    ],
)
def test_the_value_tells_the_class(annotation, value, expected):
    expected = {path: names(text) for path, text in expected.items()}
    assert dims_of(annotation, value) == expected


FUTURE = """
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import equinox as eqx
from equinox import nn
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from nowhere import Nothing

class Model(eqx.Module):
    up: Float[Array, "mlp embed"]
    linear: list[Annotated[nn.Linear, "mlp embed"]]
    after: After
    missing: Nothing
    nested: list[Nothing] | None

class After(eqx.Module):
    value: Float[Array, "after"]

Up = Float[Array, "mlp embed"]

class Other(eqx.Module):
    Up: Up = None
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
    linear = shapes(lambda: nn.Linear(2, 4, key=KEY))
    # An unresolvable annotation matters only if it leads to an array.
    model = made.Model(UP, [linear], made.After(ONE), "not an array", [None])
    assert dims(model) == {
        "up": ("mlp", "embed"),
        "linear.0.weight": ("mlp", "embed"),
        "linear.0.bias": ("mlp",),
        "after.value": ("after",),
    }
    for field in ("missing", "nested"):
        broken = eqx.tree_at(lambda m: getattr(m, field), model, [linear])  # noqa: B023
        with pytest.raises(ValueError, match=rf"Model\.{field}: .*Nothing.* cannot be res"):
            dims(broken)
    # A default does not hide a type of its name.
    assert dims(made.Other(UP)) == {"Up": ("mlp", "embed")}


PEP695 = """
import equinox as eqx
from jaxtyping import Array, Float
from typing import Annotated
from equinox import nn

type Up = Float[Array, "mlp embed"]
type Layer = Annotated[nn.Linear, "mlp embed"]
type Nest = Up | list[Nest]

class Model(eqx.Module):
    up: Up
    layer: Layer
    nest: Nest
    text: "list[Up]"
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="new syntax of Python 3.12")
def test_type_statements(execute):
    made = execute(PEP695)
    model = made.Model(UP, nn.Linear(2, 4, key=KEY), [[UP], UP], [UP])
    named = {path for path, dims in dims(model).items() if dims == ("mlp", "embed")}
    assert named == {"up", "layer.weight", "nest.0.0", "nest.1", "text.0"}
