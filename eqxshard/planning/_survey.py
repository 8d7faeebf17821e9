"""What is known of a step before it is compiled: its state, and what makes it the same.

It runs in the process that compiles, once for all candidates of a search, because making
a model needs JAX.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..sharding._combinators import HOST_MEMORY
from ..sharding._leaf_rules import replicate
from ..sharding._leaves import is_array
from ..sharding._mesh import batch_sharding, check_batch_size, make_mesh
from ..sharding._placement import named_leaves
from ..sharding._rule import check_rule
from ..sharding._spec import axes_of
from ..training._init import abstract_state
from ..training._layout import StateLayout, make_layout
from ..training._state import TrainState, split_model
from ..training._train_step import make_train_step
from ._compile import answer, count_examples, find_devices
from ._request import Request, Survey

#: Parts of the paths of files that nobody edits: Python's own, and installed libraries.
_INSTALLED = (str(Path(os.__file__).parent), "site-packages", "dist-packages")


class Surveyed(NamedTuple):
    """What is known of a step before it is compiled.

    - `fingerprint`: the same for what compiles to the same, in any process.
    - `state`: the bytes of one device's parameters and optimizer state.
    - `others`: of its rows of the batch, and at least of its gradients.
    - `problem`: why it cannot be compiled; empty if it can.
    """

    fingerprint: str = ""
    state: int = 0
    others: int = 0
    problem: str = ""

    @property
    def least(self) -> int:
        """The least memory that the step needs."""
        return self.state + self.others


def main() -> None:
    """Survey the requests in the folder that the command names."""
    answer(lambda survey, _: survey_all(survey))


def survey_all(survey: Survey) -> list[Surveyed]:
    """Look at every request of a survey."""
    devices = find_devices(survey.requests[0])
    models: dict[tuple[Any, ...], _Model | str] = {}
    for request in survey.requests:
        key = _step_key(request)
        if key not in models:
            try:
                models[key] = _Model.of(request, make_mesh(devices=devices[:1]))
            except Exception as error:
                models[key] = _first_line(error)
    # After everything is imported that making models imports.
    code = _hash([*_sources()])
    found = []
    for request in survey.requests:
        model = models[_step_key(request)]
        if isinstance(model, str):
            found.append(Surveyed(problem=model))
            continue
        try:
            sizes: dict[str, Any] = dict(request.mesh_shape)
            mesh = make_mesh(**sizes, devices=devices)
            found.append(_survey(request, model, mesh, code))
        except Exception as error:
            found.append(Surveyed(problem=_first_line(error)))
    return found


def _step_key(request: Request) -> tuple[Any, ...]:
    """The same for requests that differ only in their mesh and rule."""
    parts = (request.make_model, request.loss_fn, request.optim, request.batch)
    parts += (request.trainable, request.precision)
    return *map(id, parts), repr(request.options)


class _Model(NamedTuple):
    """A model's state without a mesh, and the text of its step on one device."""

    state: TrainState
    params: Any
    text: str

    @staticmethod
    def of(request: Request, mesh: Mesh) -> "_Model":
        state = abstract_state(
            request.make_model,
            request.optim,
            key=jax.random.key(0),
            mesh=mesh,
            rule=replicate(),
            trainable=request.trainable,
            precision=request.precision,
        )
        made = state.made_with
        assert made is not None  # By `abstract_state`.
        params, _ = split_model(state.model, made.trainable(state.model))
        step = make_train_step(request.loss_fn, request.optim, **request.options)
        lowered = step.lower(state, request.batch)
        # What reads the mesh may differ on another one, by values that are not in it.
        values = [repr(jax.tree.structure(state.model)), describe(request.loss_fn)]
        return _Model(state, params, _hash([lowered.as_text(), *map(_plain, values)]))


def _survey(request: Request, model: _Model, mesh: Mesh, code: str) -> Surveyed:
    state, params, text = model
    rows, _ = count_examples(request.batch)
    check_batch_size(rows, mesh, accumulate=request.options["accumulate"])
    check_rule(request.rule, dict(named_leaves(state.model)), mesh)
    layout = make_layout(state.model, params, state.opt_state, mesh, request.rule)
    arrays = [leaf for leaf in jax.tree.leaves(state) if is_array(leaf)]
    split_rows = batch_sharding(mesh)
    batch = [(x, split_rows) for x in jax.tree.leaves(request.batch)]
    return Surveyed(
        _hash([code, text, *compiler_settings(request), *_specs(layout, state)]),
        _bytes(zip(arrays, layout.flat(state), strict=True)),
        _bytes(batch) + _least_gradients(request, params, layout),
    )


def _bytes(arrays: Iterable[tuple[Any, Any]]) -> int:
    return sum(
        leaf.dtype.itemsize * math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in arrays
        if sharding.memory_kind != HOST_MEMORY
    )


def _least_gradients(request: Request, params: Any, layout: StateLayout) -> int:
    """All gradients at once, in the type of computation if that is the smaller one."""
    if request.options["nonfinite"] == "ignore":
        return 0  # Each may be gone before the next is made.
    precision = request.precision
    widest = 16
    if precision is not None and precision.compute is not None:
        widest = jnp.dtype(precision.compute).itemsize
    return sum(
        min(leaf.dtype.itemsize, widest) * math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(
            jax.tree.leaves(params), jax.tree.leaves(layout.update), strict=True
        )
    )


def _specs(layout: StateLayout, state: TrainState) -> list[str]:
    """How each array is split, and where it is kept."""
    found = []
    for sharding in [*layout.flat(state), *jax.tree.leaves(layout.update)]:
        sizes = sharding.mesh.shape
        axes = [[axis for axis in axes_of(x) if sizes[axis] > 1] for x in sharding.spec]
        while axes and not axes[-1]:
            axes.pop()
        found.append(f"{axes} {sharding.memory_kind}")
    return found


def compiler_settings(request: Request) -> list[str]:
    """What the compiler is told, other than the step."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    # Of several, Python imports the first. The compiler for GPUs has JAX's version.
    libtpu = [x.version for x in importlib.metadata.distributions(name="libtpu")][:1]
    return [
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        repr(dict(request.mesh_shape)),
        repr(dataclasses.asdict(request.target)),
        request.backend,
        *(libtpu if request.backend == "tpu" else []),
        *[flag for flag in flags if not flag.startswith("--xla_dump")],
        os.environ.get("LIBTPU_INIT_ARGS", ""),
    ]


def _sources() -> list[str]:
    """The code of this library, and of all that is not in an installed one."""
    files = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        ours = name.partition(".")[0] == "eqxshard"
        if (
            file
            and file.endswith(".py")
            and (ours or not any(part in file for part in _INSTALLED))
        ):
            files[name] = file
    return [Path(files[name]).read_text() for name in sorted(files)]


def describe(item: Any, depth: int = 8) -> str:
    """A function with the values that it holds, as text."""
    if isinstance(item, functools.partial):
        parts = [item.func, *item.args, *item.keywords.values()]
        return f"partial({[describe(part, depth - 1) for part in parts]})"
    closure = getattr(item, "__closure__", None)
    if closure is None or not depth:
        return _plain(repr(item))
    parts = [cell.cell_contents for cell in closure]
    return f"{item.__qualname__}({[describe(part, depth - 1) for part in parts]})"


def _plain(text: str) -> str:
    """Without addresses, which differ in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    message = str(error).strip().split("\n")[0]
    ours = isinstance(error, ValueError | TypeError)
    return message if ours and message else f"{type(error).__name__}: {message}"
