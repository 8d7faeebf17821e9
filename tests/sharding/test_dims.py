"""The dims that annotations name, as rules see them."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Optional

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree, Scalar
from sharding_helpers import dims, dims_error, dims_of, module, names
from sharding_helpers import struct as zeros

KEY = jax.random.key(0)
Up = Float[Array, "mlp embed"]


# One array


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
def test_other_annotations_name_no_dims(annotation):
    assert dims_of(annotation, zeros(4, 2)) == {"": None}


def test_a_union_with_unnamed_arrays_names_no_dims_of_others():
    for annotation in (Up | Array, Optional[Up | Any], PyTree[Up] | Array):  # noqa: UP045
        assert dims_of(annotation, zeros(3)) == {"": None}


def test_arrays_outside_of_modules_have_no_names():
    assert dims(zeros(4)) == {"": None}
    assert dims({"a": [zeros(4)], "b": (zeros(),)}) == {"a.0": None, "b.0": None}


@pytest.mark.parametrize(
    "array",
    [zeros(4, 2), np.zeros((4, 2), np.float32), np.ones((4, 2), np.int8), jnp.ones((4, 2))],
    ids=["shape", "NumPy", "integers", "JAX"],
)
def test_any_kind_of_array_has_names(array):
    assert dims_of(Up, array) == {"": ("mlp", "embed")}


def test_other_leaves_may_be_missing():
    cls = module(name=str, up=Up, act=Any, down=Float[Array, "embed mlp"])
    model = cls("x", jnp.ones((4, 2)), jax.nn.relu, jnp.ones((2, 4), jnp.int32))
    both = {"up": ("mlp", "embed"), "down": ("embed", "mlp")}
    assert dims(model) == both
    assert dims(eqx.filter(model, eqx.is_array)) == both
    assert dims(eqx.filter(model, eqx.is_inexact_array)) == {"up": both["up"]}


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
def test_of_a_union_the_member_that_fits_is_used(annotation, array, expected):
    if expected is None:
        assert "both fit the array" in dims_error(annotation, array)
    else:
        assert dims_of(annotation, array) == {"": names(expected)}


# Containers


class Pair(NamedTuple):
    first: Up
    second: Float[Array, " second"]


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
        (PyTree[Up], {"a": [UP, (UP,)]}, {"a.0": "mlp embed", "a.1.0": "mlp embed"}),
        (PyTree[Up | Float[Array, " b"], "T"], [zeros(3)], {"0": "b"}),
        (Any, Pair(UP, zeros(3)), {"first": "mlp embed", "second": "second"}),
        (Plain, Plain(UP, DOWN), {"up": "mlp embed", "down": "embed mlp"}),
        (list, [Plain(UP, DOWN)], {"0.up": "mlp embed", "0.down": "embed mlp"}),
        (Keyless, Keyless(UP, Plain(UP, DOWN)),
         {"0": None, "1.up": "mlp embed", "1.down": "embed mlp"}),
        (Keyed, Keyed(*[Plain(UP, DOWN)] * 3),
         {f"{key}.up": "mlp embed" for key in ("0", "b", "c")}
         | {f"{key}.down": "embed mlp" for key in ("0", "b", "c")}),
    ],
)  # fmt: skip
def test_containers_are_searched(annotation, value, expected):
    expected = {path: names(text) for path, text in expected.items()}
    assert dims_of(annotation, value) == expected


# Mistakes


@pytest.mark.parametrize(
    "annotation, value, message",
    [
        (
            Float[Array, "layers mlp embed"],
            zeros(4, 2),
            'Block.x: Float[Array, "layers mlp embed"] names more dims than the array has, '
            "which is float32[4,2]; name one per dim of the array, or write `...`",
        ),
        (list[Up], [zeros(4)], 'Block.x: Float[Array, "mlp embed"] names more dims'),
        (Up | None, zeros(), 'Block.x: Float[Array, "mlp embed"] names more dims'),
        (Float[Array, "a *b c"], zeros(4), "names more dims than the array has"),
        (
            Up | Float[Array, "embed mlp"],
            zeros(4, 2),
            'Block.x: Float[Array, "mlp embed"] and Float[Array, "embed mlp"] both fit the '
            "array, which is float32[4,2]; give their dims the same names",
        ),
        (
            list[Up] | list[Float[Array, "embed mlp"]],
            [zeros(4, 2)],
            'Block.x: Float[Array, "mlp embed"] and Float[Array, "embed mlp"] both fit',
        ),
    ],
)
def test_mistakes_are_named(annotation, value, message):
    assert message in dims_error(annotation, value)


def test_an_error_names_the_class_that_has_the_annotation():
    base = module(x=Float[Array, "a b"])
    sub = type("Other", (base,), {"__annotations__": {"y": Up}})
    with pytest.raises(ValueError, match=r"^Block\.x: "):
        dims(sub(zeros(3), UP))


# Random nestings, with known dims

WORDS = ["mlp", "embed", "heads", "vocab"]


class Case(NamedTuple):
    hint: Any
    value: Any
    dims: list[tuple[str | None, ...]]
    """Of each array, in the order of the PyTree."""


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
