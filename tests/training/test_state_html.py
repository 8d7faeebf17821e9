"""States as notebooks show them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from page_parser import parse

import eqxshard
from eqxshard.training._state_html import _MOST


class Model(eqx.Module):
    up: jax.Array
    layers: dict[str, jax.Array]
    key: jax.Array

    def __init__(self, key, extra=0):
        self.up = jnp.ones((16, 8))
        self.layers = {"<b>": jnp.zeros(8, jnp.bfloat16)}
        self.layers |= {f"more {i}": jnp.zeros(2) for i in range(extra)}
        self.key = key


OPTIM = optax.sgd(0.1, momentum=0.9)
MESH = eqxshard.make_mesh(data=2, fsdp=4)
OPTIONS = {"key": jax.random.key(0), "mesh": MESH, "rule": eqxshard.fsdp(min_size=64)}


def shown(state):
    """The headline, and the rows of both tables."""
    text = state._repr_html_()
    page = parse(text)
    assert not [x for x in page if x.tag in ("script", "style", "img")]
    tables = [
        [[y.text for y in row.children] for row in table.find("tbody").find_all("tr")]
        for table in page.find_all("table")
    ]
    heads = [
        [x.text for x in t.find("thead").find_all("th")] for t in page.find_all("table")
    ]
    return page.find("p").text, heads, *tables


@pytest.fixture(scope="module")
def state():
    return eqxshard.init_state(Model, OPTIM, **OPTIONS)


def test_a_state_is_its_step_its_parts_and_its_arrays(state):
    title, heads, parts, arrays = shown(state)
    assert title == "TrainState at step 0, on 8 x cpu (data=2, fsdp=4)"
    assert parts == [
        ["model", "2", "136", "528 B", "144 B"],
        ["optimizer state", "2", "136", "528 B", "144 B"],
    ]
    assert heads[1][0] == "4 arrays"
    assert arrays[0] == ["model.up", "16 x 8", "float32", "P('fsdp')", "128 B"]
    assert ["model.layers.<b>", "8", "bfloat16", "P()", "16 B"] in arrays


def test_nothing_but_the_step_is_read(state):
    deleted = jax.tree.map(jnp.copy, state)
    for leaf in jax.tree.leaves((deleted.model, deleted.opt_state)):
        leaf.delete()
    assert shown(deleted) == shown(state)
    deleted.step.delete()
    assert shown(deleted)[0].startswith("TrainState that a step has taken, on 8 x cpu")


def test_the_largest_arrays_are_listed():
    state = eqxshard.abstract_state(lambda key: Model(key, 20), OPTIM, **OPTIONS)
    title, heads, _, arrays = shown(state)
    assert title == "TrainState of shapes only, on 8 x cpu (data=2, fsdp=4)"
    assert heads[1][0] == f"{_MOST} largest of 44 arrays" and len(arrays) == _MOST


def test_any_tree_of_this_kind_is_shown(state):
    names = jax.tree.map(lambda leaf: "x", state)
    assert shown(names) == ("TrainState without a step", *shown(names)[1:])
    alone = jax.device_put(state, jax.devices()[0])
    title, _, _, arrays = shown(alone)
    assert title == "TrainState at step 0" and arrays[0][3].startswith("SingleDevice")
