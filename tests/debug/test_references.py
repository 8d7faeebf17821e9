import functools
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import Model, squared_errors

from eqxshard.debug._references import is_referable, refer, resolve


class Outer:
    class Inner(eqx.Module):
        @staticmethod
        def static(x):
            return x


@pytest.mark.parametrize(
    "item",
    [
        *(squared_errors, Model, Outer.Inner, Outer.Inner.static),
        *(jax.nn.relu, jax.nn.gelu, jnp.tanh, jnp.sin, jnp.bfloat16, eqx.nn.Linear),
        *(jax.lax.add, optax.softmax_cross_entropy_with_integer_labels, jax.nn.softplus),
    ],
    ids=lambda item: item.__name__,
)
def test_functions_and_classes_are_found_again(item):
    assert is_referable(item)
    reference = refer(item, "loss_fn")
    assert resolve(reference, None) is item


def test_references_are_import_paths():
    assert refer(squared_errors, "x") == "helpers:squared_errors"
    assert refer(Outer.Inner, "x") == f"{__name__}:Outer.Inner"


def local():
    class Local(eqx.Module):
        pass

    return Local


@pytest.mark.parametrize(
    "item, what",
    [
        (lambda x: x, "a lambda"),
        (local(), "a class local.<locals>.Local"),
        (functools.wraps(squared_errors)(lambda x: x), "a function squared_errors"),
    ],
    ids=["lambda", "class", "wrapped"],
)
def test_what_cannot_be_imported_is_named(item, what):
    with pytest.raises(TypeError) as error:
        refer(item, "model.act")
    assert str(error.value) == (
        f"model.act is {what} that cannot be imported; define it by name at the top level "
        "of a module."
    )


def test_what_a_notebook_defines_cannot_be_imported(monkeypatch):
    main = types.ModuleType("__main__")
    exec("def loss_fn(): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match="the function loss_fn of a notebook or a prompt"):
        refer(main.loss_fn, "loss_fn")
    main.__file__ = "train.py"
    assert refer(main.loss_fn, "loss_fn") == "__main__:loss_fn"


@pytest.mark.parametrize("item", [3, "x", functools.partial(squared_errors)])
def test_other_things_are_not_referred_to(item):
    assert not is_referable(item)


@pytest.mark.parametrize(
    "reference, message",
    [
        ("os:system", "which no model needs"),
        ("functools:reduce", "which no model needs"),
        ("eqxshard.distributed:os.system", "which no model needs"),
        ("numpy:load", "which no model needs"),
        ("jax.numpy:load", "which no model needs"),
        ("equinox:jnp.load", "is no longer there|which no model needs"),
        ("cloudpickle:load", "which no model needs"),
        ("pytest:main", "which no model needs"),
        ("safetensors:safe_open", "which no model needs"),
        ("eqxshard.planning._request:load_request", "which no model needs"),
        ("eqxshard.launch:launch", "which no model needs"),
        ("helpers:nothing", "is no longer there"),
        ("helpers:np", "is no longer there"),
        ("helpers:MESHES", "is no longer there"),
        ("nowhere:x", r"cannot be imported \(No module named 'nowhere'\)"),
        ("__main__:x", r"cannot be imported \(the run had no script\)"),
    ],
)
def test_other_references_are_refused(reference, message):
    with pytest.raises(ValueError, match=message):
        resolve(reference, None)


@pytest.mark.parametrize(
    "reference", ["math:sqrt", "operator:add", "numpy:tanh", "numpy:float32"]
)
def test_harmless_functions_are_allowed(reference):
    assert callable(resolve(reference, None))


def test_a_script_that_is_gone_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"__main__:loss_fn cannot be imported \(there is"):
        resolve("__main__:loss_fn", str(tmp_path / "gone.py"))
