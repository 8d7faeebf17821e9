"""The readable description of a checkpoint: made, checked, and compared with a model."""

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from .._errors import UsageError, UsageTypeError
from ..sharding._files import parse_json
from ..sharding._leaves import format_array, is_key
from ..sharding._text import first_few

#: The file in a checkpoint's folder.
FILE = "description.json"
#: The format of checkpoints. Before there were numbers, there was 1.
_FORMAT = 2


class FormatError(UsageError):
    """A checkpoint of a later version, in a format that is not known here."""


def describe(
    step: int,
    leaves: Mapping[str, Any],
    loader: Any,
    metrics: Mapping[str, float],
    callbacks: Mapping[str, Any],
    renamed: Sequence[Mapping[str, str | None]] = (),
) -> dict[str, Any]:
    """Describe the state of a step, as JSON values.

    - `format`, `version`: of the checkpoint, and of eqxshard, which wrote it.
    - `step`: the number of steps taken.
    - `metrics`: the metrics of this state, finite values only.
    - `loader`: the loader's position, as [`eqxshard.Loader.state`][] returns it, if there
        was a loader that has one.
    - `mesh`: the sizes of the mesh's axes.
    - `leaves`: for each array, by path, its shape, dtype and spec.
    - `callbacks`: the states of the run's callbacks, by name.
    - `renamed`: what restores have renamed since the run began, each in a dict.
    """
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise UsageTypeError(
                f"{path} is a {type(leaf).__name__}, not an array on devices; place what "
                "is saved with filter_shard."
            )
    placed = [leaf.sharding for leaf in leaves.values()]
    meshes = [each.mesh.shape for each in placed if isinstance(each, NamedSharding)]
    return {
        "format": _FORMAT,
        "version": _version(),
        "step": step,
        # JSON has no infinity and no nan.
        "metrics": {k: float(v) for k, v in metrics.items() if math.isfinite(v)},
        "loader": dict(loader.state()) if hasattr(loader, "state") else None,
        "mesh": dict(meshes[0]) if meshes else {},
        "leaves": {path: array_metadata(leaf) for path, leaf in leaves.items()},
        "callbacks": dict(callbacks),
        "renamed": list(renamed),
    }


def parse_description(text: str | bytes) -> dict[str, Any]:
    """Read a description; raise `ValueError` if it is not one, or of a later format."""
    try:
        found = parse_json(text)
        if (number := found.get("format", 1)) > _FORMAT:
            raise FormatError(
                f"it was written by eqxshard {found['version']}, in format {number}, and "
                f"this is eqxshard {_version()}, which reads formats up to {_FORMAT}; "
                "update eqxshard, or use another folder."
            )
        for leaf in found["leaves"].values():
            abstract_array(leaf)
        for value in (found["step"], *found["metrics"].values(), *found["mesh"].values()):
            math.isfinite(value)
        # Those of earlier versions renamed nothing.
        renamed = found.setdefault("renamed", [])
        for part in (found["loader"] or {}, found["callbacks"], *renamed):
            part.keys()
    except FormatError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{FILE} was not written by eqxshard ({error!r})") from None
    return found


def _version() -> str:
    return sys.modules["eqxshard"].__version__


def array_metadata(leaf: Array) -> dict[str, Any]:
    """The shape, dtype and spec of an array, as JSON values."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    described = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
    }
    return described | ({"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else {})


def abstract_array(described: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `array_metadata` describes."""
    dtype = described["dtype"]
    if "impl" in described:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=described["impl"])).dtype
    elif not any(jnp.issubdtype(jnp.dtype(dtype), kind) for kind in (jnp.number, bool)):
        raise UsageTypeError(f"{dtype!r} is no dtype of an array")
    return jax.ShapeDtypeStruct(tuple(map(operator.index, described["shape"])), dtype)


def check_structure(
    wanted: Mapping[str, Any],
    saved: Mapping[str, Mapping[str, Any]],
    where: str,
    remedy: str = "read a part of it",
) -> None:
    """Raise `ValueError` naming arrays that a checkpoint lacks, or has besides."""
    faults = []
    # In the model's order; the optimizer's state, which repeats its faults, comes later.
    for path in dict.fromkeys((*wanted, *saved)):
        if path not in saved:
            faults.append(f"{path} {format_array(wanted[path])} is missing there")
            continue
        theirs = abstract_array(saved[path])
        if path not in wanted:
            faults.append(f"{path} {format_array(theirs)} is only there")
        elif fault := describe_difference(path, theirs, wanted[path], "there"):
            faults.append(fault)
    if faults:
        raise UsageError(
            f"{where} does not fit this model: {first_few(faults, '; ')}; use the model "
            f"(and the optimizer) that it was made with, or {remedy}."
        )


def describe_difference(path: str, saved: Any, leaf: Any, where: str) -> str | None:
    """A phrase if a saved array cannot become a leaf: floating-point types convert."""
    alike = saved.dtype == leaf.dtype or any(
        jnp.issubdtype(saved.dtype, kind) and jnp.issubdtype(leaf.dtype, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )
    if saved.shape == leaf.shape and alike:
        return None
    return f"{path} is {format_array(saved)} {where}, not {format_array(leaf)}"
