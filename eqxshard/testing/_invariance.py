"""Whether a model trains the same on every mesh and under every rule."""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree, UInt32

from ..mesh import make_mesh
from ..precision import Precision
from ..rules import Rule, replicate
from ..sharding import is_array
from ..state import TrainState, init_state
from ..step import TrainStep, make_train_step
from ._compare import (
    Arrays,
    Difference,
    Result,
    costs,
    difference,
    differences,
    kind_of,
    load,
    read,
    uneven,
)
from ._report import MeshComparison, MeshReport

Sizes = Mapping[str, int]

#: On 2, 4 and 8 devices; one device is what they are compared with.
MESHES: Sequence[Sizes] = (
    {"data": 2},
    {"data": 2, "fsdp": 2},
    {"data": 8},
    {"data": 2, "fsdp": 4},
    {"fsdp": 8},
)

#: The relative difference that is rounding, by the least precise type in use.
_RTOL = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 2e-2}

#: Where to look, by what differs first.
_HINTS = {
    "nonfinite": "It is 1 where the loss or a gradient is not finite: look for what "
    "overflows, or divides by what may be 0, in the part of a batch that a device has.",
    "loss": "The parameters are the same, so look at loss_fn and the model: per-device "
    "code (shard_map) that takes no psum or pmean, or uses one key on every device; values "
    "from outside that change between calls.",
    "gradients": "The loss is the same, so look at the way back: derivatives of your own, "
    "and per-device code (shard_map) that sums a gradient over too few devices, or twice.",
    "model": "The gradients are the same, so look at the optimizer: an update that depends "
    "on anything but its arguments, or that magnifies rounding (optax.sgd does not).",
    "opt_state": "The parameters are the same, so look at what the optimizer keeps: it may "
    "depend on its arguments alone.",
}


def assert_mesh_invariant(
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[[Any, Any, Any], Any],
    batch: PyTree,
    optim: optax.GradientTransformation,
    *,
    rules: Rule | Mapping[str, Rule] | Sequence[Rule],
    meshes: Mapping[str, Sizes] | Sequence[Sizes] = MESHES,
    steps: int = 3,
    key: Key[Array, ""] | UInt32[Array, "2"] | None = None,
    rtol: float | None = None,
    trainable: PyTree = True,
    accumulate: int = 1,
    precision: Precision | None = None,
) -> MeshReport:
    """Check that a model trains on every mesh and under every rule as on one device.

    Compared with one device are, for each mesh and rule:

    - the new state, bit for bit;
    - each step, from the state that one device had before it, so that a difference is
        that step's own: loss, gradients, parameters, optimizer state, and all else;
        devices that should have the same must have it, bit for bit;
    - the losses of all steps in a row.

    The steps are those of [`eqxshard.make_train_step`][]; a transformation in front of
    `optim` records the gradients that it is given.

    The relative difference of two arrays is `max |a - b| / max |b|`, where `b` is one
    device's. Some gradients are zero but for rounding, such as that of the bias of
    attention's keys: where `max |b|` is less than a tenth of the model's largest, that
    tenth takes its place. Optimizers such as Adam turn the rounding of a tiny gradient
    into a whole step: each element of a parameter, and of the optimizer's state for it,
    may differ as much as its gradient explains. Under a `precision`, a gradient may
    differ by twice what the precision itself costs it, which is measured against float32
    on one device.

    **Arguments:**

    - `make_model`: as for [`eqxshard.init_state`][].
    - `loss_fn`: as for [`eqxshard.make_train_step`][].
    - `batch`: a batch for every step, or a list of batches, taken in turn. Its size must
        divide over every mesh.
    - `optim`: an optax optimizer.
    - `rules`: a rule, or several, by name or in a sequence. Give rules that do split a
        model of this size, such as `fsdp(min_size=1)`; the report says how many arrays
        are split.
    - `meshes`: sizes for [`eqxshard.make_mesh`][], by name or in a sequence, such as
        `[{"data": 2, "fsdp": 4}]`. Each takes the first devices. By default there are
        five, of 2, 4 and 8 devices along `data` and `fsdp`.
    - `steps`: the number of steps.
    - `key`: of the model and the run, `jax.random.key(0)` by default.
    - `rtol`: the relative difference that is rounding. By default 2e-5; 2e-2 for models,
        or a `precision`, of bfloat16, 1e-2 of float16, and 1e-10 of float64.
    - `trainable`, `accumulate`, `precision`: as for [`eqxshard.make_train_step`][].

    **Returns:**

    An [`eqxshard.testing.MeshReport`][], which prints as a table.

    **Raises:**

    `AssertionError` with the first step and array that differ, by how much, on which mesh
    and under which rule, and where to look; `ValueError` if there are too few devices, or
    nothing to compare.

    !!! Example

        ```python
        def test_my_model_trains_the_same_on_every_mesh():
            report = eqxshard.testing.assert_mesh_invariant(
                MyModel,
                loss_fn,
                batch,
                optax.adam(1e-3),
                rules=[eqxshard.replicate(), eqxshard.fsdp(min_size=1)],
            )
            print(report)
        ```
    """
    named_meshes, named_rules = _named_meshes(meshes), _named_rules(rules)
    key = jax.random.key(0) if key is None else key
    given = batch if isinstance(batch, list) else [batch]
    if steps < 1 or not given:
        raise ValueError(
            f"{steps} steps on {len(given)} batches compare nothing; take 1 or more."
        )
    batches = [given[index % len(given)] for index in range(steps)]
    recorded = optax.chain(_recorder(), optim)

    def set_up(
        mesh: Mesh, rule: Rule, precision: Precision | None = precision
    ) -> tuple[TrainStep, TrainState]:
        options: Any = dict(mesh=mesh, rule=rule, trainable=trainable, precision=precision)
        state = init_state(make_model, recorded, key=key, **options)
        return make_train_step(loss_fn, recorded, accumulate=accumulate, **options), state

    one = make_mesh(data=1, devices=jax.devices()[:1])
    step, state = set_up(one, replicate())
    initial = read(state)
    theirs = _run(step, state, batches, [None] * steps)
    for number, result in enumerate(theirs, 1):
        if not math.isfinite(result.loss):
            raise AssertionError(
                f"step {number}: the loss is {result.loss} on one device already; take "
                "another batch, or a smaller learning rate."
            )
    starts = [initial, *(result.arrays for result in theirs[:-1])]
    # What the precision costs the gradients.
    known: list[dict[str, float]] = [{}] * steps
    if precision is not None and jnp.finfo(precision.compute).bits < 32:
        exact = dataclasses.replace(precision, compute=jnp.float32)
        results = _run(*set_up(one, replicate(), exact), batches, starts)
        known = [*map(costs, results, theirs)]
    rtol = _rounding(initial, precision) if rtol is None else rtol

    rows = []
    for (mesh_name, sizes), (rule_name, rule) in itertools.product(
        named_meshes, named_rules
    ):
        devices = jax.devices()[: math.prod(sizes.values())]
        with _saying(f"on the mesh {mesh_name} under {rule_name}"):
            all_sizes: Any = {"data": 1, **sizes}
            mesh = make_mesh(**all_sizes, devices=devices)
            step, state = set_up(mesh, rule)
            _check_initial(read(state), initial)
            arrays = [x for x in jax.tree.leaves(state.model) if is_array(x)]
            split = sum(not x.sharding.is_fully_replicated for x in arrays)
            # Each step from where one device was, and then all in a row.
            ours = _run(step, state, 2 * batches, [*starts, initial, *[None] * (steps - 1)])
            found = [*map(differences, ours[:steps], theirs, starts, known)]
            for number, in_step in enumerate(found, 1):
                _check_even(number, ours[number - 1].uneven)
                _check_step(number, in_step, rtol)
            in_a_row = [*map(differences, ours[steps:], theirs, starts, known)]
            _check_losses(in_a_row, rtol)
        rows.append(
            MeshComparison(
                mesh=mesh_name,
                rule=rule_name,
                devices=len(devices),
                split=split,
                arrays=len(arrays),
                loss=_largest("loss", in_a_row),
                gradients=_largest("gradients", found),
                parameters=_largest("model", in_a_row[-1:]),
            )
        )
    return MeshReport(tuple(rows), steps, rtol)


def _recorder() -> optax.GradientTransformation:
    """Changes no gradient, and keeps the last ones as its state."""

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: PyTree, state: PyTree, params: Any = None) -> tuple[PyTree, PyTree]:
        return updates, updates

    return optax.GradientTransformation(init, update)


def _run(
    step: TrainStep,
    state: TrainState,
    batches: Sequence[PyTree],
    starts: Sequence[Arrays | None],
) -> list[Result]:
    """Take steps, each from its start, or from where the one before ended."""
    results = []
    for batch, start in zip(batches, starts, strict=True):
        state, metrics = step(state if start is None else load(state, start), batch)
        host = jax.device_get(metrics)
        loss = float(host.totals["loss"] / host.weight)
        results.append(Result(loss, int(host.nonfinite), read(state), uneven(state)))
    return results


@contextlib.contextmanager
def _saying(where: str) -> Iterator[None]:
    """Say of every error where it was."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}, {error}") from None
    except Exception as error:
        error.add_note(f"This was {where}.")
        raise


def _check_initial(ours: Arrays, theirs: Arrays) -> None:
    pure = (
        "make_model and optim.init may depend on their arguments alone: look for "
        "numpy.random, counters, the time."
    )
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        if kind_of(name) == "gradients":
            continue  # There are none yet.
        ours_is, theirs_is = _described(ours, name), _described(theirs, name)
        if ours_is != theirs_is:
            raise AssertionError(
                f"before step 1: {name} is {ours_is}, and {theirs_is} on one device. {pure}"
            )
        if ours[name].tobytes() != theirs[name].tobytes():
            amount = _amount(difference(name, ours[name], theirs[name]))
            raise AssertionError(
                f"before step 1: {name} differs from one device's by {amount}, and initial "
                f"values must be equal bit for bit. {pure}"
            )


def _check_even(number: int, uneven: Sequence[str]) -> None:
    if uneven:
        more = f" (and {len(uneven) - 1} more)" if len(uneven) > 1 else ""
        raise AssertionError(
            f"step {number}: {_in_words(uneven[0])}{more} is not the same on devices that "
            "should have the same of it. Look for per-device code (shard_map with "
            "check_vma=False) that says of a result that all devices have it, and takes no "
            "psum or pmean."
        )


def _check_step(number: int, found: Sequence[Difference], rtol: float) -> None:
    wrong = [item for item in found if not item.excess <= rtol]
    if not wrong:
        return
    first = wrong[0]
    counts = collections.Counter(kind_of(item.name) for item in wrong[1:])
    others = ", ".join(f"{count} in {kind}" for kind, count in counts.items())
    also = f"So do others: {others}. " if others else ""
    raise AssertionError(
        f"step {number}: {_in_words(first.name)} differs from one device's by "
        f"{_amount(first)}, more than rtol={rtol:.0e}. {also}"
        f"{_HINTS.get(kind_of(first.name), '')}{_if_close(first, rtol)}"
    )


def _check_losses(found: Sequence[Sequence[Difference]], rtol: float) -> None:
    for number, in_step in enumerate(found, 1):
        loss = next(item for item in in_step if item.name == "loss")
        if not loss.excess <= rtol:
            raise AssertionError(
                f"step {number} of all in a row: the loss differs from one device's by "
                f"{_amount(loss)}, more than rtol={rtol:.0e}. Each step alone is the same, "
                "so look for what goes from step to step elsewhere than in the state; or "
                "the optimizer magnifies rounding: try a smaller learning rate."
                f"{_if_close(loss, rtol)}"
            )


def _in_words(name: str) -> str:
    return name.replace("gradients.", "the gradient of ", 1)


def _amount(item: Difference) -> str:
    return f"{item.relative:.1e} relative, {item.absolute:.1e} absolute"


def _if_close(item: Difference, rtol: float) -> str:
    near = item.excess < 10 * rtol
    return " This close to rtol it may be rounding: give a larger rtol." if near else ""


def _described(arrays: Arrays, name: str) -> str:
    if name not in arrays:
        return "not there"
    return f"{arrays[name].dtype}[{','.join(map(str, arrays[name].shape))}]"


def _largest(kind: str, found: Sequence[Sequence[Difference]]) -> float:
    items = (item for in_step in found for item in in_step if kind_of(item.name) == kind)
    return max((item.relative for item in items), default=0.0)


def _rounding(initial: Arrays, precision: Precision | None) -> float:
    dtypes = [array.dtype for name, array in initial.items() if kind_of(name) == "model"]
    if precision is not None:
        dtypes.append(jnp.dtype(precision.compute))
    floats = [jnp.finfo(x).dtype for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    return max((_RTOL.get(str(x), 2e-2) for x in floats), default=_RTOL["float32"])


def _named_rules(
    rules: Rule | Mapping[str, Rule] | Sequence[Rule],
) -> list[tuple[str, Rule]]:
    if isinstance(rules, Mapping):
        named = [*rules.items()]
    else:
        several = rules if isinstance(rules, Sequence) else [rules]
        named = [(getattr(rule, "__name__", repr(rule)), rule) for rule in several]
    if not named:
        raise ValueError("rules is empty; give at least one, such as fsdp(min_size=1).")
    return named


def _named_meshes(
    meshes: Mapping[str, Sizes] | Sequence[Sizes],
) -> list[tuple[str, Sizes]]:
    if isinstance(meshes, Mapping):
        named = [*meshes.items()]
    else:
        named = [(", ".join(f"{a}={n}" for a, n in m.items()), m) for m in meshes]
    if not named:
        raise ValueError("meshes is empty; give at least one, such as {'data': 2}.")
    for name, sizes in named:
        if not isinstance(sizes, Mapping):
            raise TypeError(f"meshes={meshes!r} is one mesh; write [{meshes!r}].")
        if any(size < 1 for size in sizes.values()):
            raise ValueError(
                f"the mesh {dict(sizes)} leaves a size open; give each axis its own, "
                "because a mesh takes the first devices that it needs."
            )
        count, there = math.prod(sizes.values()), jax.device_count()
        if count > there:
            raise ValueError(
                f"the mesh {name} needs {count} devices, and there are {there}; simulate "
                f"them: jax.config.update('jax_num_cpu_devices', {count}) before anything "
                "else uses JAX, such as at the top of conftest.py, or in the environment "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={count}, both with "
                "JAX_PLATFORMS=cpu; or give meshes of fewer devices."
            )
    return named
