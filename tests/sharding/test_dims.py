"""The dims that annotations name, as rules see them."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sharding_helpers import dims, dims_error, dims_of, module, names
from sharding_helpers import struct as zeros

KEY = jax.random.key(0)
Up = Float[Array, "mlp embed"]


@pytest.mark.parametrize(
    "text, shape, expected",
    [
        ("mlp embed", (4, 2), "mlp embed"),
        ("", (), ""),
        ("_heads embed", (3, 2), "_ embed"),
        ("#mlp #3 ?embed", (4, 3, 2), "mlp _ embed"),
        ("rows=3 #cols=4", (3, 4), "rows cols"),
        ("3*embed embed-1 min(a,b)", (6, 1, 2), "3*embed embed-1 min(a,b)"),
        # Variadic dims take what is left over, and there are no extra ones.
        ("*batch mlp", (2, 3, 4), "_ _ mlp"),
        ("mlp ... embed", (4, 7, 8, 2), "mlp _ _ embed"),
        # The dims of stacked modules: the outermost is the layers.
        ("mlp embed", (3, 4, 2), "layers mlp embed"),
        ("mlp embed", (3, 5, 4, 2), "layers _ mlp embed"),
        ("", (3,), "layers"),
        ("layers mlp", (3, 4), "layers mlp"),
        ("layers mlp", (5, 3, 4), "_ layers mlp"),
    ],
)
def test_an_annotation_names_the_dims(text, shape, expected):
    assert dims_of(Float[Array, text], zeros(*shape)) == {"": names(expected)}


@pytest.mark.parametrize("annotation", [Array, np.ndarray, Any, list, None, "Any"])
def test_other_annotations_name_no_dims(annotation):
    assert dims_of(annotation, zeros(4, 2)) == {"": None}


def test_other_leaves_may_be_missing():
    cls = module(name=str, up=Up, act=Any, down=Float[Array, "embed mlp"])
    model = cls("x", jnp.ones((4, 2)), jax.nn.relu, np.ones((2, 4), np.int8))
    both = {"up": ("mlp", "embed"), "down": ("embed", "mlp")}
    assert dims(model) == dims(eqx.filter(model, eqx.is_array_like)) == both
    assert dims(eqx.filter(model, eqx.is_inexact_array)) == {"up": both["up"]}


@pytest.mark.parametrize(
    "annotation, array, expected",
    [
        # The rank that fits exactly.
        (Float[Array, "a b"] | Float[Array, "c"], zeros(3, 2), "a b"),
        (Float[Array, "a b c"] | Float[Array, "c"], zeros(3, 2), "layers c"),
        (Float[Array, "a b"] | Array, zeros(3, 2), "a b"),
        (PRNGKeyArray, jax.eval_shape(lambda: jax.random.key(0)), ""),
        (PRNGKeyArray, zeros(2, dtype=jnp.uint32), "_"),
        # One of the two has any dims.
        (Up | Array, zeros(3), None),
        # The best fit, and the first of equals.
        (Float[Array, "c"] | Float[Array, "a b"], zeros(5, 3, 2), "layers a b"),
        (Float[Array, "a b"] | Int[Array, "c d"], zeros(3, 2), "a b"),
    ],
)
def test_of_a_union_the_member_that_fits_is_used(annotation, array, expected):
    assert dims_of(annotation, array) == {"": names(expected)}


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


UP, DOWN = zeros(4, 2), zeros(2, 4)


@pytest.mark.parametrize(
    "annotation, value, expected",
    [
        (list[Up], [UP, UP], {"0": "mlp embed", "1": "mlp embed"}),
        (tuple[Up, ...], (UP, UP), {"0": "mlp embed", "1": "mlp embed"}),
        (tuple[Up, Float[Array, " b"]], (UP, zeros(3)), {"0": "mlp embed", "1": "b"}),
        (tuple[Up], (UP, UP), {"0": None, "1": None}),  # a wrong annotation says nothing
        (dict[str, Up], {"a": UP}, {"a": "mlp embed"}),
        (dict[int, list[Up | None]], {3: [None, UP]}, {"3.1": "mlp embed"}),
        (list[Up] | list[Float[Array, " b"]], [UP, zeros(3)], {"0": "mlp embed", "1": "b"}),
        (Any, Pair(UP, zeros(3)), {"first": "mlp embed", "second": "second"}),
        (Plain, Plain(UP, DOWN), {"up": "mlp embed", "down": "embed mlp"}),
        (Keyless, Keyless(UP, Plain(UP, DOWN)),
         {"0": None, "1.up": "mlp embed", "1.down": "embed mlp"}),
    ],
)  # fmt: skip
def test_containers_are_searched(annotation, value, expected):
    expected = {path: names(text) for path, text in expected.items()}
    assert dims_of(annotation, value) == expected


@pytest.mark.parametrize(
    "annotation, value, message",
    [
        (
            Up | None,
            zeros(4),
            "Block.x: 'mlp embed' has more dims than the array, which is float32[4]; "
            "name each of its dims once, or write `...`",
        ),
        (
            "Flaot[Array, 'mlp']",
            zeros(4),
            "Block.x: Flaot[Array, 'mlp'] cannot be resolved (name 'Flaot' is not "
            "defined); import or define its names at the top of ",
        ),
        (
            Annotated[nn.Linear, "embed"],
            eqx.filter_eval_shape(nn.Linear, 3, 4, key=KEY),
            "Block.x: 'embed' names 1 dims, and Linear has 2 with names (out, in); write "
            "one word for each, in this order.",
        ),
    ],
)
def test_mistakes_are_named(annotation, value, message):
    assert message in dims_error(annotation, value)


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
    """Add a leading dim to every array, as `eqx.filter_vmap` does."""

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
