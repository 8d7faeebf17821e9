"""Lint of a step: everything that is found before it runs for the first time."""

import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..compiled._findings import Finding, Lint, lint_levels, report
from ..compiled._hlo import parse_module
from ..compiled._lint_text import Argument, TextLint
from ..data._resident import DeviceBatches
from ..sharding._combinators import HOST_MEMORY
from ..sharding._leaves import array_leaves, format_array, is_inexact, leaf_path
from ..sharding._placement import decide_leaves, named_leaves
from ..sharding._rule import Rule, check_rule
from ..sharding._spec import spec_axes
from ._inputs import STACKED_BATCHES, StepInput
from ._jit import Program
from ._lint_jaxpr import lint_jaxpr, scanned_shapes
from ._state import without_state

if TYPE_CHECKING:
    from ._step import Call


class StepLint:
    """What is done about the findings in a step, each of which is reported once.

    **Arguments:**

    - `lint`: a level, or the levels of some kinds.

    **Raises:**

    `ValueError` if a kind or a level does not exist.
    """

    def __init__(self, lint: Lint):
        self._levels = lint_levels(lint)
        self._reported: set[Finding] = set()

    @property
    def is_on(self) -> bool:
        """Whether anything would be done."""
        return {*self._levels.values()} != {"off"}

    def report(self, findings: Iterable[Finding], where: str) -> None:
        """Warn of those that are new, or raise `ValueError`."""
        new = [each for each in findings if each not in self._reported]
        report(new, self._levels, where)
        self._reported.update(new)


def argument(
    path: str, leaf: Any, sharding: NamedSharding | None, donated: bool = False
) -> Argument:
    """An array that a step takes; `path` begins with `model.` if it is the model's."""
    in_host_memory = sharding is not None and sharding.memory_kind == HOST_MEMORY
    return Argument(
        path=path.removeprefix("model."),
        shape=tuple(leaf.shape),
        spec=() if sharding is None else tuple(sharding.spec),
        donated=donated and not in_host_memory,
        in_model=path == "model" or path.startswith("model."),
    )


def lint_model(model: PyTree, mesh: Mesh, rule: Rule) -> Iterator[Finding]:
    """The findings in how a rule splits a model: of kinds `whole` and `unmatched`."""
    leaves = named_leaves(model)
    for (path, leaf), decision in zip(leaves, decide_leaves(leaves, mesh, rule)):
        is_split = any(mesh.shape[axis] > 1 for axis in spec_axes(decision.spec))
        # The split of a vector saves too little to be missed.
        is_vector = sum(size > 1 for size in leaf.shape) < 2
        if decision.undivided and not is_vector and not is_split:
            yield Finding(
                "whole",
                path,
                None,
                f"{path or 'the array'} {format_array(leaf)} is whole on every device, "
                f"though {decision.rule} asked for a split ({decision.note}). Pad one of "
                "its dims to a multiple.",
            )
    try:
        check_rule(rule, dict(leaves), mesh)
    except ValueError as error:
        # `init_state` would have refused this rule, but it made the state with another.
        yield Finding("unmatched", None, None, str(error))


def lint_step(call: "Call", program: Program, batch: PyTree) -> Iterator[Finding]:
    """The findings in a step: in how its rule splits a model, and in its program.

    **Arguments:**

    - `call`: what the step is called with.
    - `program`: what was compiled for it.
    - `batch`: the batch that it was compiled for.
    """
    step, key = call.variant.step, call.key
    if call.state is not None:
        model, leaves, places = call.state.model, array_leaves(call.state), step.shardings
        yield from lint_model(model, step.mesh, step.rule)
    else:
        model, _ = without_state(key.kept.static.combine(call.kept))
        leaves, places = array_leaves(model, "model"), key.kept.shardings
    arguments = [
        argument(path, leaf, sharding, donated=call.state is not None)
        for (path, leaf), sharding in zip(leaves, places)
    ]
    try:
        floats = {
            leaf_path(path): leaf.dtype
            for path, leaf in jax.tree_util.tree_leaves_with_path(model)
            if is_inexact(leaf)
        }
        wide = [path for path, x in floats.items() if x in (jnp.float64, jnp.complex128)]
        compute = None if step.precision is None else step.precision.compute
        yield from lint_jaxpr(program.jaxpr, compute, wide, len(wide) < len(floats))
        text = TextLint(
            parse_module(program.text),
            dict(step.mesh.shape),
            arguments,
            _batch_entries(key.kind, batch),
            scanned_shapes(program.jaxpr),
        )
        yield from dict.fromkeys(text.findings())
    except Exception as error:  # A program of a kind that lint does not know still runs.
        warnings.warn(
            f"lint could not read a step ({type(error).__name__}: {error}); please report "
            "this, and make the step with lint='off' until it is mended.",
            RuntimeWarning,
            stacklevel=2,
        )


def _batch_entries(
    kind: StepInput, batch: PyTree
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The path of each array of a batch and its shape in one step, by JAX's name for it."""
    if isinstance(batch, DeviceBatches):
        size = batch.rows.shape[1]
        examples = {name: (size, *x.shape[1:]) for name, x in batch.examples.items()}
        found = {f"batch.examples[{n!r}]": (f"batch.{n}", s) for n, s in examples.items()}
        return found | {"batch.rows": ("batch", (size,))}
    leading = 1 if kind is STACKED_BATCHES else 0
    return {
        f"batch{jax.tree_util.keystr(path)}": (leaf_path(path, "batch"), x.shape[leading:])
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
    }
