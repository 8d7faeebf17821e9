"""Searches: plans of several meshes by the compiler for CPUs, and their order."""

import math
from functools import partial

import pytest
from grades import graded
from plan_helpers import BATCH, OPTIM, RULE, by_hand
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard.planning import _search
from eqxshard.planning._child import CompilerError
from eqxshard.planning._search import mesh_shapes, rank

GIVEN = (Transformer, next_token_losses, OPTIM, BATCH)


@pytest.mark.slow
def test_the_fastest_mesh_is_first_and_one_that_cannot_run_is_left_out():
    plans = eqxshard.plan_search(
        *GIVEN,
        devices=8,
        rule=RULE,
        meshes=[{"data": 8}, {"fsdp": 8}, {"context": 8}],
        accumulate=2,
        backend="cpu",
    )
    assert [plan.examples for plan in plans] == [16] * 3
    assert {tuple(plan.mesh) for plan in plans} == {("data",), ("fsdp",), ("context",)}
    steps = [plan.time.step for plan in plans if plan.time is not None]
    assert steps == sorted(steps) and len(steps) == 3
    # Batches of 16 do not divide over 8 devices in 4 parts.
    (plan,) = eqxshard.plan_search(
        *GIVEN,
        devices=8,
        rule=RULE,
        meshes=[{"data": 8}, {"fsdp": 4, "tensor": 2}],
        accumulate=4,
        backend="cpu",
    )
    assert plan.mesh == {"fsdp": 4, "tensor": 2} and plan.examples == 16


@pytest.mark.slow
def test_what_can_run_on_no_mesh_raises_the_reason():
    bad = partial(Transformer, **{"no_such_option": 1})
    meshes = [{"fsdp": 8}, {"data": 8}]
    with pytest.raises(TypeError, match="no_such_option"):
        eqxshard.plan_search(
            bad, *GIVEN[1:], devices=8, rule=RULE, meshes=meshes, backend="cpu"
        )


@pytest.fixture
def search(plan, monkeypatch):
    """Searches two meshes, of which fsdp=8 raises an error."""

    def search(error):
        def run(request):
            if request.sizes["fsdp"] == 8:
                raise error
            return plan

        monkeypatch.setattr(_search, "run", run)
        meshes = [{"data": 8, "fsdp": 1}, {"fsdp": 8}]
        return eqxshard.plan_search(*GIVEN, devices=8, rule=RULE, meshes=meshes)

    return search


@pytest.mark.slow
def test_a_mesh_that_cannot_run_is_left_out_with_the_reason(search, plan, caplog):
    assert search(CompilerError("5 rows do not divide;\nuse 8.")) == [plan]
    (record,) = caplog.records
    assert record.getMessage() == (
        "the mesh of fsdp=8 is left out: 5 rows do not divide; use 8."
    )


@pytest.mark.parametrize(
    "kind",
    graded(
        [ValueError, TypeError, RuntimeError],
        quick=[TypeError],
        slow=[ValueError, RuntimeError],
    ),
)
def test_a_mistake_on_one_mesh_only_is_raised(kind, search):
    with pytest.raises(kind, match="of the user"):
        search(kind("of the user"))


def test_the_fastest_is_first_and_then_what_needs_least_memory():
    fast, slow = by_hand({"fsdp": 8}, step=0.1), by_hand({"tensor": 8}, step=0.2)
    large = by_hand({"data": 8}, peak=150 * 10**9, step=0.05)
    larger = by_hand({"stage": 8}, peak=160 * 10**9, step=0.01)
    assert rank([larger, large, slow, fast]) == [fast, slow, large, larger]


@pytest.mark.parametrize(
    "word, options",
    [
        ("'fdsp'", {"meshes": [{"fdsp": 8}]}),
        ("8 devices", {"meshes": [{"fsdp": 4}]}),
        ("no mesh of 0 devices", {"devices": 0}),
        ("'stage' cannot be searched", {"axes": ("stage",)}),
        ("'h20'", {"target": "h20"}),
    ],
)
def test_bad_input_is_refused(word, options):
    with pytest.raises(ValueError, match=word):
        eqxshard.plan_search(*GIVEN, **{"devices": 8, "rule": RULE, **options})


def shapes(devices, axes, per_host=8):
    found = [*mesh_shapes(devices, axes, per_host)]
    assert {math.prod(each.values()) for each in found} == {devices}
    plain = [{axis: n for axis, n in each.items() if n > 1} for each in found]
    assert len({str(each) for each in plain}) == len(plain)
    return plain


def test_within_a_host_all_meshes_that_divide():
    assert shapes(4, ("data", "fsdp")) == [{"data": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 4}]
    found = [{"fsdp": 6}, {"fsdp": 3, "tensor": 2}, {"fsdp": 2, "tensor": 3}, {"tensor": 6}]
    assert shapes(6, ("fsdp", "tensor")) == found
    assert len(shapes(8, ("data", "fsdp", "tensor"))) == 10
    assert shapes(1, ("data",)) == [{}]


def test_tensor_and_context_stay_within_a_host():
    found = shapes(64, ("data", "fsdp", "context", "tensor"))
    assert max(x.get("tensor", 1) * x.get("context", 1) for x in found) == 8
    found = shapes(64, ("data", "tensor"), per_host=4)
    assert max(each.get("tensor", 1) for each in found) == 4


def test_beyond_a_host_copies_are_on_whole_hosts_and_few():
    found = shapes(512, ("data", "fsdp"))
    assert [each.get("fsdp", 1) for each in found] == [1, 8, 16, 32, 64, 128, 256, 512]
    assert len(shapes(512, ("data", "fsdp", "tensor"))) < 40
    # Six hosts, and twelve devices, which are not whole hosts.
    sizes = [each.get("fsdp", 1) for each in shapes(48, ("data", "fsdp"))]
    assert sizes == [1, 8, 16, 24, 48]
    assert len(shapes(12, ("data", "fsdp"))) == 6
