import dataclasses
import functools
import json
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, squared_errors

from eqxshard.debug._structure import Decoder, Encoder

KEY = jax.random.key(0)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Options:
    rate: float
    names: tuple[str, ...]


class Scale(eqx.Module):
    by: jax.Array
    power: int = eqx.field(static=True, default=1)


ARRAY = jnp.arange(3)


def there_and_back(tree, arrays=()):
    """What a decoder makes of the text that an encoder made."""
    paths = {id(array): str(i) for i, array in enumerate(arrays)}
    text = json.dumps(Encoder(paths).encode(tree, "model"))
    return Decoder({str(i): array for i, array in enumerate(arrays)}, None).decode(
        json.loads(text)
    )


VALUES = {
    "plain": [None, True, 3, 0.5, "x"],
    "containers": {"a": (1, (2, "y")), "b": [None, []], 3: {}},
    "named tuple": Pair(1, [2]),
    "dataclass": Options(0.1, ("a", "b")),
    "dtypes": [np.dtype("float32"), jnp.bfloat16],
    "spec": jax.P("data", None, ("fsdp", "tensor")),
    "code": [squared_errors, jax.nn.relu, Scale],
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_come_back(kind):
    back = there_and_back(VALUES[kind])
    assert back == VALUES[kind] and type(back) is type(VALUES[kind])


def test_arrays_come_back_by_path():
    tree = {"a": ARRAY, "b": Scale(ARRAY + 1, 3)}
    arrays = [tree["a"], tree["b"].by]
    back = there_and_back(tree, arrays)
    assert back["a"] is ARRAY and back["b"].by is arrays[1]
    assert isinstance(back["b"], Scale) and back["b"].power == 3


def test_numbers_of_numpy_in_static_fields_come_back():
    back = there_and_back(Pair(np.prod((2, 4)), np.bool_(True)))
    assert back == (8, True) and back.first.dtype == np.int64


def test_an_array_that_is_no_leaf_is_named():
    with pytest.raises(TypeError, match=r"^model\.first is a ndarray, which a crash dump"):
        Encoder({}).encode(Pair(np.zeros(3), 1), "model")


def test_a_partial_comes_back():
    back = there_and_back(functools.partial(squared_errors, 1, key=(2,)))
    assert (back.func, back.args, back.keywords) == (squared_errors, (1,), {"key": (2,)})


def test_layers_come_back_with_lambdas_that_are_their_defaults():
    mlp = eqx.nn.MLP(2, 1, 4, 1, key=KEY)
    arrays = jax.tree.leaves(eqx.filter(mlp, eqx.is_array))
    back = there_and_back(mlp, arrays)
    assert eqx.tree_equal(back, mlp)
    assert back.final_activation is mlp.final_activation


def test_a_mesh_comes_back_on_one_device():
    back = there_and_back(make_mesh("data=2,fsdp=4"))
    assert back.axis_names == make_mesh().axis_names and back.size == 1


@pytest.mark.parametrize("value", [object(), {1}, b"x"], ids=["object", "set", "bytes"])
def test_other_values_are_named(value):
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"^model\.a\.0 is a {kind}, which a crash dump"):
        Encoder({}).encode({"a": [value]}, "model")


def test_a_lambda_is_named():
    with pytest.raises(TypeError, match=r"^model\.by is a lambda that cannot be imported"):
        Encoder({}).encode(Scale(lambda x: x), "model")  # pyright: ignore


def test_a_class_that_changed_is_named():
    value = {"object": "helpers:squared_errors", "fields": {}}
    with pytest.raises(ValueError, match="squared_errors is not a module or dataclass any"):
        Decoder({}, None).decode(value)
