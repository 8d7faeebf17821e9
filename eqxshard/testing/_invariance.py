"""`assert_mesh_invariant`: a model trains the same on every mesh and under every rule."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree, UInt32

from .._errors import UsageError, UsageTypeError
from ..sharding._leaf_rules import replicate
from ..sharding._leaves import array_leaves
from ..sharding._mesh import make_mesh, used_axes
from ..sharding._rule import Rule, rule_name
from ..sharding._text import count_devices, format_mesh
from ..training._init import init_state
from ..training._precision import Precision
from ..training._state import TrainState
from ..training._train_step import TrainStep, make_train_step
from ._compare import (
    Arrays,
    Difference,
    Result,
    compare_results,
    diverged_replicas,
    kind_of,
    to_host,
    with_arrays,
)
from ._mesh_checks import check_initial, check_losses, check_replicas, check_step
from ._report import MeshComparison, MeshReport

Sizes = Mapping[str, int]

#: The default meshes: 2, 4 and 8 devices, to compare with one.
MESHES: Sequence[Sizes] = (
    {"data": 2},
    {"data": 2, "fsdp": 2},
    {"data": 8},
    {"data": 2, "fsdp": 4},
    {"fsdp": 8},
)

#: The relative difference that rounding can make, by the least precise dtype in use.
_RTOL = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 2e-2}


def assert_mesh_invariant(
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[[Any, Any, Any], Any],
    batch: PyTree,
    optim: optax.GradientTransformation,
    *,
    rules: Rule | Sequence[Rule],
    meshes: Sequence[Sizes | Mesh] = MESHES,
    steps: int = 3,
    key: Key[Array, ""] | UInt32[Array, "2"] | None = None,
    rtol: float | None = None,
    trainable: PyTree = True,
    accumulate: int = 1,
    precision: Precision | None = None,
) -> MeshReport:
    """Check that a model trains on every mesh and under every rule as on one device.

    For each mesh and rule, these are compared with one device:

    - the new state, bit for bit;
    - each step, from the state that one device had before it, so that a difference arose
        in that step: loss, gradients, parameters, optimizer state, and everything else.
        Replicas on different devices must be equal bit for bit;
    - the losses of all steps in a row.

    The steps are those of [`eqxshard.make_train_step`][]; a transformation in front of
    `optim` records the gradients that it is given.

    The relative difference of two arrays is `max |a - b| / max |b|`, where `b` is one
    device's. Some gradients are zero but for rounding, such as that of the bias of
    attention's keys: where `max |b|` is less than a tenth of the model's largest, that
    tenth is used instead. Optimizers such as Adam turn the rounding of a tiny gradient
    into a whole step, so each element of a parameter, and of the optimizer's state for
    it, may differ by as much as its gradient explains.

    **Arguments:**

    - `make_model`: as for [`eqxshard.init_state`][].
    - `loss_fn`: as for [`eqxshard.make_train_step`][].
    - `batch`: a batch for every step, or a list of batches, taken in turn. Its size must
        divide over every mesh.
    - `optim`: an optax optimizer.
    - `rules`: a rule, or several in a sequence. Use rules that split a model
        of this size, such as `fsdp(min_size=1)`; the report says how many arrays are
        split.
    - `meshes`: sizes for [`eqxshard.make_mesh`][], such as `[{"data": 2, "fsdp": 4}]`, of
        which each takes the first devices; or meshes. The default is five meshes of 2, 4
        and 8 devices along `data` and `fsdp`. The one device to compare with is a mesh
        with the axes of the first of these, which matters to models that are written for
        Explicit axes.
    - `steps`: the number of steps.
    - `key`: the random key of the model and the run, `jax.random.key(0)` by default.
    - `rtol`: the relative difference to accept as rounding. The default depends on the
        least precise dtype of the model and of `precision`: 1e-10 for float64, 2e-5 for
        float32, 1e-2 for float16, 2e-2 for bfloat16.
    - `trainable`, `accumulate`, `precision`: as for [`eqxshard.make_train_step`][].

    **Returns:**

    An [`eqxshard.testing.MeshReport`][], which prints as a table.

    **Raises:**

    `AssertionError` with the first step and array that differ, by how much, on which mesh
    and under which rule, and where to look; `ValueError` if there are too few devices, or
    nothing to compare; `TypeError` if `meshes` is not a sequence.

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
    if isinstance(meshes, Mapping):
        raise UsageTypeError(f"meshes={meshes!r} is one mesh; write [{meshes!r}].")
    rules = rules if isinstance(rules, Sequence) else [rules]
    key = jax.random.key(0) if key is None else key
    given = batch if isinstance(batch, list) else [batch]
    if steps < 1 or not (given and meshes and rules):
        raise UsageError(
            f"{steps} steps on {len(given)} batches, {len(meshes)} meshes and "
            f"{len(rules)} rules leave nothing to compare; use at least 1 of each."
        )
    made = [each if isinstance(each, Mesh) else _make_mesh(each) for each in meshes]
    batches = [given[index % len(given)] for index in range(steps)]
    recorded = optax.chain(_record_gradients(), optim)

    def set_up(mesh: Mesh, rule: Rule) -> tuple[TrainStep, TrainState]:
        options: Any = dict(mesh=mesh, rule=rule, trainable=trainable, precision=precision)
        state = init_state(make_model, recorded, key=key, **options)
        return make_train_step(loss_fn, recorded, accumulate=accumulate, **options), state

    first = made[0]
    alone = np.array(jax.devices()[:1]).reshape((1,) * first.devices.ndim)
    one_device = Mesh(alone, first.axis_names, axis_types=first.axis_types)
    expected, starts = _train_on_one_device(*set_up(one_device, replicate()), batches)
    rtol = _default_rtol(starts[0], precision) if rtol is None else rtol
    rows = []
    for mesh, rule in itertools.product(made, rules):
        mesh_name, name = format_mesh(used_axes(mesh.shape)), rule_name(rule)
        with _locate_errors(f"on the mesh {mesh_name} under {name}"):
            found = _check_mesh(*set_up(mesh, rule), batches, expected, starts, rtol)
        rows.append(MeshComparison(mesh=mesh_name, rule=name, devices=mesh.size, **found))
    return MeshReport(tuple(rows), steps, rtol)


def _make_mesh(sizes: Sizes) -> Mesh:
    """A mesh of the first devices."""
    needed, present = math.prod(sizes.values()), jax.device_count()
    if not 0 < needed <= present:
        raise UsageError(
            f"the mesh {format_mesh(sizes)} needs {count_devices(needed)}, and there are "
            f"{present}; simulate them with jax.config.update('jax_num_cpu_devices', "
            f"{needed}) before anything else uses JAX, such as at the top of "
            "conftest.py, or use meshes of fewer devices."
        )
    axes: Any = {"data": 1, **sizes}
    return make_mesh(**axes, devices=jax.devices()[:needed])


def _train_on_one_device(
    step: TrainStep, state: TrainState, batches: Sequence[PyTree]
) -> tuple[list[Result], list[Arrays]]:
    """The result of each step, and the state before it."""
    initial = to_host(state)
    results = _run(step, state, batches, [None] * len(batches))
    for number, result in enumerate(results, 1):
        if not math.isfinite(result.loss):
            raise AssertionError(
                f"step {number}: the loss is {result.loss} on one device already; use "
                "another batch, or a smaller learning rate."
            )
    return results, [initial, *(result.arrays for result in results[:-1])]


def _check_mesh(
    step: TrainStep,
    state: TrainState,
    batches: Sequence[PyTree],
    expected: Sequence[Result],
    starts: Sequence[Arrays],
    rtol: float,
) -> dict[str, Any]:
    """Compare training on a mesh with one device; return fields of a `MeshComparison`."""
    check_initial(to_host(state), starts[0])
    arrays = [leaf for _, leaf in array_leaves(state.model)]
    split = sum(not leaf.sharding.is_fully_replicated for leaf in arrays)
    count = len(batches)
    # Each step from the reference's state before it, and then all in a row.
    in_a_row = [starts[0], *[None] * (count - 1)]
    results = _run(step, state, [*batches, *batches], [*starts, *in_a_row])
    alone = [*map(compare_results, results[:count], expected, starts)]
    for number, (result, found) in enumerate(zip(results, alone), 1):
        check_replicas(number, result.diverged)
        check_step(number, found, rtol)
    in_a_row = [*map(compare_results, results[count:], expected, starts)]
    check_losses(in_a_row, rtol)
    return {
        "split": split,
        "arrays": len(arrays),
        "loss": _largest("loss", in_a_row),
        "gradients": _largest("gradients", alone),
        "parameters": _largest("model", in_a_row[-1:]),
    }


def _record_gradients() -> optax.GradientTransformation:
    """A transformation that changes nothing, and keeps the last gradients as its state."""

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
    """Take steps, each from its own start, or from the last state if that is `None`."""
    results = []
    for batch, start in zip(batches, starts, strict=True):
        state, metrics = step(state if start is None else with_arrays(state, start), batch)
        host = jax.device_get(metrics)
        loss = float(host.totals["loss"] / host.weight)
        arrays, diverged = to_host(state), diverged_replicas(state)
        results.append(Result(loss, int(host.nonfinite), arrays, diverged))
    return results


@contextlib.contextmanager
def _locate_errors(where: str) -> Iterator[None]:
    """Add the mesh and the rule to every error."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{where}, {error}") from None
    except Exception as error:
        error.add_note(f"This happened {where}.")
        raise


def _largest(kind: str, found: Sequence[Sequence[Difference]]) -> float:
    items = (item for in_step in found for item in in_step if kind_of(item.name) == kind)
    return max((item.relative for item in items), default=0.0)


def _default_rtol(initial: Arrays, precision: Precision | None) -> float:
    dtypes = [array.dtype for name, array in initial.items() if kind_of(name) == "model"]
    if precision is not None and precision.compute is not None:
        dtypes.append(jnp.dtype(precision.compute))
    floats = [jnp.finfo(x).dtype for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
    return max((_RTOL.get(str(x), 2e-2) for x in floats), default=_RTOL["float32"])
