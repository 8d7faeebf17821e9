"""Names of dims, as annotations say them: every case is read through a rule."""

import inspect
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    NamedTuple,
    NewType,
    Optional,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Union,
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import (
    Array,
    ArrayLike,
    Bool,
    Float,
    Int,
    Key,
    PRNGKeyArray,
    PyTree,
    Scalar,
    Shaped,
)
from typing_extensions import TypeAliasType

import eqxshard

KEY = jax.random.key(0)
T = TypeVar("T")
S = TypeVar("S")
Ts = TypeVarTuple("Ts")
Up = Float[Array, "mlp embed"]


def dims(tree):
    """The names of the dims of every array of a PyTree, as rules see them."""
    seen = {}

    def rule(path, leaf, mesh):
        seen[path] = found = leaf.dims
        assert found is None or len(found) == len(leaf.shape), path

    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    eqxshard.shardings(tree, mesh, rule)
    return seen


def dims_of(annotation, value):
    """The dims in a module with one field."""
    return under("x", dims(module(x=annotation)(value)))


def under(path, found):
    """What is at and below a path, relative to it."""
    return {name[len(path) + 1 :]: dims for name, dims in found.items()}


def module(*bases, **annotations):
    """A new module, named as errors should name it."""
    namespace = {"__annotations__": annotations, "__module__": __name__}
    return type("Block", bases or (eqx.Module,), namespace)


def zeros(*shape, dtype=jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def names(text):
    """`"mlp _ embed"`, as dims."""
    return tuple(None if name == "_" else name for name in text.split())


def error(annotation, value):
    with pytest.raises(ValueError) as info:
        dims_of(annotation, value)
    return str(info.value)


# Dims of one array


@pytest.mark.parametrize(
    "text, shape, expected",
    [
        ("mlp embed", (4, 2), "mlp embed"),
        ("mlp", (4,), "mlp"),
        ("", (), ""),
        (" mlp  embed ", (4, 2), "mlp embed"),
        ("embed embed", (4, 4), "embed embed"),
        ("3 embed", (3, 2), "_ embed"),
        ("_ embed", (3, 2), "_ embed"),
        ("_heads embed", (3, 2), "_ embed"),
        ("#mlp #3 ?embed", (4, 3, 2), "mlp _ embed"),
        ("?#mlp", (4,), "mlp"),
        ("rows=3 #cols=4", (3, 4), "rows cols"),
        (
            "3*embed embed*3 embed-1 min(a,b)",
            (6, 6, 1, 2),
            "3*embed embed*3 embed-1 min(a,b)",
        ),
        ("q_heads head_dim2", (4, 2), "q_heads head_dim2"),
        # Variadic dims take what is left over, and there are no extra ones.
        ("...", (), ""),
        ("...", (4, 2), "_ _"),
        ("*batch mlp", (4,), "mlp"),
        ("*batch mlp", (2, 4), "_ mlp"),
        ("*batch mlp", (2, 3, 4), "_ _ mlp"),
        ("mlp ... embed", (4, 7, 8, 2), "mlp _ _ embed"),
        ("mlp *#shape", (4, 7), "mlp _"),
        ("mlp *_", (4, 7), "mlp _"),
        # The dims of stacked modules: the outermost is the layers.
        ("mlp embed", (3, 4, 2), "layers mlp embed"),
        ("mlp embed", (3, 5, 4, 2), "layers _ mlp embed"),
        ("", (3,), "layers"),
        ("", (3, 5, 7), "layers _ _"),
        ("layers mlp", (3, 4), "layers mlp"),
        ("layers mlp", (5, 3, 4), "_ layers mlp"),
    ],
)
def test_an_annotation_names_the_dims(text, shape, expected):
    assert dims_of(Float[Array, text], zeros(*shape)) == {"": names(expected)}


@pytest.mark.parametrize(
    "annotation", [jax.Array, Array, np.ndarray, Any, object, PyTree, list, None, "Any"]
)
def test_where_nothing_is_said_there_are_no_names(annotation):
    assert dims_of(annotation, zeros(4, 2)) == {"": None}


def test_nothing_is_said_where_other_arrays_are_allowed():
    for annotation in (Up | Array, Optional[Up | Any], PyTree[Up] | Array):  # noqa: UP045
        assert dims_of(annotation, zeros(3)) == {"": None}


def test_arrays_of_no_module_have_no_names():
    assert dims(zeros(4)) == {"": None}
    assert dims({"a": [zeros(4)], "b": (zeros(),)}) == {"a.0": None, "b.0": None}


@pytest.mark.parametrize(
    "array",
    [zeros(4, 2), np.zeros((4, 2), np.float32), np.ones((4, 2), np.int8), jnp.ones((4, 2))],
    ids=["shape", "NumPy", "integers", "JAX"],
)
def test_any_kind_of_array_has_names(array):
    assert dims_of(Up, array) == {"": ("mlp", "embed")}


def test_other_leaves_are_left_alone_and_may_be_gone():
    cls = module(name=str, up=Up, act=Any, down=Float[Array, "embed mlp"])
    model = cls("x", jnp.ones((4, 2)), jax.nn.relu, jnp.ones((2, 4), jnp.int32))
    both = {"up": ("mlp", "embed"), "down": ("embed", "mlp")}
    assert dims(model) == both
    assert dims(eqx.filter(model, eqx.is_array)) == both
    assert dims(eqx.filter(model, eqx.is_inexact_array)) == {"up": both["up"]}


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
def test_an_annotation_is_found_in_what_stands_around_it(annotation):
    assert dims_of(annotation, zeros(4, 2)) == {"": ("mlp", "embed")}


@pytest.mark.parametrize(
    "annotation, array, expected",
    [
        # The rank that fits exactly.
        (Float[Array, "a b"] | Float[Array, "c"], zeros(3), "c"),
        (Float[Array, "a b"] | Float[Array, "c"], zeros(3, 2), "a b"),
        (Float[Array, "a b"] | Float[Array, "c"], zeros(5, 3, 2), None),
        (Float[Array, "a b c"] | Float[Array, "c"], zeros(3, 2), "layers c"),
        (Float[Array, "*a"] | Float[Array, "c"], zeros(3, 2), "_ _"),
        (Float[Array, "a b"] | Array, zeros(3, 2), "a b"),
        # The dtype that fits.
        (Float[Array, "a b"] | Int[Array, "c d"], zeros(3, 2), "a b"),
        (Float[Array, "a b"] | Int[Array, "c d"], zeros(3, 2, dtype=jnp.int8), "c d"),
        (Float[Array, "a b"] | Int[Array, "c d"], zeros(3, 2, dtype=bool), None),
        (Float[Array, "a b"] | Bool[Array, "c"], zeros(5, 3, dtype=bool), "layers c"),
        # Old keys have a dim, new ones a dtype.
        (PRNGKeyArray, jax.eval_shape(lambda: jax.random.key(0)), ""),
        (PRNGKeyArray, jax.eval_shape(lambda: jax.random.split(KEY, 3)), "layers"),
        (PRNGKeyArray, zeros(2, dtype=jnp.uint32), "_"),
        (PRNGKeyArray, zeros(3, 2, dtype=jnp.uint32), "layers _"),
        (Key[Array, "n"], jax.eval_shape(lambda: jax.random.split(KEY, 3)), "n"),
        (Scalar, zeros(), ""),
    ],
)
def test_of_a_union_that_is_taken_which_fits(annotation, array, expected):
    if expected is None:
        assert "both fit the array" in error(annotation, array)
    else:
        assert dims_of(annotation, array) == {"": names(expected)}


# Containers


class Pair(NamedTuple, Generic[T]):
    first: T
    second: Float[Array, " second"]


class Options(TypedDict):
    up: Up
    rest: list[Float[Array, " rest"]]


@jax.tree_util.register_dataclass
@dataclass
class Plain:
    up: Up
    down: "Float[Array, 'embed mlp']"


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A PyTree whose children have no names."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Keyed(Keyless):
    """Keys that say nothing of how to get at the children."""

    def tree_flatten_with_keys(self):
        keys = (SequenceKey(0), DictKey("b"), GetAttrKey("c"))
        return tuple(zip(keys, self.children)), None


UP, DOWN = zeros(4, 2), zeros(2, 4)


@pytest.mark.parametrize(
    "annotation, value, expected",
    [
        (list[Up], [UP, UP], {"0": "mlp embed", "1": "mlp embed"}),
        (list["Up"], [UP], {"0": "mlp embed"}),
        (Sequence[Up], [UP], {"0": "mlp embed"}),
        (Sequence[Up], (UP,), {"0": "mlp embed"}),
        (tuple[Up, ...], (UP, UP), {"0": "mlp embed", "1": "mlp embed"}),
        (tuple[Up, Float[Array, " b"]], (UP, zeros(3)), {"0": "mlp embed", "1": "b"}),
        (tuple[Up] | tuple[Float[Array, " b"], Up], (zeros(3), UP),
         {"0": "b", "1": "mlp embed"}),
        (tuple[Up, Any], (UP, UP), {"0": "mlp embed", "1": None}),
        (tuple[Up], (UP, UP), {"0": None, "1": None}),  # a wrong annotation says nothing
        (tuple, (UP,), {"0": None}),
        (list, [UP], {"0": None}),
        (dict[str, Up], {"a": UP}, {"a": "mlp embed"}),
        (Mapping[str, Up], OrderedDict(a=UP), {"a": "mlp embed"}),
        (dict[str, Up], defaultdict(list, a=UP), {"a": "mlp embed"}),
        (dict[int, list[Up | None]], {3: [None, UP]}, {"3.1": "mlp embed"}),
        (list[Up] | dict[str, Float[Array, "b c"]], {"a": UP}, {"a": "b c"}),
        (list[Up] | dict[str, Float[Array, "b c"]], [UP], {"0": "mlp embed"}),
        (list[Up] | list[Float[Array, " b"]], [UP, zeros(3)], {"0": "mlp embed", "1": "b"}),
        (dict, {"a": UP}, {"a": None}),
        (Options, {"up": UP, "rest": [zeros(3)]}, {"up": "mlp embed", "rest.0": "rest"}),
        (PyTree[Up], {"a": [UP, (UP,)]}, {"a.0": "mlp embed", "a.1.0": "mlp embed"}),
        (PyTree[Up | Float[Array, " b"], "T"], [zeros(3)], {"0": "b"}),
        (Pair[Up], Pair(UP, zeros(3)), {"first": "mlp embed", "second": "second"}),
        (Any, Pair(UP, zeros(3)), {"first": None, "second": "second"}),
        (Plain, Plain(UP, DOWN), {"up": "mlp embed", "down": "embed mlp"}),
        (list, [Plain(UP, DOWN)], {"0.up": "mlp embed", "0.down": "embed mlp"}),
        (Keyless, Keyless(UP, Plain(UP, DOWN)),
         {"0": None, "1.up": "mlp embed", "1.down": "embed mlp"}),
        (Keyed, Keyed(*[Plain(UP, DOWN)] * 3),
         {f"{key}.up": "mlp embed" for key in ("0", "b", "c")}
         | {f"{key}.down": "embed mlp" for key in ("0", "b", "c")}),
    ],
)  # fmt: skip
def test_containers_are_looked_into(annotation, value, expected):
    expected = {
        path: text if text is None else names(text) for path, text in expected.items()
    }
    assert dims_of(annotation, value) == expected


# Inheritance and generics


class Box(eqx.Module, Generic[T]):
    value: T


class Two(eqx.Module, Generic[T, S]):
    first: list[T]
    second: S | None


class Swapped(Two[S, T], Generic[T, S]):
    third: tuple[T, S]


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


ONE = zeros(3)


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
def test_type_variables_stand_for_what_is_said_of_them(annotation, value, expected):
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
    # One that cannot be read matters only where it leads to an array.
    model = made.Model(UP, [linear], after, ONE, "no array", [None])
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
        assert "at the top of made_up, and not for type checkers alone" in message


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


# The layers of equinox.nn

SIZES = {"in": 3, "out": 4, "mlp": 6, "embed": 6, "heads": 10, "vocab": 7, "channels": 8}
SIZES |= {"hidden": 5, "u_size": 4, "v_size": 3}


class Learnt(eqx.Module):
    slope: Float[Array, ""]


def shapes(make):
    """What a function makes, without the arrays: they would take far longer."""
    return eqx.filter_eval_shape(make)


def attention(**options):
    return nn.MultiheadAttention(2, 6, qk_size=5, vo_size=5, **options, key=KEY)


def linear(**options):
    return nn.Linear(3, 4, **options, key=KEY)


def mlp(depth, **options):
    return nn.MLP(3, 4, 6, depth, **options, key=KEY)


def unbiased_mlp(depth, **options):
    return mlp(depth, use_bias=False, use_final_bias=False, **options)


def conv(cls, *args):
    return cls(*args, 3, 4, 2, key=KEY)


def gru():
    return nn.GRUCell(3, 5, key=KEY)


def weight_norm(*args):
    return nn.WeightNorm(linear(), *args)


def spectral_norm():
    return nn.SpectralNorm(linear(), "weight", key=KEY)


def shared_embedding():
    embedding, linear = nn.Embedding(7, 6, key=KEY), nn.Linear(6, 7, key=KEY)
    return nn.Shared(
        (embedding, linear), lambda two: two[1].weight, lambda two: two[0].weight
    )


LINEAR = {"weight": "out in", "bias": "out"}
CHANNELS = {"weight": "channels", "bias": "channels"}
EMBED = {"weight": "embed", "bias": "embed"}
QKV = {f"{name}_proj.weight": "heads embed" for name in ("query", "key", "value")}
INSIDE = {f"layer.{name}": text for name, text in LINEAR.items()}


def convolution(kernel):
    return {"weight": f"out in {kernel}", "bias": f"out {kernel}"}


#: For each public class of equinox.nn: one made of it, and the dims of its arrays.
LAYERS = {
    "Linear": (linear, LINEAR),
    "Embedding": (lambda: nn.Embedding(7, 6, key=KEY), {"weight": "vocab embed"}),
    "Conv": (lambda: conv(nn.Conv, 2), convolution("_ _")),
    "Conv1d": (lambda: conv(nn.Conv1d), convolution("_")),
    "Conv2d": (lambda: conv(nn.Conv2d), convolution("_ _")),
    "Conv3d": (lambda: conv(nn.Conv3d), convolution("_ _ _")),
    "ConvTranspose": (lambda: conv(nn.ConvTranspose, 2), convolution("_ _")),
    "ConvTranspose1d": (lambda: conv(nn.ConvTranspose1d), convolution("_")),
    "ConvTranspose2d": (lambda: conv(nn.ConvTranspose2d), convolution("_ _")),
    "ConvTranspose3d": (lambda: conv(nn.ConvTranspose3d), convolution("_ _ _")),
    "LayerNorm": (lambda: nn.LayerNorm(6), EMBED),
    "RMSNorm": (lambda: nn.RMSNorm(6), EMBED),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), CHANNELS),
    "BatchNorm": (
        lambda: nn.BatchNorm(8, "batch", mode="batch"),
        {**CHANNELS, "batch_counter.init": ""}
        | dict.fromkeys(
            ["batch_state_index.init.0", "batch_state_index.init.1"], "channels"
        ),
    ),
    "MultiheadAttention": (attention, QKV | {"output_proj.weight": "embed heads"}),
    "MLP": (
        lambda: mlp(1),
        {"layers.0.weight": "mlp in", "layers.0.bias": "mlp"}
        | {"layers.1.weight": "out mlp", "layers.1.bias": "out"},
    ),
    "GRUCell": (
        gru,
        {"weight_ih": "gates in", "weight_hh": "gates hidden"}
        | {"bias": "gates", "bias_n": "hidden"},
    ),
    "LSTMCell": (
        lambda: nn.LSTMCell(3, 5, key=KEY),
        {"weight_ih": "gates in", "weight_hh": "gates hidden", "bias": "gates"},
    ),
    "PReLU": (nn.PReLU, {"negative_slope": ""}),
    "WeightNorm": (weight_norm, INSIDE | {"g": "out _"}),
    "SpectralNorm": (
        spectral_norm,
        # Not the layer's own dims: equinox.nn.State keeps them, which has no names.
        INSIDE | {"uv_index.init.0": "u_size", "uv_index.init.1": "v_size"},
    ),
    "Shared": (
        shared_embedding,
        {"pytree.0.weight": "vocab embed", "pytree.1.bias": "out"},
    ),
    "Sequential": (
        lambda: nn.Sequential([linear(), nn.Lambda(nn.LayerNorm(6))]),
        {f"layers.0.{name}": text for name, text in LINEAR.items()}
        | {f"layers.1.fn.{name}": text for name, text in EMBED.items()},
    ),
    "Lambda": (lambda: nn.Lambda(linear()), {f"fn.{k}": v for k, v in LINEAR.items()}),
    "StateIndex": (lambda: nn.StateIndex(jnp.zeros(3)), {"init": None}),
    # No arrays.
    "Dropout": (nn.Dropout, {}),
    "Identity": (nn.Identity, {}),
    "RotaryPositionalEmbedding": (lambda: nn.RotaryPositionalEmbedding(4), {}),
    "StatefulLayer": (None, {}),
    "Pool": (lambda: nn.Pool(0, jax.lax.add, 2, 2, 1), {}),
    "AdaptivePool": (lambda: nn.AdaptivePool(2, 1, jnp.max), {}),
    **{
        f"{kind}Pool{n}d": (lambda kind=kind, n=n: getattr(nn, f"{kind}Pool{n}d")(2), {})
        for kind in ("Avg", "Max", "AdaptiveAvg", "AdaptiveMax")
        for n in (1, 2, 3)
    },
}


def public_layers():
    return [
        name
        for name, cls in vars(nn).items()
        if inspect.isclass(cls) and issubclass(cls, eqx.Module)
    ]


@pytest.mark.parametrize("name", sorted({*LAYERS, *public_layers()}))
def test_every_layer_of_equinox_has_named_dims(name):
    assert name in LAYERS, (
        f"equinox.nn has a new layer, {name}: name its dims in eqxshard/_dims.py, and "
        "write them down here."
    )
    make, expected = LAYERS[name]
    if make is None:
        return
    layer = shapes(make)
    expected = {
        path: text if text is None else names(text) for path, text in expected.items()
    }
    assert dims(layer) == expected
    check_sizes(layer, expected)


def check_sizes(layer, expected):
    """That dims have the names of what they are, where sizes differ."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        path = jax.tree_util.keystr(path, simple=True, separator=".")
        gates = 4 * 5 if isinstance(layer, nn.LSTMCell) else 3 * 5
        out = 7 if isinstance(layer, nn.Shared) else 4
        for dim, n in zip(expected.get(path) or (), getattr(leaf, "shape", ())):
            assert dim is None or n == (SIZES | {"gates": gates, "out": out})[dim], path


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: linear(use_bias=False), {"weight": "out in"}),
        (lambda: nn.Linear("scalar", "scalar", key=KEY), LINEAR),
        (lambda: nn.Conv2d(6, 4, 3, groups=2, key=KEY), convolution("_ _")),
        (lambda: nn.ConvTranspose2d(6, 4, 3, groups=2, key=KEY), convolution("_ _")),
        (lambda: nn.LayerNorm((5, 6)), {"weight": "_ embed", "bias": "_ embed"}),
        (lambda: nn.RMSNorm((2, 5, 6), use_bias=False), {"weight": "_ _ embed"}),
        (lambda: nn.LayerNorm(()), {"weight": "", "bias": ""}),
        (lambda: nn.PReLU(jnp.ones((4, 1))), {"negative_slope": "_ _"}),
        (
            lambda: nn.BatchNorm(8, "batch", mode="ema"),
            {**CHANNELS, "ema_first_time_index.init": ""}
            | {f"ema_state_index.init.{i}": "channels" for i in (0, 1)},
        ),
        (
            lambda: attention(use_query_bias=True, use_output_bias=True),
            QKV | {"output_proj.weight": "embed heads"}
            | {"query_proj.bias": "heads", "output_proj.bias": "embed"},
        ),
        (lambda: weight_norm("weight", 1), INSIDE | {"g": "_ in"}),
        (lambda: weight_norm("weight", None), INSIDE | {"g": "_ _"}),
        (lambda: weight_norm("bias"), INSIDE | {"g": "out"}),
        (
            lambda: nn.WeightNorm(conv(nn.Conv1d)),
            {"layer.weight": "out in _", "layer.bias": "out _", "g": "out _ _"},
        ),
        (lambda: mlp(0), {"layers.0.weight": "out in", "layers.0.bias": "out"}),
        (
            lambda: unbiased_mlp(2),
            {"layers.0.weight": "mlp in", "layers.1.weight": "embed mlp"}
            | {"layers.2.weight": "out embed"},
        ),
        (
            lambda: mlp(3, use_final_bias=False),
            {"layers.0.weight": "mlp in", "layers.1.weight": "embed mlp"}
            | {"layers.2.weight": "mlp embed", "layers.3.weight": "out mlp"}
            | {"layers.0.bias": "mlp", "layers.1.bias": "embed", "layers.2.bias": "mlp"},
        ),
        (
            lambda: unbiased_mlp(3, scan=True),
            {"layers.0.weight": "mlp in", "layers.1.weight": "layers mlp embed"}
            | {"layers.2.weight": "out mlp"},
        ),
        (
            lambda: unbiased_mlp(1, activation=nn.PReLU(), final_activation=nn.PReLU()),
            {"layers.0.weight": "mlp in", "layers.1.weight": "out mlp"}
            | {"activation.negative_slope": "_ _", "final_activation.negative_slope": "_"},
        ),
        (
            lambda: unbiased_mlp(1, activation=Learnt(jnp.ones(()))),
            {"layers.0.weight": "mlp in", "layers.1.weight": "out mlp"}
            | {"activation.slope": "_ _"},
        ),
    ],
)  # fmt: skip
def test_layers_with_options_have_named_dims(make, expected):
    layer = shapes(make)
    assert dims(layer) == {path: names(text) for path, text in expected.items()}


def test_splits_of_an_mlp_alternate():
    # What a layer gives out split the next takes in split: no gather in between.
    for depth in range(1, 6):
        found = dims(shapes(lambda: mlp(depth)))  # noqa: B023
        weights = [found[f"layers.{i}.weight"] for i in range(depth + 1)]
        assert [out for out, _ in weights[:-1]] == [in_ for _, in_ in weights[1:]]
        split = ["mlp" in weight for weight in weights]
        assert all(split[: depth // 2 * 2])
        assert all(len({*weight}) == 2 for weight in weights)


def test_stacked_layers():
    def make(key):
        attention = nn.MultiheadAttention(2, 6, key=key)
        return attention, nn.LayerNorm((5, 6)), nn.WeightNorm(nn.Linear(3, 4, key=key))

    assert dims(shapes(lambda: eqx.filter_vmap(make)(jax.random.split(KEY, 3)))) == {
        **{f"0.{path}": ("layers", "heads", "embed") for path in QKV},
        "0.output_proj.weight": ("layers", "embed", "heads"),
        "1.weight": ("layers", None, "embed"),
        "1.bias": ("layers", None, "embed"),
        "2.layer.weight": ("layers", "out", "in"),
        "2.layer.bias": ("layers", "out"),
        "2.g": ("layers", "out", None),
    }


def test_running_statistics_have_no_names_outside_of_the_model():
    model, state = shapes(
        lambda: nn.make_with_state(nn.BatchNorm)(8, "batch", mode="batch")
    )
    assert dims(model) == {"weight": ("channels",), "bias": ("channels",)}
    assert {*dims(state).values()} == {None}


# The names of the layers in one's own modules


@pytest.mark.parametrize(
    "annotation, make, expected",
    [
        (Annotated[nn.Linear, "a b"], linear, {"weight": "a b", "bias": "a"}),
        (Annotated[nn.Linear, "mlp _"], linear, {"weight": "mlp _", "bias": "mlp"}),
        (Annotated[nn.Linear, "a 3"], linear, {"weight": "a _", "bias": "a"}),
        (Annotated["nn.Linear", "a b"], linear, {"weight": "a b", "bias": "a"}),
        ('Annotated[nn.Linear, "a b"]', linear, {"weight": "a b", "bias": "a"}),
        (Annotated[nn.Linear, 3, "a b"], linear, {"weight": "a b", "bias": "a"}),
        (Annotated[nn.Linear | None, "a b"], linear, {"weight": "a b", "bias": "a"}),
        (Annotated[Annotated[nn.Linear, 3] | int, "a b"], linear,
         {"weight": "a b", "bias": "a"}),
        (Optional[Annotated[nn.Linear, "a b"]], linear,  # noqa: UP045
         {"weight": "a b", "bias": "a"}),
        (list[Annotated[nn.Linear, "a b"]], lambda: [linear()],
         {"0.weight": "a b", "0.bias": "a"}),
        (tuple[nn.Linear, Annotated[nn.Linear, "a b"]], lambda: (linear(), linear()),
         {"0.weight": "out in", "0.bias": "out", "1.weight": "a b", "1.bias": "a"}),
        (dict[str, Annotated[nn.Linear, "a b"] | None], lambda: {"x": linear(), "y": None},
         {"x.weight": "a b", "x.bias": "a"}),
        (Box[Annotated[nn.Linear, "a b"]], lambda: Box(linear()),
         {"value.weight": "a b", "value.bias": "a"}),
        (PyTree[Annotated[nn.Linear, "a b"]], lambda: [linear()],
         {"0.weight": "a b", "0.bias": "a"}),
        (Annotated[nn.Embedding, "v d"], lambda: nn.Embedding(7, 6, key=KEY),
         {"weight": "v d"}),
        (Annotated[nn.LayerNorm, "d"], lambda: nn.LayerNorm((5, 6)),
         {"weight": "_ d", "bias": "_ d"}),
        (Annotated[nn.MultiheadAttention, "h d"], attention,
         dict.fromkeys(QKV, "h d") | {"output_proj.weight": "d h"}),
        (Annotated[nn.MLP, "f d d"], lambda: unbiased_mlp(1),
         {"layers.0.weight": "f d", "layers.1.weight": "d f"}),
        (Annotated[nn.MLP, "f a d b"], lambda: unbiased_mlp(2),
         {"layers.0.weight": "f a", "layers.1.weight": "d f", "layers.2.weight": "b d"}),
        (Annotated[nn.GRUCell, "g x h"], gru,
         {"weight_ih": "g x", "weight_hh": "g h", "bias": "g", "bias_n": "h"}),
        # A base of the layer, or one of several.
        (Annotated[nn.Conv, "o i"], lambda: conv(nn.Conv1d),
         {"weight": "o i _", "bias": "o _"}),
        (Annotated[nn.Conv | nn.Linear, "o i"], lambda: conv(nn.Conv1d),
         {"weight": "o i _", "bias": "o _"}),
        (Annotated[nn.Conv, "o i"] | Annotated[nn.Linear, "a b"], linear,
         {"weight": "a b", "bias": "a"}),
        # What norms wrap.
        (nn.WeightNorm[Annotated[nn.Linear, "a b"]], weight_norm,
         {"layer.weight": "a b", "layer.bias": "a", "g": "a _"}),
        (Annotated[nn.WeightNorm, "a b"], weight_norm,
         {"layer.weight": "a b", "layer.bias": "a", "g": "a _"}),
        (Annotated[nn.SpectralNorm[nn.Linear], "a b"],
         spectral_norm,
         {"layer.weight": "a b", "layer.bias": "a"}
         | {"uv_index.init.0": "u_size", "uv_index.init.1": "v_size"}),
        # Text on other types is anybody's.
        (Annotated[Any, "a b"], linear, LINEAR),
        (Annotated[eqx.Module, "any text at all"], linear, LINEAR),
        (Annotated[list[nn.Linear], "any text at all"], lambda: [linear()],
         {"0.weight": "out in", "0.bias": "out"}),
        (Annotated[nn.Sequential, "any text at all"], lambda: nn.Sequential([linear()]),
         {"layers.0.weight": "out in", "layers.0.bias": "out"}),
        (Annotated[PyTree[nn.Linear], "any text at all"], linear, LINEAR),
        (Annotated[eqx.Module, "any text at all"], weight_norm, INSIDE | {"g": "out _"}),
        (Annotated[nn.Dropout, "any text at all"], nn.Dropout, {}),
    ],
)  # fmt: skip
def test_a_field_names_the_dims_of_its_layer(annotation, make, expected):
    value, expected = shapes(make), {path: names(text) for path, text in expected.items()}
    assert dims_of(annotation, value) == expected
    stacked = jax.tree.map(
        lambda x: zeros(3, *x.shape) if hasattr(x, "shape") else x, value
    )
    expected = {path: ("layers", *dims) for path, dims in expected.items()}
    assert dims_of(annotation, stacked) == expected


class MyLinear(nn.Linear):
    scale: Float[Array, " scale"]

    def __init__(self):
        super().__init__(3, 4, key=KEY)
        self.scale = jnp.ones(5)


class MyNamedLinear(MyLinear):
    weight: Float[Array, "a b"]  # pyright: ignore


class MySilentLinear(MyLinear):
    weight: Array


class MyAttention(nn.MultiheadAttention):
    query_proj: Annotated[nn.Linear, "q d"]  # pyright: ignore


def test_subclasses_of_layers_inherit_and_override_their_names():
    scale = {"scale": ("scale",)}
    plain = {path: names(text) for path, text in LINEAR.items()} | scale
    assert dims(shapes(MyLinear)) == plain
    assert dims(shapes(MySilentLinear)) == plain
    assert dims(shapes(MyNamedLinear)) == plain | {"weight": ("a", "b")}
    renamed = {"weight": ("a", "b"), "bias": ("a",)}
    assert dims_of(Annotated[MyLinear, "a b"], shapes(MyLinear)) == renamed | scale
    assert dims_of(Annotated[nn.Linear, "a b"], shapes(MyLinear)) == renamed | scale
    found = dims(shapes(lambda: MyAttention(2, 6, use_query_bias=True, key=KEY)))  # pyright: ignore
    assert found["query_proj.weight"] == ("q", "d")
    assert found["query_proj.bias"] == ("q",)
    assert found["key_proj.weight"] == ("heads", "embed")


def test_a_module_in_place_of_a_weight_says_its_own_dims():
    low_rank = module(a=Float[Array, "out rank"], b=Float[Array, "rank in"])
    layer = eqx.tree_at(
        lambda m: m.weight, shapes(linear), low_rank(zeros(4, 2), zeros(2, 3))
    )
    assert dims(layer) == {
        "weight.a": ("out", "rank"),
        "weight.b": ("rank", "in"),
        "bias": ("out",),
    }


# Mistakes


@pytest.mark.parametrize(
    "annotation, value, message",
    [
        (
            Float[Array, "layers mlp embed"],
            zeros(4, 2),
            'Block.x: Float[Array, "layers mlp embed"] names more dims than the array has, '
            "which is float32[4, 2]; name one for each dim of the array, or `...`",
        ),
        (list[Up], [zeros(4)], 'Block.x: Float[Array, "mlp embed"] names more dims'),
        (Up | None, zeros(), 'Block.x: Float[Array, "mlp embed"] names more dims'),
        (Float[Array, "a *b c"], zeros(4), "names more dims than the array has"),
        (Box[Up], Box(zeros(4)), 'Box.value: Float[Array, "mlp embed"] names more dims'),
        (Box[Up] | int, Box(zeros(4)), 'Box.value: Float[Array, "mlp embed"] names more'),
        (
            Up | Float[Array, "embed mlp"],
            zeros(4, 2),
            'Block.x: Float[Array, "mlp embed"] and Float[Array, "embed mlp"] both fit the '
            "array, which is float32[4, 2]; give their dims the same names",
        ),
        (
            list[Up] | list[Float[Array, "embed mlp"]],
            [zeros(4, 2)],
            'Block.x: Float[Array, "mlp embed"] and Float[Array, "embed mlp"] both fit',
        ),
        (
            Box,
            Box(zeros(4)),
            "Box.value: T names no dims, because T is given no argument; write it where "
            'the class is a base or in an annotation: Box[Float[Array, "mlp embed"]].',
        ),
        (list[Box], [Box({"a": [zeros(4)]})], "Box.value: T names no dims"),
        (Two[Up, S], Two([UP], zeros(4)), "Two.second: S names no dims"),  # pyright: ignore
        (Box[Nested], Box(Nested([zeros(4)])), "Box.value: T names no dims"),
        (
            "Flaot[Array, 'mlp']",
            zeros(4),
            "Block.x: Flaot[Array, 'mlp'] cannot be resolved (name 'Flaot' is not "
            "defined); import or define what it names at the top of test_dims",
        ),
        ("list[Flaot]", [zeros(4)], "cannot be resolved (name 'Flaot' is not defined)"),
        ("Float[Array, 'a, b']", zeros(4), "cannot be resolved (Axes should be separated"),
        ("Float[", zeros(4), "cannot be resolved"),
        (
            Annotated[nn.Linear, "embed"],
            shapes(linear),
            "Block.x: 'embed' names 1 dims, and Linear has 2 with names (out, in); write "
            "one word for each, in this order.",
        ),
        (Annotated[nn.Conv1d, "o i k"], shapes(lambda: conv(nn.Conv1d)),
         "Conv has 2 with names (out, in)"),
        (Annotated[nn.MLP, "mlp embed"], shapes(lambda: mlp(1)),
         "MLP has 3 with names (mlp, in, out)"),
        (Annotated[nn.WeightNorm, "a"], shapes(weight_norm), "Block.x: 'a' names 1"),
        (
            nn.Linear,
            eqx.tree_at(lambda m: m.weight, shapes(linear), zeros(4)),
            "Linear.weight has the dims 'out in', and the array there is float32[4]",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(annotation, value, message):
    assert message in error(annotation, value)


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


def test_an_error_names_the_class_that_has_the_annotation():
    base = module(x=Float[Array, "a b"])
    sub = type("Other", (base,), {"__annotations__": {"y": Up}})
    with pytest.raises(ValueError, match=r"^Block\.x: "):
        dims(sub(zeros(3), UP))


# Everything at once


class Attention(eqx.Module):
    query: Float[Array, "heads head_dim embed"]
    output: Float[Array, "embed heads head_dim"]


class Block(eqx.Module, Generic[T]):
    norm: nn.LayerNorm
    attention: Attention
    up: Annotated[nn.Linear, "mlp embed"]
    down: Annotated[nn.Linear, "embed mlp"]
    extra: T | None = None


class Transformer(eqx.Module):
    embedding: nn.Embedding
    blocks: Block[Float[Array, " embed"]] | list[Block[Float[Array, " embed"]]]
    head: "Float[Array, 'embed vocab'] | None"


def make_block(key):
    return Block(
        nn.LayerNorm(8),
        Attention(jnp.ones((4, 2, 8)), jnp.ones((8, 4, 2))),
        nn.Linear(8, 16, key=key),
        nn.Linear(16, 8, key=key),
        jnp.ones(8),
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_by_dim_splits_a_transformer(stacked):
    keys = jax.random.split(KEY, 4)
    make_blocks = (
        eqx.filter_vmap(make_block) if stacked else lambda keys: [make_block(keys[0])]
    )
    model = shapes(
        lambda: Transformer(
            nn.Embedding(32, 8, key=KEY), make_blocks(keys), jnp.ones((8, 32))
        )
    )
    axes = {"mlp": "tensor", "heads": "tensor", "vocab": ("tensor",), "embed": "fsdp"}
    mesh = eqxshard.make_mesh(fsdp=2, tensor=2, stage=2)
    if stacked:
        axes |= {"layers": "stage"}
    places = eqxshard.shardings(model, mesh, eqxshard.by_dim(axes))
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="."): place.spec
        for path, place in jax.tree_util.tree_leaves_with_path(places)
    }
    where = "blocks" if stacked else "blocks.0"
    lead = ("stage",) if stacked else ()
    assert specs == {
        "embedding.weight": P("tensor", "fsdp"),
        "head": P("fsdp", "tensor"),
        f"{where}.norm.weight": P(*lead, "fsdp"),
        f"{where}.norm.bias": P(*lead, "fsdp"),
        f"{where}.attention.query": P(*lead, "tensor", None, "fsdp"),
        f"{where}.attention.output": P(*lead, "fsdp", "tensor"),
        f"{where}.up.weight": P(*lead, "tensor", "fsdp"),
        f"{where}.up.bias": P(*lead, "tensor"),
        f"{where}.down.weight": P(*lead, "fsdp", "tensor"),
        f"{where}.down.bias": P(*lead, "fsdp"),
        f"{where}.extra": P(*lead, "fsdp"),
    }


# Random nestings, with known dims

WORDS = ["mlp", "embed", "heads", "vocab"]


class Case(NamedTuple):
    hint: Any
    value: Any
    dims: list[tuple[str | None, ...]]
    """Of each array, in the order of the PyTree."""


class Fields(NamedTuple, Generic[T, S]):
    first: T
    second: S


@st.composite
def arrays(draw):
    tokens = draw(st.lists(st.sampled_from([*WORDS, "_", "3"]), max_size=3))
    hint = Float[Array, " ".join(tokens)]
    names = tuple(token if token in WORDS else None for token in tokens)
    return Case(hint, zeros(*[3] * len(tokens)), [names])


@st.composite
def layers(draw):
    out, in_ = draw(st.permutations(WORDS))[:2]
    layer = eqx.filter_eval_shape(nn.Linear, 3, 2, key=KEY)
    return Case(Annotated[nn.Linear, f"{out} {in_}"], layer, [(out, in_), (out,)])


def stack(case):
    """As `eqx.filter_vmap` does: one more leading dim on every array."""

    def more(dims):
        known = tuple(dim for dim in dims if dim != "layers")
        return ("layers", *[None] * (len(dims) - len(known)), *known)

    def wider(leaf):
        return jax.ShapeDtypeStruct((5, *leaf.shape), leaf.dtype)

    return Case(case.hint, jax.tree.map(wider, case.value), [more(d) for d in case.dims])


def combinations(cases):
    many = st.integers(0, 3)
    return st.one_of(
        st.builds(lambda c, n: Case(list[c.hint], [c.value] * n, c.dims * n), cases, many),
        st.builds(
            lambda c, n: Case(tuple[c.hint, ...], (c.value,) * n, c.dims * n), cases, many
        ),
        st.builds(
            lambda a, b: Case(tuple[a.hint, b.hint], (a.value, b.value), a.dims + b.dims),
            cases,
            cases,
        ),
        st.builds(
            lambda c, n: Case(
                dict[str, c.hint], dict(zip("abc"[:n], [c.value] * 3)), c.dims * n
            ),
            cases,
            many,
        ),
        st.builds(lambda c: Case(c.hint | None, c.value, c.dims), cases),
        st.builds(lambda c: Case(c.hint | None, None, []), cases),
        st.builds(lambda c: Case(Annotated[c.hint, 3] | int, c.value, c.dims), cases),
        st.builds(lambda c: Case(Box[c.hint], Box(c.value), c.dims), cases),
        st.builds(
            lambda a, b: Case(
                Swapped[a.hint, b.hint],
                Swapped([b.value], a.value, (a.value, b.value)),
                [*b.dims, *a.dims, *a.dims, *b.dims],
            ),
            cases,
            cases,
        ),
        st.builds(
            lambda a, b: Case(
                Fields[a.hint, b.hint], Fields(a.value, b.value), a.dims + b.dims
            ),
            cases,
            cases,
        ),
        st.builds(
            lambda a, b: Case(
                module(a=a.hint, b=b.hint),
                module(a=a.hint, b=b.hint)(a.value, b.value),
                a.dims + b.dims,
            ),
            cases,
            cases,
        ),
        st.builds(stack, cases),
    )


@settings(deadline=None, max_examples=75)
@given(case=st.recursive(st.one_of(arrays(), layers()), combinations, max_leaves=6))
def test_dims_are_found_in_any_nesting(case):
    assert [*dims_of(case.hint, case.value).values()] == case.dims
