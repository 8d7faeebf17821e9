"""The checks of `assert_mesh_invariant`, and their messages."""

import collections
from collections.abc import Sequence

from ..sharding._leaves import format_array
from ._compare import Arrays, Difference, compare, kind_of

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
    """Raise `AssertionError` unless initial states are equal, bit for bit."""
    hint = (
        "make_model and optim.init must depend on their arguments alone: look for "
        "numpy.random, counters, the time."
    )
    for name in [*reference, *(name for name in arrays if name not in reference)]:
        if kind_of(name) == "gradients":
            continue  # Not computed yet.
        ours, theirs = _describe(arrays, name), _describe(reference, name)
        if ours != theirs:
            raise AssertionError(
                f"before step 1: {name} is {ours}, and {theirs} on one device. {hint}"
            )
        if arrays[name].tobytes() != reference[name].tobytes():
            amount = _amount(compare(name, arrays[name], reference[name]))
            raise AssertionError(
                f"before step 1: {name} differs from one device's by {amount}, and initial "
                f"values must be equal bit for bit. {hint}"
            )


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
    counts = collections.Counter(kind_of(item.name) for item in wrong[1:])
    others = ", ".join(f"{count} in {kind}" for kind, count in counts.items())
    also = f"So do others: {others}. " if others else ""
    raise AssertionError(
        f"step {step}: {_format_name(first.name)} differs from one device's by "
        f"{_amount(first)}, more than rtol={rtol:.0e}. {also}"
        f"{_HINTS.get(kind_of(first.name), '')}{_rounding_hint(first, rtol)}"
    )


def check_losses(in_a_row: Sequence[Sequence[Difference]], rtol: float) -> None:
    """Raise `AssertionError` if the loss of steps in a row differs by more than `rtol`."""
    for step, found in enumerate(in_a_row, 1):
        loss = next(item for item in found if item.name == "loss")
        if not loss.excess <= rtol:
            raise AssertionError(
                f"step {step} of all in a row: the loss differs from one device's by "
                f"{_amount(loss)}, more than rtol={rtol:.0e}. Each step alone is the same, "
                "so look for something outside the state that passes from step to step; or "
                "the optimizer magnifies rounding: try a smaller learning rate."
                f"{_rounding_hint(loss, rtol)}"
            )


def _format_name(name: str) -> str:
    return name.replace("gradients.", "the gradient of ", 1)


def _amount(item: Difference) -> str:
    return f"{item.relative:.1e} relative, {item.absolute:.1e} absolute"


def _rounding_hint(item: Difference, rtol: float) -> str:
    near = item.excess < 10 * rtol
    return " This close to rtol it may be rounding: use a larger rtol." if near else ""


def _describe(arrays: Arrays, name: str) -> str:
    return format_array(arrays[name]) if name in arrays else "missing"
