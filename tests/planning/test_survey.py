"""Surveys, in this process and for its simulated devices."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import equinox as eqx
import jax
import pytest
from plan_helpers import REQUEST
from transformer import Transformer

import eqxshard
from eqxshard.planning._request import Survey
from eqxshard.planning._survey import compiler_settings, describe, survey_all

OPTIONS = REQUEST.options


def survey(*changes):
    requests = tuple(dataclasses.replace(REQUEST, **each) for each in changes)
    return survey_all(Survey(requests))


def test_state_is_counted_on_each_mesh_and_gradients_in_the_type_of_computation():
    whole, split, low, unchecked = survey(
        {"mesh_shape": {"data": 8}},
        {},
        {"precision": eqxshard.Precision("bfloat16"), "make_model": partial(Transformer)},
        {"options": {**OPTIONS, "nonfinite": "ignore"}, "make_model": partial(Transformer)},
    )
    model = eqx.filter_eval_shape(Transformer, jax.random.key(0))
    sizes = [leaf.size for leaf in jax.tree.leaves(model) if hasattr(leaf, "size")]
    rows = 2 * 17 * 4
    assert whole.others == 4 * sum(sizes) + rows
    assert low.others - rows == (split.others - rows) / 2
    assert unchecked.others == rows
    assert 3 * 4 * sum(sizes) < whole.state < 3 * 4 * sum(sizes) + 100
    assert 7 * split.state < whole.state < 8 * split.state
    assert whole.least == whole.state + whole.others


def test_what_compiles_to_the_same_has_the_same_fingerprint():
    first, again, *others = survey(
        {},
        {"make_model": partial(Transformer)},
        {"make_model": partial(Transformer, remat="none")},
        {"options": {**OPTIONS, "accumulate": 2}},
        {"mesh_shape": {"data": 2, "fsdp": 4}},
        {"rule": eqxshard.replicate()},
        {"target": dataclasses.replace(REQUEST.target, network=1e9)},
    )
    assert again.fingerprint == first.fingerprint != ""
    assert len({each.fingerprint for each in [first, *others]}) == 1 + len(others)


def test_rules_that_decide_the_same_are_the_same_step():
    shape = {"mesh_shape": {"data": 8}}
    one, other = survey(shape, {**shape, "rule": eqxshard.replicate()})
    assert one.fingerprint == other.fingerprint


def test_what_cannot_run_has_a_problem():
    few = {"tokens": jax.ShapeDtypeStruct((4, 17), "int32")}
    rule = eqxshard.by_dim({"heads": "nowhere"})
    good, rows, ruled = survey({}, {"batch": few}, {"rule": rule})
    assert good.problem == ""
    assert "batch size 4 does not divide over data=1 x fsdp=8" in rows.problem
    assert "nowhere" in ruled.problem
    assert rows.fingerprint == ruled.fingerprint == ""


def test_a_model_that_cannot_be_made_is_a_problem_of_its_own():
    bad = partial(Transformer, **{"no_such_option": 1})
    found, good = survey({"make_model": bad}, {})
    assert "no_such_option" in found.problem and good.problem == ""


@pytest.mark.parametrize("other", [2, "1"])
def test_functions_are_told_apart_by_the_values_that_they_hold(other):
    def make(value):
        return partial(lambda x, y: (x, value), y=[value])

    assert describe(make(1)) == describe(make(1)) != describe(make(other))


def test_a_plan_for_tpus_is_one_of_a_version_of_their_compiler(monkeypatch):
    def settings(version, **changes):
        def installed(name):
            return [SimpleNamespace(version=version)]

        monkeypatch.setattr("importlib.metadata.distributions", installed)
        return compiler_settings(dataclasses.replace(REQUEST, **changes))

    assert settings("0.0.40", backend="tpu") != settings("0.0.41", backend="tpu")
    assert settings("0.0.40") == settings("0.0.41")
