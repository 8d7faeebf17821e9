"""Words, of plans made by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import OPTIM, RULE, made_by_hand
from transformer import Transformer, next_token_losses

import eqxshard
from eqxshard.planning._collectives import PlannedCollective
from eqxshard.planning._plan import PlannedTime
from eqxshard.planning._reasons import Tried, judge, lack_of_state
from eqxshard.planning._request import Request
from eqxshard.planning._survey import Surveyed

H200 = dataclasses.replace(eqxshard.Target.named("h200"), memory=100e9)

KNOWN = Surveyed("", 60 * 10**9, 0)


def make_plan(mesh, peak, compute, waiting, sent):
    """Of a step that computes and waits for so many seconds."""
    collectives = [
        PlannedCollective(
            "all-gather", (axis,), (), size, size, 1, False, None, None, (), 0.0
        )
        for axis, size in sent.items()
    ]
    step = compute + sum(waiting.values())
    return made_by_hand(
        (20, 40, 0, 0, 20, peak - 60, peak, int(100e9)),
        collectives,
        target=H200,
        mesh=mesh,
        flops={"bfloat16": compute * 1e12},
        time=PlannedTime(step, compute, 0.0, waiting, waiting),
    )


def make_tried(mesh, result, known=KNOWN, accumulate=1):
    request = Request(
        make_model=Transformer,
        loss_fn=next_token_losses,
        optim=OPTIM,
        batch={"tokens": jax.ShapeDtypeStruct((16, 17), jnp.int32)},
        mesh_shape=mesh,
        devices=8,
        rule=RULE,
        target=H200,
        backend="gpu",
        trainable=True,
        precision=None,
        options={"accumulate": accumulate},
    )
    name = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    candidate = eqxshard.Candidate(
        name, mesh, "", "", accumulate, None, None, False, reason=""
    )
    return Tried(candidate, request, known, result)


FSDP = make_tried(
    {"fsdp": 8}, make_plan({"fsdp": 8}, int(24e9), 0.1, {"fsdp": 0.012}, {"fsdp": 10**9})
)


def test_the_fastest_that_fits_wins_and_the_others_lack_something():
    mesh = {"fsdp": 4, "tensor": 2}
    waiting, sent = {"fsdp": 0.006, "tensor": 0.05}, {"fsdp": 10**9, "tensor": 3 * 10**9}
    slow = make_tried(mesh, make_plan(mesh, int(20e9), 0.1, waiting, sent))
    known = Surveyed("", 160 * 10**9, 0)
    data = make_tried({"data": 8}, "", known)
    data = data._replace(result=lack_of_state(data.request, known, 0.05))
    ranked, why = judge([slow, data, FSDP], 0.05)
    assert [each.name for each in ranked] == ["fsdp=8", "fsdp=4, tensor=2", "data=8"]
    assert [each.fits for each in ranked] == [True, True, False]
    assert why.split("\n") == [
        "fsdp=8 wins: it is the fastest of 2 that fit; it needs 24.00 GB of 100.00 GB; of "
        "0.112 s it waits for fsdp links for 12 ms.",
        "fsdp=4, tensor=2 fits, but takes 1.39x as long: it waits for the links of tensor "
        "for 50 ms more, and sends 3.00 GB along them.",
        "data=8 does not fit: parameters, optimizer state, gradients and batch alone need "
        "160.00 GB of the 95.00 GB that may be used.",
    ]


def test_what_is_slower_says_by_what():
    def reason(compute, waiting, sent):
        mesh = {"data": 2, "fsdp": 4}
        other = make_tried(mesh, make_plan(mesh, 10**9, compute, waiting, sent))
        return judge([FSDP, other], 0.05)[0][1].reason

    said = reason(0.2, {"fsdp": 0.012}, {"fsdp": 10**9})
    assert said.endswith(
        "1.89x as long: it computes for 0.1 s more, 2.00x as many operations"
    )
    said = reason(0.1, {"fsdp": 0.112}, {"fsdp": 3 * 10**9})
    assert said.endswith(
        "it waits for the links of fsdp for 0.1 s more, and sends 3.00 GB, 3x as many "
        "bytes along them"
    )


def test_of_two_as_fast_the_simpler_mesh_wins():
    mesh = {"data": 2, "fsdp": 4}
    faster = make_plan(mesh, int(20e9), 0.1, {"fsdp": 0.011}, {"fsdp": 10**9})
    ranked, why = judge([make_tried(mesh, faster), FSDP], 0.05)
    assert ranked[0].name == "fsdp=8"
    assert "it is within 0.9% of data=2, fsdp=4, and simpler" in why
    much = make_plan(mesh, int(20e9), 0.1, {"fsdp": 0.001}, {"fsdp": 10**9})
    assert judge([make_tried(mesh, much), FSDP], 0.05)[0][0].mesh == mesh


def test_a_margin_of_memory_must_be_left():
    full = make_plan({"fsdp": 8}, int(97e9), 0.1, {}, {})
    tried = [make_tried({"fsdp": 8}, full)]
    assert judge(tried, 0.0)[0][0].fits
    (candidate,), why = judge(tried, 0.05)
    assert candidate.reason == "leaves 3.00 GB of 100.00 GB, less than the margin of 5%"
    assert not candidate.fits and why.startswith("Nothing fits. fsdp=8 is nearest: it ")


@pytest.mark.parametrize(
    "accumulate, remedy",
    [
        (1, "must shrink by 55.00 GB: try accumulate=2, or compute more of it again"),
        (2, "and each device has one row at a time: compute more of it again (remat), or"),
    ],
)
def test_if_temporaries_do_not_fit_there_are_remedies(accumulate, remedy):
    large = make_plan({"fsdp": 8}, int(150e9), 0.1, {}, {})
    _, why = judge([make_tried({"fsdp": 8}, large, accumulate=accumulate)], 0.05)
    assert why.startswith(
        "Nothing fits. fsdp=8 is nearest: it does not fit: it needs 150.00 GB of 100.00 GB"
    )
    assert remedy in why


def test_if_the_state_does_not_fit_it_says_how_many_devices_would_do():
    def tell(*sizes):
        shapes = ({"data": 8}, {"data": 4, "fsdp": 2}, {"fsdp": 8})
        known = [Surveyed("", size * 10**9, 0) for size in sizes]
        tried = [make_tried(*each) for each in zip(shapes, ["is large"] * 3, known)]
        return judge(tried, 0.05)

    ranked, why = tell(800, 400, 190)
    assert ranked[0].mesh == {"fsdp": 8}
    assert why.endswith(
        "If all of it were split, 16 devices could hold it; or use devices of 200.00 GB or "
        "more."
    )
    assert tell(800, 800, 800)[1].endswith(
        "splits nothing on any mesh; use eqxshard.fsdp()."
    )


def test_if_nothing_can_be_compiled_the_first_reason_is_told():
    tried = [make_tried({"data": 8}, "XLA said no", Surveyed(problem="XLA said no"))]
    (candidate,), why = judge(tried, 0.05)
    assert candidate.needs is None and not candidate.fits
    assert why == "Nothing can be compiled. data=8: XLA said no."
