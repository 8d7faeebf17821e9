"""Searches, by the compiler for CPUs, for devices with so little memory that it matters."""

import dataclasses
import json
import math
import re
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from plan_helpers import BATCH, OPTIM, RULE, by_hand, not_compiled
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard.planning import _search
from eqxshard.planning._process import load_request
from eqxshard.planning._search import mesh_shapes, rank

GIVEN = (Transformer, next_token_losses, OPTIM, BATCH)
LARGE = partial(Transformer, vocab=512, embed=64, mlp=256)


def with_memory(memory):
    return dataclasses.replace(eqxshard.Target.named("h200"), memory=memory)


@pytest.mark.slow
def test_what_does_not_fit_by_its_state_is_not_compiled():
    search = eqxshard.plan_search(
        LARGE,
        *GIVEN[1:],
        devices=8,
        rule=RULE,
        target=with_memory(1.6e6),
        meshes=[{"data": -1}, {"fsdp": 8}],
        backend="cpu",
    )
    best, data = search.candidates
    assert best.plan is not None and search.best is best.plan
    assert (best.mesh, best.reason, best.fits) == ({"fsdp": 8}, "", True)
    assert best.needs == best.plan.memory.peak
    assert data.plan is None and data.needs is not None and not data.fits
    assert data.reason == "does not fit: its state alone needs 1.60 MB of 1.52 MB"
    sizes = jax.tree.leaves(eqx.filter_eval_shape(LARGE, jax.random.key(0)))
    whole = 4 * sum(leaf.size for leaf in sizes if hasattr(leaf, "size"))
    # Parameters and two moments; and counters and keys.
    assert 3 * whole < data.needs < 3 * whole + 100
    plain = json.loads(json.dumps(search.to_json()))
    assert plain["best"] == plain["candidates"][0]
    assert plain["best"]["plan"]["memory"]["peak"] == best.plan.memory.peak


@pytest.mark.slow
def test_what_cannot_run_is_a_row_with_the_reason():
    batch = {"tokens": jax.ShapeDtypeStruct((4, 17), jnp.int32)}
    search = eqxshard.plan_search(
        {"good": Transformer, "bad": partial(Transformer, **{"no_such_option": 1})},
        *GIVEN[1:3],
        batch,
        devices=8,
        rule={"fsdp": RULE, "typo": eqxshard.by_path({"^nothing$": jax.P("tensor")})},
        meshes=[{"fsdp": 8}],
        backend="cpu",
    )
    assert search.best is None
    reasons = {each.name: each.reason for each in search.candidates}
    assert "batch size 4 does not divide over" in reasons["fsdp=8, good, fsdp"]
    assert "no_such_option" in reasons["fsdp=8, bad, fsdp"]
    assert "nothing" in reasons["fsdp=8, good, typo"]


def test_errors_of_the_compiler_are_rows(plan, monkeypatch):
    def run(data, compiler):
        request: Any = load_request(data)
        if request.mesh_shape["fsdp"] == 8:
            raise RuntimeError("XLA said no.\nIn detail")
        return plan

    monkeypatch.setattr(_search, "run", run)
    meshes, said = [{"data": 8}, {"fsdp": 8}], []
    search = eqxshard.plan_search(
        *GIVEN, devices=8, rule=RULE, meshes=meshes, progress=lambda *n: said.append(n)
    )
    assert said == [(1, 2), (2, 2)]
    assert search.best == plan and search.candidates[0].mesh == {"data": 8}
    (bad,) = search.candidates[1:]
    assert (bad.plan, bad.needs, bad.reason) == (None, None, "XLA said no.")


@pytest.mark.slow
def test_a_mesh_whose_devices_would_repeat_work_is_out():
    search = eqxshard.plan_search(
        *GIVEN,
        devices=8,
        rule=RULE,
        meshes=[{"tensor": 8}, {"data": 2, "fsdp": 4}],
        backend="cpu",
    )
    best, tensor = search.candidates
    assert search.best is best.plan and best.mesh == {"data": 2, "fsdp": 4}
    assert tensor.plan is None and not tensor.fits
    assert tensor.reason.startswith("nothing is split over tensor=8, so its devices repeat")


FSDP = by_hand({"fsdp": 8}, step=0.101, fsdp=0.012)
BOTH = by_hand({"data": 2, "fsdp": 4}, step=0.1, data=0.01)


def test_the_fastest_is_first_and_then_what_needs_least_memory():
    slow = by_hand({"tensor": 8}, step=0.2)
    large = by_hand({"data": 8}, peak=150 * 10**9, step=0.05, reason="does not fit")
    rest = [not_compiled("stage", None), not_compiled("expert", int(160e9)), large]
    ranked = rank([*rest, slow, BOTH, FSDP])
    assert ranked == (BOTH, FSDP, slow, *rest[::-1])


def test_a_search_prints_a_column_for_each_cost():
    found = (FSDP, BOTH, not_compiled("data", int(160e9)))
    head, table = str(eqxshard.Search(found, 3.2)).split("\n\n")
    assert head == "3 candidates, of which 2 were compiled and 2 fit, in 3 s"
    rows = [[cell.strip() for cell in re.split("[┃│]", x)] for x in table.splitlines()]
    _, names, _, *rows, _ = [row[1:-1] for row in rows]
    costs = ["compute", "fsdp links", "data links"]
    assert names == [
        "candidate",
        "needs",
        "at least",
        "about",
        "mfu",
        *costs,
        "why it is out",
    ]
    assert rows == [
        ["fsdp=8", "20.00 GB", "0.101 s", "", "0%", "89 ms", "12 ms", "", ""],
        ["data=2, fsdp=4", "20.00 GB", "0.1 s", "", "0%", "90 ms", "", "10 ms", ""],
        ["data", "> 160.00 GB", "", "", "", "", "", "", "because"],
    ]
    nothing = eqxshard.Search(found[2:], 1.0)
    assert "Nothing is left; see why" in str(nothing)
    assert nothing.to_json()["best"] is None


@pytest.mark.parametrize(
    "word, options",
    [
        ("'fdsp'", {"meshes": [{"fdsp": 8}]}),
        ("8 devices", {"meshes": [{"fsdp": 4}]}),
        ("no meshes for 0 devices", {"devices": 0}),
        ("'stage' cannot be searched", {"axes": ("stage",)}),
        ("no rule", {"rule": {}}),
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
