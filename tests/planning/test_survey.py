"""Surveys, in this process and for its simulated devices."""

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import pytest
from plan_helpers import REQUEST
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard.planning._compile import make_state
from eqxshard.planning._survey import least_bytes, survey

WIDTH = 1


def scaled_losses(model, batch, key):
    return WIDTH * next_token_losses(model, batch, key)


def changed(**changes):
    return survey(dataclasses.replace(REQUEST, **changes))


def test_the_least_memory_is_counted_on_each_mesh():
    def least(**changes):
        request = dataclasses.replace(REQUEST, **changes)
        return least_bytes(request, make_state(request))

    model = eqx.filter_eval_shape(Transformer, jax.random.key(0))
    arrays = [leaf.size for leaf in jax.tree.leaves(model) if hasattr(leaf, "size")]
    whole, rows = 4 * sum(arrays), 2 * 17 * 4
    # Parameters, two moments and gradients; and less than 100 bytes of counters and keys.
    replicated = least(mesh_shape={"data": 8}) - rows
    assert 4 * whole < replicated < 4 * whole + 100
    assert 7 * (least() - rows) < replicated < 8 * (least() - rows)
    low = least(mesh_shape={"data": 8}, precision=eqxshard.Precision("bfloat16"))
    assert replicated + rows - low == whole / 2
    options = {**REQUEST.options, "nonfinite": "ignore"}
    unchecked = least(mesh_shape={"data": 8}, options=options)
    assert replicated + rows - unchecked == whole


def test_what_compiles_to_the_same_has_the_same_fingerprint(monkeypatch):
    changes: list[dict[str, Any]] = [
        {},
        {"make_model": partial(Transformer)},
        {"make_model": partial(Transformer, remat="none")},
        {"options": {**REQUEST.options, "accumulate": 2}},
        {"mesh_shape": {"data": 2, "fsdp": 4}},
        {"rule": eqxshard.replicate()},
        {"target": dataclasses.replace(REQUEST.target, network=1e9)},
        {"loss_fn": scaled_losses},
    ]
    first, again, *others = [changed(**each) for each in changes]
    # What no argument shows, such as a global.
    monkeypatch.setitem(globals(), "WIDTH", 2)
    others.append(changed(loss_fn=scaled_losses))
    assert again.fingerprint == first.fingerprint != ""
    assert len({each.fingerprint for each in [first, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    "said, changes",
    [
        (
            "batch size 4 does not divide over data=1 x fsdp=8",
            {"batch": {"tokens": jax.ShapeDtypeStruct((4, 17), "int32")}},
        ),
        ("nowhere", {"rule": eqxshard.by_dim({"heads": "nowhere"})}),
        ("no_such_option", {"make_model": partial(Transformer, **{"no_such_option": 1})}),
    ],
)
def test_what_cannot_run_has_a_problem(said, changes):
    found = changed(**changes)
    assert said in found.problem and found.fingerprint == ""
