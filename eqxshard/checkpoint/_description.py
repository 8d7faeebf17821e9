"""The readable description of a checkpoint: written, checked and read here."""

import dataclasses
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding
from jaxtyping import Array

from ..sharding._files import parse_json
from ._arrays import abstract_array, array_metadata

#: The file in a checkpoint's folder.
FILE = "description.json"

_PACKAGES = ("jax", "equinox", "optax", "orbax-checkpoint")


@dataclass(frozen=True)
class Description:
    """The description that is saved with a checkpoint.

    - `step`: the number of steps taken.
    - `metrics`: the metrics of this state, finite values only.
    - `loader`: the loader's position, as [`eqxshard.Loader.state`][] returns it, if there
        was a loader that has one.
    - `mesh`: the sizes of the mesh's axes.
    - `versions`: of Python and of the packages in use.
    - `leaves`: for each array, by path, its shape, dtype and spec.
    - `callbacks`: the states of the run's callbacks, by name.
    """

    step: int
    metrics: Mapping[str, float]
    loader: Mapping[str, Any] | None
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    leaves: Mapping[str, Mapping[str, Any]]
    callbacks: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        step: int,
        leaves: Mapping[str, Array],
        loader: Any,
        metrics: Mapping[str, float],
        callbacks: Mapping[str, Any],
    ) -> "Description":
        """Describe the state of a step, given its arrays by path."""
        position = None
        if hasattr(loader, "state"):
            # The step's position, whatever else the loader was used for.
            position = {**loader.state(), "step": step}
        return Description(
            step=step,
            # JSON has no infinity and no nan.
            metrics={k: float(v) for k, v in metrics.items() if math.isfinite(v)},
            loader=position,
            mesh=_mesh_sizes(leaves),
            versions=_versions(),
            leaves={path: array_metadata(leaf) for path, leaf in leaves.items()},
            callbacks=callbacks,
        )

    @staticmethod
    def from_json(text: str | bytes) -> "Description":
        """Read a description; raise `ValueError` if it is not one."""
        try:
            values = parse_json(text)
        except UnicodeDecodeError:
            raise ValueError(f"{FILE} is not text") from None
        except ValueError as error:
            raise ValueError(f"{FILE} is not JSON ({error})") from None
        try:
            found = Description(**values)
            dicts = (found.metrics, found.loader or {}, found.mesh, found.leaves)
            if not all(isinstance(x, dict) for x in (*dicts, found.callbacks)):
                raise TypeError("a part of it is not a dict")
            for leaf in found.leaves.values():
                abstract_array(leaf)
            for value in (found.step, *found.metrics.values(), *found.mesh.values()):
                math.isfinite(value)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{FILE} was not written by eqxshard ({error})") from None
        return found

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def _mesh_sizes(leaves: Mapping[str, Array]) -> dict[str, int]:
    for leaf in leaves.values():
        if isinstance(leaf.sharding, NamedSharding):
            return dict(leaf.sharding.mesh.shape)
    return {}


def _versions() -> dict[str, str]:
    # Not by an import, as this module is a part of it.
    version = sys.modules["eqxshard"].__version__
    ours = {"python": platform.python_version(), "eqxshard": version}
    return ours | {name: importlib.metadata.version(name) for name in _PACKAGES}
