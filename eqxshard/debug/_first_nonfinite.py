"""`first_nonfinite`: the operation of a step that makes the first NaN or infinity."""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, PyTree

from .._errors import UsageTypeError
from ..distributed import fetch_whole
from ..sharding._batch_weights import LOSS_WEIGHT, WEIGHT
from ..sharding._leaves import array_leaves, is_inexact
from ..sharding._placement import filter_shard
from ..sharding._rows import name_rows
from ..sharding._text import first_few
from ..training._donation import check_state_not_donated
from ..training._examples import example_loss_weights, has_entry
from ..training._inputs import (
    NOTHING,
    ONE_BATCH,
    Signature,
    check_devices,
    check_same,
    placed,
)
from ..training._jit import call_jitted, jit_on
from ..training._optimizer import apply_update
from ..training._state import (
    StateLayout,
    TrainState,
    fetch_offloaded,
    flatten_state,
    make_layout,
    split_model,
    unflatten_state,
)
from ..training._train_step import TrainStep
from ..training._update import StepConfig, compute_gradients
from ..transforms._partition import Static
from ._values import NAN, Origin, Recorder, earliest

#: The name of the examples' losses in a jaxpr.
_LOSSES = "eqxshard_losses"


@dataclass(frozen=True)
class FirstNonfinite:
    """The first value that is not finite, found by [`eqxshard.first_nonfinite`][].

    It prints as a sentence.

    - `part`: the first of these that is not finite: `"loss"`, `"gradient"` or `"update"`.
    - `value`: `"NaN"` or `"infinity"`.
    - `operation`: JAX's name of the operation, such as `log`; `None` for an input.
    - `line`: the line of your code, with its function; `None` if it is a library's.
    - `given`: the input that was not finite from the start: `batch entry x`, or `the
        parameter layers.0.weight`; `None` if an operation made the value.
    - `rows`: the rows of the batch with the value; `None` if they are not known.
    - `rounds`: the rounds of the loops around the operation, counted from 0, the outermost
        loop first: the microbatch, or the layer in [`eqxshard.scan_layers`][].
    - `arrays`: the paths of the arrays whose gradients or updates are not finite.
    """

    part: Literal["loss", "gradient", "update"]
    value: Literal["NaN", "infinity"]
    operation: str | None
    line: str | None
    given: str | None
    rows: tuple[int, ...] | None
    rounds: tuple[int, ...]
    arrays: tuple[str, ...]

    def describe(self, examples: Sequence[int] | np.ndarray | None = None) -> str:
        """The result as a sentence.

        **Arguments:**

        - `examples`: the index in the source of each row's example, such as
            `loader.rows(3)`, which the sentence then names, too.
        """
        if self.given is not None:
            where = f"{self.given} contains {self.value}"
        else:
            where = f"the first {self.value} appears in {self.operation}"
            where += f", {self.line}" if self.line else ", in a library"
        if len(self.rounds) == 1:
            where += f", in round {self.rounds[0]} (counted from 0) of the loop around it"
        elif self.rounds:
            numbers = ", ".join(map(str, self.rounds))
            where += f", in rounds {numbers} (counted from 0) of the loops around it"
        rows = None if self.rows is None else name_rows(self.rows, examples)
        if self.part == "loss":
            return f"{where}; the loss is not finite{f' in {rows}' if rows else ''}."
        if rows is not None:
            where += f", in {rows}"
        what = "gradient" if self.part == "gradient" else "new value"
        before = "loss is" if self.part == "gradient" else "loss and its gradients are"
        return (
            f"{where}; the {before} finite, and the {what} of "
            f"{first_few(self.arrays)} is not."
        )

    def __str__(self) -> str:
        return self.describe()


def first_nonfinite(
    train_step: TrainStep, state: TrainState, batch: PyTree, extra: PyTree = None
) -> FirstNonfinite | None:
    """Find the operation that makes the loss, a gradient or an update NaN or infinite.

    The step is taken once more with these arguments, in a program that also records, after
    each operation, which of its values are NaN or infinite. From the loss, the gradients
    and the new values of the state, these are followed back to where they began: a line of
    your code, an entry of the batch, or a parameter. Values that do not reach the results
    are not the cause, such as the -inf of a mask, or a logarithm of 0 that `jnp.where`
    leaves out and whose gradient is finite. Rows of weight 0 are ignored.

    Compiling that program takes a few times as long as compiling the step. Nothing is
    donated or changed. [`eqxshard.fit`][] calls this before it gives up.

    **Arguments:**

    - `train_step`: from [`eqxshard.make_train_step`][].
    - `state`: the state before the step. (A skipped step changes only the number of
        steps.)
    - `batch`, `extra`: as for the step.

    **Returns:**

    An `eqxshard.debug.FirstNonfinite`, which prints as a sentence; `None` if the loss, the
    gradients and the update are finite.

    **Raises:**

    `TypeError` if the step is not from `make_train_step`; and whatever the step raises for
    these arguments.

    !!! Example

        ```python
        print(eqxshard.first_nonfinite(train_step, state, batch))
        ```
    """
    if not isinstance(train_step, TrainStep):
        raise UsageTypeError(
            "first_nonfinite needs a step from make_train_step; if your own step calls "
            "such a step, give that one."
        )
    arrays, static = flatten_state(state)
    check_state_not_donated(arrays)
    kept, signature = ([], NOTHING) if extra is None else Signature.of(extra, "extra")
    config = train_step.config.following(state)
    mesh, rule = config.mesh, config.rule
    assert mesh is not None and rule is not None
    params, _ = split_model(state.model, config.trainable)
    layout = make_layout(state.model, params, state.opt_state, mesh, rule)
    shardings = layout.flat(state)
    check_devices(kept, mesh, "extra")
    batch_sharding = ONE_BATCH.sharding(mesh)
    check_same(batch, mesh)
    batch = placed(ONE_BATCH, batch, mesh, batch_sharding, config.accumulate)
    ignored = fetch_whole(example_loss_weights(batch)) == 0
    look = _Look(config, layout, static, signature)
    whole = NamedSharding(mesh, PartitionSpec())
    program = jit_on(
        mesh,
        look,
        "first_nonfinite",
        in_shardings=([*shardings], None, batch_sharding, None),
        out_shardings=whole,
    )
    inputs = filter_shard(arrays, [*shardings]), kept, batch
    names = [*_names(state, extra, batch)]

    def run(ignored: np.ndarray) -> FirstNonfinite | None:
        records = fetch_whole(call_jitted(program, *inputs, ignored))
        return look.find(records, names, ignored)

    found = run(ignored)
    if found is None and ignored.any():
        # An infinite slope at a row of weight 0 makes the gradient NaN.
        return run(np.zeros_like(ignored))
    if found is not None and found.part != "loss" and found.rows is not None:
        # If a step without these rows still fails, they belong to an array whose first dim
        # happens to equal the batch size.
        others = ignored.copy()
        others[[*found.rows]] = True
        if others.all() or run(others) is not None:
            return dataclasses.replace(found, rows=None)
    return found


class _Results(NamedTuple):
    """The loss, the gradients and the new values of a step, and their paths."""

    values: list[Any]
    paths: list[tuple[Literal["loss", "gradient", "update"], str]]


class _Look:
    """The program that looks at the values of a step: a pure function."""

    def __init__(
        self, config: StepConfig, layout: StateLayout, static: Static, signature: Signature
    ):
        named = dataclasses.replace(config, loss_fn=_with_named_losses(config.loss_fn))
        self._step = ft.partial(_take_step, named, layout, static, signature)
        self._accumulate = config.accumulate

    def __call__(
        self, arrays: list[Any], kept: list[Any], batch: PyTree, ignored: Bool[Array, " n"]
    ) -> Array:
        """The records of the step's values."""
        recorder = Recorder(ignored.size, self._accumulate, _LOSSES)
        arguments = arrays, kept, batch, ignored
        paths: list[Any] = []

        def step(*arguments: Any) -> list[Any]:
            results = self._step(*arguments)
            paths[:] = results.paths
            return results.values

        jaxpr = jax.make_jaxpr(step)(*arguments)
        leaves = jax.tree.leaves(arguments)
        self._inputs = [*map(recorder.record, leaves)]
        _, self._outputs = recorder.evaluate(jaxpr, leaves, self._inputs)
        self._paths, self._recorder = paths, recorder
        return recorder.records()

    def find(
        self, records: np.ndarray, names: Sequence[str], ignored: np.ndarray
    ) -> FirstNonfinite | None:
        """Find the first value that is not finite, from records on the host.

        **Arguments:**

        - `records`: the result of a call.
        - `names`: the names of the inputs.
        - `ignored`: the rows of the batch that were left out.
        """
        recorder, order = self._recorder, itertools.count()
        origins: dict[int, Origin] = {}
        given = [(n, name) for n, name in zip(self._inputs, names) if n is not None]
        for number, name in given:
            kinds = recorder.kinds(records, number)
            if kinds.any():
                rows = None
                if name.startswith("batch entry "):
                    rows = tuple(map(int, np.flatnonzero(kinds)))
                kind = int(kinds.max())
                origins[number] = Origin(next(order), kind, True, name, rows=rows)
        from_start = {origin.order for origin in origins.values()}
        recorder.follow(records, origins, order)
        bad = [
            (part, path, origins[number])
            for number, (part, path) in zip(self._outputs, self._paths)
            if number in origins
        ]
        if not bad:
            return None
        part = bad[0][0]
        origin = earliest([origin for each, _, origin in bad if each == part])
        is_input = origin.order in from_start
        rows = origin.rows
        if rows is not None and self._accumulate > 1 and origin.rounds:
            # A microbatch has every `accumulate`-th row of the batch.
            rows = tuple(row * self._accumulate + origin.rounds[0] for row in rows)
            rows = tuple(row for row in rows if row < ignored.size)
        if part == "loss":
            rows = self._rows_of_losses(records) or rows
        if is_input and origin.rows is not None:
            rows = origin.rows
        if rows is not None:
            rows = tuple(row for row in rows if not ignored[row]) or None
        line = origin.frame and (
            f"{origin.frame.file}:{origin.frame.line} ({origin.frame.function})"
        )
        return FirstNonfinite(
            part=part,
            value="NaN" if origin.kind == NAN else "infinity",
            operation=None if is_input else origin.name,
            line=line,
            given=origin.name if is_input else None,
            rows=rows,
            rounds=origin.rounds,
            arrays=tuple(path for each, path, _ in bad if each == part and path),
        )

    def _rows_of_losses(self, records: np.ndarray) -> tuple[int, ...] | None:
        """The rows of a batch whose losses are not finite; `None` for a scalar loss."""
        parts = self._recorder.losses_by_round(records)
        if not parts or parts[0].size == 1:
            return None
        return tuple(map(int, np.flatnonzero(np.stack(parts, axis=1))))


def _take_step(
    config: StepConfig,
    layout: StateLayout,
    static: Static,
    signature: Signature,
    arrays: list[Any],
    kept: list[Any],
    batch: PyTree,
    ignored: Bool[Array, " n"],
) -> _Results:
    """Take a step as `train_step` does, but never skip it."""
    state = unflatten_state(arrays, static)
    batch = _without_rows(batch, ignored)
    extra = signature.static.combine(kept), signature.storage()
    gradients = compute_gradients(config, layout, state, batch, *extra)
    params, _ = split_model(state.model, config.trainable)
    before = filter_shard(params, layout.update), fetch_offloaded(state.opt_state, layout)
    new = apply_update(config.optim, gradients.grads, gradients.loss, *before, layout)
    written = _written(
        _named(*new, gradients.model_state), _named(*before, state.model_state)
    )
    grads, updates = array_leaves(gradients.grads), array_leaves(written)
    return _Results(
        [gradients.loss, *(x for _, x in grads), *(x for _, x in updates)],
        [
            ("loss", ""),
            *(("gradient", path) for path, _ in grads),
            *(("update", path) for path, _ in updates),
        ],
    )


def _named(params: PyTree, opt_state: PyTree, model_state: PyTree) -> dict[str, PyTree]:
    return {"model": params, "opt_state": opt_state, "model_state": model_state}


def _written(new: PyTree, old: PyTree) -> PyTree:
    """The new values, but for those that were not finite before, such as a best loss."""

    def one(new: Any, old: Any) -> Any:
        if not is_inexact(new):
            return new
        return jnp.where(jnp.isfinite(old), new, jnp.zeros((), new.dtype))

    return jax.tree.map(one, new, old)


def _without_rows(batch: PyTree, ignored: Bool[Array, " n"]) -> PyTree:
    """A batch in which the first row that counts replaces each ignored row."""
    first = jnp.argmin(ignored)

    def one(leaf: Array) -> Array:
        rows = jnp.expand_dims(ignored, range(1, leaf.ndim))
        return jnp.where(rows, leaf[first][None], leaf)

    weights = {
        name: batch[name] for name in (WEIGHT, LOSS_WEIGHT) if has_entry(batch, name)
    }
    batch = jax.tree.map(one, batch)
    return {**batch, **weights} if weights else batch


def _with_named_losses(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function whose losses have a name in the jaxpr."""

    @ft.wraps(loss_fn)
    def named(*args: Any) -> Any:
        out = loss_fn(*args)
        losses, *others = out if isinstance(out, tuple) else [out]
        losses = checkpoint_name(losses, _LOSSES)
        return (losses, *others) if isinstance(out, tuple) else losses

    return named


def _names(state: TrainState, extra: PyTree, batch: PyTree) -> Iterator[str]:
    """The names of the step's inputs in a sentence."""
    for path, _ in array_leaves(state):
        is_model = path.startswith("model.")
        yield f"the parameter {path[6:]}" if is_model else f"the state's {path}"
    yield from (path for path, _ in array_leaves(extra, "extra"))
    yield from (f"batch entry {path}" for path, _ in array_leaves(batch))
