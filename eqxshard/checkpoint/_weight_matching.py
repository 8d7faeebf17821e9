"""Which arrays of a file are those of a model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..sharding._leaves import format_array
from ..sharding._text import first_few
from ._arrays import converts
from ._weight_names import Names, Rename, Transform, find_names


@dataclass(frozen=True)
class WeightsReport:
    """How the arrays of a file fit a model: `print` it.

    - `matched`: the name in the file of each array that fits, by its path in the model.
        An array that is read from several has their names joined by commas.
    - `missing`: the same for the arrays that the file lacks.
    - `kept`: the paths for which `rename` returned `None`.
    - `unused`: the dtype and shape of each array of the file that the model does not use,
        by its name.
    - `different`: for each array that has another shape or type in the file, by its path,
        a sentence that says so.
    """

    matched: dict[str, str]
    missing: dict[str, str]
    kept: tuple[str, ...]
    unused: dict[str, str]
    different: dict[str, str]

    def __str__(self) -> str:
        sections = {
            f"{len(self.matched)} in both (the model's path, the file's name)": _rows(
                self.matched
            ),
            f"{len(self.missing)} only in the model": _rows(self.missing),
            f"{len(self.kept)} not to be read": self.kept,
            f"{len(self.unused)} only in the file": _rows(self.unused),
            f"{len(self.different)} that differ": self.different.values(),
        }
        return "\n".join(
            "\n  ".join([f"{title}:", *lines]) for title, lines in sections.items() if lines
        )


def _rows(names: Mapping[str, str]) -> list[str]:
    width = max(map(len, names), default=0)
    return [f"{path:{width}}  {name}" for path, name in names.items()]


def list_faults(report: WeightsReport, *, partial: bool) -> list[str]:
    """What keeps a file from being loaded, most telling first."""
    faults = [*report.different.values()]
    if not partial:
        faults += [
            f"{path} is missing there" + (f" (as {name})" if name != path else "")
            for path, name in report.missing.items()
        ]
        faults += [f"{name} {what} is only there" for name, what in report.unused.items()]
    return faults


@dataclass(frozen=True)
class Source:
    """One array of a model, which is only ever read in parts.

    - `arrays`: those of the file.
    - `names`: those of them that it is made of.
    - `transform`: what makes it of them, layer by layer.
    """

    arrays: Mapping[str, np.ndarray]
    names: Names
    transform: Transform | None

    def layer(self, numbers: tuple[int, ...]) -> np.ndarray:
        """The array without the dims that stars stand for."""
        arrays = [self.arrays[name] for name in self.names.of(numbers)]
        if self.names.is_list and self.transform is None:
            raise ValueError(
                f"{self.names.path} has {len(arrays)} names in the file; write a "
                "transform= that joins the list of arrays."
            )
        value = arrays if self.names.is_list else arrays[0]
        return np.asarray(self.names.apply(self.transform, value))

    def read(self, part: tuple[range, ...], dtype: Any) -> np.ndarray:
        """A range of each dim of the array."""
        out = np.empty([len(dim) for dim in part], dtype)
        stacked = len(self.names.layers)
        rest = tuple(slice(dim.start, dim.stop) for dim in part[stacked:])
        for at in np.ndindex(out.shape[:stacked]):
            numbers = tuple(dim[i] for dim, i in zip(part, at))
            out[(*at, ...)] = self.layer(numbers)[rest]
        return out


def match_weights(
    arrays: Mapping[str, np.ndarray],
    wanted: Mapping[str, Any],
    rename: Rename | None,
    transform: Transform | None,
    ignore: str | Sequence[str],
) -> tuple[WeightsReport, dict[str, Source]]:
    """Find the arrays of a file for each array of a model.

    **Arguments:**

    - `arrays`: the file's arrays by name.
    - `wanted`: the model's arrays by path.
    - `rename`, `transform`, `ignore`: as for [`eqxshard.load_weights`][].

    **Returns:**

    A report, and the source of each array that fits, by its path.
    """
    kept, missing, different = [], {}, {}
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for path, names in find_names(wanted, rename).items():
        if names is None:
            kept.append(path)
            continue
        needed = {name for numbers in names.each() for name in names.of(numbers)}
        used |= needed
        if not needed or not needed <= arrays.keys():
            missing[path] = str(names)
            continue
        source = Source(arrays, names, transform)
        fault = _fault(source, wanted[path])
        if fault is None:
            sources[path] = source
        else:
            there = "there" if str(names) == path else f"there (as {names})"
            different[path] = f"{path} has {fault[0]} {there}, not {fault[1]}"
    matched = {path: str(source.names) for path, source in sources.items()}
    patterns = [ignore] if isinstance(ignore, str) else ignore
    unused = {
        name: format_array(array)
        for name, array in arrays.items()
        if name not in used and not any(re.search(pattern, name) for pattern in patterns)
    }
    return WeightsReport(matched, missing, tuple(kept), unused, different), sources


def _fault(source: Source, leaf: Any) -> tuple[str, str] | None:
    """What differs from the model's array, and what it is there."""
    names, layers = source.names, [*source.names.each()]
    # All layers are made alike, so that one has to be made to know their shape.
    kinds = [[format_array(source.arrays[x]) for x in names.of(at)] for at in layers]
    unlike = [kind for kind in kinds if kind != kinds[0]]
    if unlike:
        return f"layers {first_few(unlike[0])}", f"{first_few(kinds[0])} as in the first"
    layer = source.layer(layers[0])
    shape = [*names.layers, *layer.shape]
    if shape != [*leaf.shape]:
        return f"shape {shape}", str([*leaf.shape])
    if not converts(str(layer.dtype), leaf):
        return f"dtype {layer.dtype}", str(leaf.dtype)
    return None
