"""Searches, by the compiler for CPUs, for devices with so little memory that it matters."""

import dataclasses
import json
from functools import partial

import equinox as eqx
import gpt
import jax
import jax.numpy as jnp
import optax
import pytest
from gpt_model import GPT, Shape
from plan_helpers import BATCH, OPTIM, RULE, by_hand, not_compiled
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard.planning import _search
from eqxshard.planning._request import load_request
from eqxshard.planning._search import rank
from eqxshard.planning._survey import Surveyed

GIVEN = (Transformer, next_token_losses, OPTIM, BATCH)
LARGE = partial(Transformer, vocab=512, embed=64, mlp=256)
SPLIT = eqxshard.combine(
    eqxshard.by_dim({"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}),
    eqxshard.fsdp(min_size=1),
)


def with_memory(memory):
    return dataclasses.replace(eqxshard.Target.named("h200"), memory=memory)


def find(search, **mesh):
    return next(each for each in search.candidates if each.mesh == mesh)


@pytest.fixture(scope="module")
def searches(tmp_path_factory):
    """The same search twice: of what does not fit without fsdp."""
    folder = tmp_path_factory.mktemp("plans")

    def search():
        return eqxshard.plan_search(
            LARGE,
            *GIVEN[1:],
            devices=8,
            rules=RULE,
            target=with_memory(1.6e6),
            meshes=[{"data": -1}, {"fsdp": 8}, {"data": 2, "fsdp": 4}],
            backend="cpu",
            cache=folder,
        )

    return search(), search()


@pytest.mark.slow
def test_what_does_not_fit_by_its_state_is_not_compiled(searches):
    search, _ = searches
    assert search.best is not None and search.best.mesh == {"fsdp": 8}
    assert search.candidates[0].plan is search.best and search.candidates[0].reason == ""
    data = find(search, data=8)
    assert data.plan is None and not data.fits
    assert data.reason == "does not fit: needs at least 2.13 MB of 1.52 MB"


@pytest.mark.slow
def test_the_least_that_is_needed_is_that_of_the_compiled_step(searches):
    search, _ = searches
    data = find(search, data=8)
    sizes = jax.tree.leaves(eqx.filter_eval_shape(LARGE, jax.random.key(0)))
    whole = 4 * sum(leaf.size for leaf in sizes if hasattr(leaf, "size"))
    # Parameters, two moments, gradients; and counters, keys and two rows of tokens.
    assert 4 * whole < data.needs < 4 * whole + 300
    memory = search.best.memory
    assert memory.peak > memory.parameters + memory.optimizer + memory.gradients


@pytest.mark.slow
def test_the_same_search_again_compiles_nothing(searches):
    first, second = searches
    # Also in how long it took to compile.
    assert second.candidates == first.candidates
    plain = json.loads(json.dumps(second.to_json()))
    assert plain["best"] == plain["candidates"][0]
    assert plain["best"]["plan"]["memory"]["peak"] == first.best.memory.peak


def test_what_cannot_run_is_a_row_with_the_reason(tmp_path):
    batch = {"tokens": jax.ShapeDtypeStruct((4, 17), jnp.int32)}
    search = eqxshard.plan_search(
        {"good": Transformer, "bad": partial(Transformer, **{"no_such_option": 1})},
        *GIVEN[1:3],
        batch,
        devices=8,
        rules={"fsdp": RULE, "typo": eqxshard.by_path({"^nothing$": jax.P("tensor")})},
        meshes=[{"fsdp": 8}],
        backend="cpu",
        cache=tmp_path,
    )
    assert search.best is None
    reasons = {each.name: each.reason for each in search.candidates}
    assert "batch size 4 does not divide over" in reasons["fsdp=8, good, fsdp"]
    assert "no_such_option" in reasons["fsdp=8, bad, fsdp"]
    assert "nothing" in reasons["fsdp=8, good, typo"]
    assert "Nothing can be compiled; the last column says why." in str(search)


FSDP = by_hand({"fsdp": 8}, step=0.101, fsdp=0.012)
BOTH = by_hand({"data": 2, "fsdp": 4}, step=0.1, data=0.01)


@pytest.mark.parametrize("kept", [True, False])
def test_plans_are_kept_and_errors_of_the_compiler_are_rows(
    plan, tmp_path, monkeypatch, kept
):
    folder, compiled = tmp_path / "plans", []
    if not kept:
        folder.touch()  # So it can be no folder.

    def run(data, where, module="_compile"):
        if module == "_survey":
            return [Surveyed(1, "good"), Surveyed(1, "bad")]
        mesh = dict(load_request(data).mesh_shape)
        compiled.append(mesh["fsdp"])
        if mesh["fsdp"] == 8:
            raise RuntimeError("XLA said no.\nIn detail")
        return plan

    monkeypatch.setattr(_search, "run", run)
    for _ in range(2):
        search = eqxshard.plan_search(
            *GIVEN, devices=8, rules=RULE, meshes=[{"data": 8}, {"fsdp": 8}], cache=folder
        )
        assert search.best == plan and search.candidates[0].mesh == {"data": 8}
        (bad,) = search.candidates[1:]
        assert (bad.plan, bad.needs, bad.reason) == (None, None, "XLA said no.")
    # Whether they fail may change.
    assert sorted(compiled) == ([1, 8, 8] if kept else [1, 1, 8, 8])


def test_the_fastest_is_first_and_of_two_as_fast_the_simpler():
    slow = by_hand({"tensor": 8}, step=0.2)
    large = by_hand({"data": 8}, peak=150 * 10**9, step=0.05, fits=False)
    rest = [not_compiled("stage", None), not_compiled("expert", int(160e9)), large]
    ranked = rank([*rest, slow, BOTH, FSDP])
    assert ranked == (FSDP, BOTH, slow, *rest[::-1])
    faster = by_hand({"data": 2, "fsdp": 4}, step=0.09)
    assert rank([FSDP, faster]) == (faster, FSDP)


@pytest.mark.parametrize(
    "message, options",
    [
        ("there is no mesh axis 'fdsp'", {"meshes": [{"fdsp": 8}]}),
        ("does not use exactly the 8 devices", {"meshes": [{"fsdp": 4}]}),
        ("devices=0 is too few; give at least 1", {"devices": 0}),
        ("no mesh of 8 devices to try; give meshes=", {"axes": ()}),
        ("rules is empty; give at least one", {"rules": {}}),
        ("there is no target 'h20'", {"target": "h20"}),
        ("margin=5.0 is not a part; use one from 0 to 1", {"margin": 5.0}),
        ("workers=0 is too few; give at least 1", {"workers": 0}),
    ],
)
def test_bad_input_is_one_sentence(message, options):
    with pytest.raises(ValueError, match=message):
        eqxshard.plan_search(*GIVEN, **{"devices": 8, "rules": RULE, **options})


def search_small(make_model, rule, rows, memory, tmp_path, **options):
    return eqxshard.plan_search(
        make_model,
        next_token_losses,
        optax.adam(1e-3),
        {"tokens": jax.ShapeDtypeStruct((rows, 17), jnp.int32)},
        devices=4,
        rules=rule,
        target=with_memory(memory),
        backend="cpu",
        cache=tmp_path,
        **options,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_what_fits_on_one_device_needs_only_data(tmp_path):
    meshes = [{"data": 4}, {"fsdp": 4}, {"data": 2, "tensor": 2}]
    search = search_small(Transformer, SPLIT, 16, 1e9, tmp_path, meshes=meshes)
    assert search.best is not None and search.best.mesh == {"data": 4}
    assert all(each.fits for each in search.candidates)
    times = [x.plan.time.step for x in search.candidates if x.plan and x.plan.time]
    assert times == sorted(times)


@pytest.mark.thorough
@pytest.mark.usefixtures("as_scripts_run")
def test_what_does_not_fit_whole_needs_fsdp(tmp_path):
    meshes = [{"data": 4}, {"fsdp": 4}]
    search = search_small(LARGE, SPLIT, 16, 2e6, tmp_path, meshes=meshes)
    assert search.best is not None and search.best.mesh == {"fsdp": 4}
    assert "does not fit" in find(search, data=4).reason


@pytest.mark.thorough
@pytest.mark.usefixtures("as_scripts_run")
def test_fewer_rows_than_devices_and_a_large_layer_need_fsdp_and_tensor(tmp_path):
    # Two heads, so that tensor is at most 2.
    model = partial(LARGE, heads=2)
    search = search_small(model, SPLIT, 2, 1.1e6, tmp_path)
    assert search.best is not None and search.best.mesh == {"fsdp": 2, "tensor": 2}
    assert "does not divide" in find(search, fsdp=4).reason
    assert "does not fit" in find(search, data=2, tensor=2).reason
    assert "of size 2 over tensor=4, which does not" in find(search, tensor=4).reason


@pytest.mark.thorough
@pytest.mark.usefixtures("as_scripts_run")
def test_a_long_sequence_needs_context(tmp_path):
    shape = Shape(
        layers=1, heads=1, kv_heads=1, embed=32, mlp=64, seq_len=2048, vocab_size=64
    )
    tokens = jax.ShapeDtypeStruct((2, shape.seq_len), jnp.int32)
    search = eqxshard.plan_search(
        partial(GPT, shape=shape, remat="full"),
        gpt.loss_fn,
        optax.adam(1e-3),
        {"tokens": tokens, "targets": tokens},
        devices=4,
        rules=gpt.make_rule(shape),
        axes=("data", "fsdp", "context", "tensor"),
        target="h200",
        backend="cpu",
        cache=tmp_path,
    )
    assert search.best is not None and search.best.mesh.get("context", 1) > 1
    assert "does not divide" in find(search, data=4).reason
