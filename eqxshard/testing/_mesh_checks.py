"""The checks of `assert_mesh_invariant`, and their messages."""

from collections.abc import Sequence

from ..sharding._leaves import format_array
from ._compare import Arrays, Difference, kind_of

#: Where to look, by the first kind of value that differs.
_HINTS = {
    "nonfinite": "It is 1 if the loss, a gradient or the update is not finite: look for an "
    "overflow, or a division by something that may be 0, in the part of a batch on one "
    "device.",
    "loss": "The parameters are the same, so look at loss_fn and the model: per-device "
    "code (shard_map) without a psum or pmean, or with one key on every device; outside "
    "values that change between calls.",
    "gradients": "The loss is the same, so look at the backward pass: derivatives of your "
    "own, and per-device code (shard_map) that sums a gradient over too few devices, or "
    "twice.",
    "model": "The gradients are the same, so look at the optimizer: an update that depends "
    "on anything but its arguments, or that magnifies rounding (optax.sgd does not).",
    "opt_state": "The parameters are the same, so look at the optimizer's state: it must "
    "depend on its arguments alone.",
}


def check_initial(arrays: Arrays, reference: Arrays) -> None:
    """Raise `AssertionError` unless initial states are equal bit for bit."""
    for name in dict.fromkeys((*reference, *arrays)):
        # Gradients are not computed yet.
        if kind_of(name) != "gradients" and _bits(arrays, name) != _bits(reference, name):
            raise AssertionError(
                f"before step 1: {name} is {_bits(arrays, name)[0]} here and "
                f"{_bits(reference, name)[0]} on one device; its values must be equal bit "
                "for bit. make_model and optim.init must depend on their arguments alone: "
                "look for numpy.random, counters, or the time."
            )


def _bits(arrays: Arrays, name: str) -> tuple[str, bytes]:
    if name not in arrays:
        return "missing", b""
    return format_array(arrays[name]), arrays[name].tobytes()


def check_replicas(step: int, diverged: Sequence[str]) -> None:
    """Raise `AssertionError` if the replicas of an array differ between devices."""
    if diverged:
        more = f" (and {len(diverged) - 1} more)" if len(diverged) > 1 else ""
        raise AssertionError(
            f"step {step}: {_format_name(diverged[0])}{more} differs between devices that "
            "should have the same values. Look for per-device code (shard_map with "
            "check_vma=False) that declares a result to be the same on all devices, and "
            "takes no psum or pmean."
        )


def check_step(step: int, found: Sequence[Difference], rtol: float) -> None:
    """Raise `AssertionError` if something in a step differs by more than `rtol`."""
    wrong = [item for item in found if not item.excess <= rtol]
    if not wrong:
        return
    first = wrong[0]
    also = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise AssertionError(
        f"step {step}: {_format_name(first.name)}{also} differs from one device's by "
        f"{_amount(first, rtol)}. {_HINTS.get(kind_of(first.name), '')}"
    )


def check_losses(in_a_row: Sequence[Sequence[Difference]], rtol: float) -> None:
    """Raise `AssertionError` if the loss of steps in a row differs by more than `rtol`."""
    for step, found in enumerate(in_a_row, 1):
        loss = next(item for item in found if item.name == "loss")
        if not loss.excess <= rtol:
            raise AssertionError(
                f"step {step}, with all steps in a row: the loss differs from one device's "
                f"by {_amount(loss, rtol)}. Each step alone is the same, so look for "
                "something outside the state that passes from step to step; or the "
                "optimizer magnifies rounding: try a smaller learning rate."
            )


def _format_name(name: str) -> str:
    return name.replace("gradients.", "the gradient of ", 1)


def _amount(item: Difference, rtol: float) -> str:
    return (
        f"{item.relative:.1e} relative, {item.absolute:.1e} absolute; if that is rounding, "
        f"use an rtol larger than {rtol:.0e}"
    )
