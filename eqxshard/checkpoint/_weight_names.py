"""The names of a model's arrays in a file of weights, and a report of those that fit."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from .._errors import UsageError, UsageTypeError
from ..sharding._leaves import format_array
from ..sharding._text import first_few
from ._match import describe_difference

Rename = Callable[[str], str | Sequence[str] | None] | Mapping[str, str | None]
Transform = Callable[[str, Any], Any]


class Names(NamedTuple):
    """The names in a file of one array of a model.

    - `path`: the path of the array in the model.
    - `names`: the names, with a `*` for the numbers along each of the array's first dims.
    - `is_list`: whether `rename` returned a list: `transform` joins or splits arrays.
    - `depth`: the number of dims that the stars stand for.
    - `layers`: the names with numbers for the stars, by these numbers.
    - `transform`: as for [`eqxshard.load_weights`][].
    """

    path: str
    names: tuple[str, ...]
    is_list: bool
    depth: int
    layers: Mapping[tuple[int, ...], Sequence[str]]
    transform: Transform | None

    def __str__(self) -> str:
        return first_few(self.names)

    def apply(self, value: Any) -> Any:
        """Transform an array, or the arrays of a list of names."""
        return value if self.transform is None else self.transform(self.path, value)

    def read(self, arrays: Mapping[str, np.ndarray], layer: Sequence[str]) -> np.ndarray:
        """One layer of the array, made of arrays of a file."""
        found = [arrays[name] for name in layer]
        return np.asarray(self.apply(found if self.is_list else found[0]))


def find_names(
    leaves: Mapping[str, Any], rename: Rename | None, transform: Transform | None
) -> dict[str, Names]:
    """The names of each array of a model that `rename` does not leave out, by its path.

    **Arguments:**

    - `leaves`: the arrays by path.
    - `rename`, `transform`: as for [`eqxshard.load_weights`][].

    **Raises:**

    `TypeError` or `ValueError` if `rename` is wrong.
    """
    if isinstance(rename, Mapping):
        found: Mapping[str, Any] = _substitute([*leaves], rename)
    else:
        found = {path: path if rename is None else rename(path) for path in leaves}
    return {
        path: _parse(path, names, leaves[path].shape, transform)
        for path, names in found.items()
        if names is not None
    }


def _parse(
    path: str, found: Any, shape: tuple[int, ...], transform: Transform | None
) -> Names:
    is_list = isinstance(found, list | tuple)
    names = tuple(found) if is_list else (found,)
    if not all(isinstance(name, str) for name in names):
        raise UsageTypeError(
            f"rename({path!r}) returned {found!r}; return the name in the file, a list of "
            "names, or None to leave the array as it is."
        )
    if is_list and transform is None:
        raise UsageError(
            f"{path} has {len(names)} names in the file; write a transform= that joins or "
            "divides the arrays."
        )
    stars = max((name.count("*") for name in names), default=0)
    if stars > len(shape):
        raise UsageError(
            f"{path} has the shape {[*shape]}, and {first_few(names)} has more stars than "
            "that; each stands for the numbers along one dim."
        )
    layers = {
        numbers: [_fill_stars(name, numbers) for name in names]
        for numbers in np.ndindex(shape[:stars])
    }
    return Names(path, names, is_list, stars, layers, transform)


def _fill_stars(name: str, numbers: tuple[int, ...]) -> str:
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


def _substitute(
    paths: Sequence[str], patterns: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Apply regular expressions to paths, in turn."""
    names: dict[str, str | None] = {path: path for path in paths}
    for pattern, replacement in patterns.items():
        found = {
            path: None if replacement is None else re.sub(pattern, replacement, name)
            for path, name in names.items()
            if name is not None and re.search(pattern, name)
        }
        if not found:
            raise UsageError(
                f"rename: {pattern!r} matches no path of the model; the first paths are "
                f"{first_few(paths)}."
            )
        names |= found
    return names


@dataclass(frozen=True)
class WeightsReport:
    """How the arrays of a file fit a model: `print` it.

    - `matched`: the name in the file of each array that fits, by its path in the model.
        An array that is read from several has their names joined by commas.
    - `missing`: the same for the arrays that the file lacks.
    - `unused`: the dtype and shape of each array of the file that the model does not use,
        by its name.
    - `different`: for each array that has another shape or type in the file, by its path,
        a sentence that says so.
    """

    matched: dict[str, str]
    missing: dict[str, str]
    unused: dict[str, str]
    different: dict[str, str]

    def __str__(self) -> str:
        sections = {
            "in both (the model's path, the file's name)": _rows(self.matched),
            "only in the model": _rows(self.missing),
            "only in the file": _rows(self.unused),
            "that differ": [*self.different.values()],
        }
        return "\n".join(
            "\n  ".join([f"{len(rows)} {title}:", *rows])
            for title, rows in sections.items()
            if rows
        )


def _rows(names: Mapping[str, str]) -> list[str]:
    return [f"{path}  {name}" for path, name in names.items()]


def match_weights(
    arrays: Mapping[str, np.ndarray],
    wanted: Mapping[str, Any],
    rename: Rename | None,
    transform: Transform | None,
    ignore: str | Sequence[str],
) -> tuple[WeightsReport, dict[str, Names]]:
    """Find the arrays of a file for each array of a model.

    **Arguments:**

    - `arrays`: the file's arrays by name.
    - `wanted`: the model's arrays by path.
    - `rename`, `transform`, `ignore`: as for [`eqxshard.load_weights`][].

    **Returns:**

    A report, and the names of each array that fits, by its path.
    """
    missing: dict[str, str] = {}
    different: dict[str, str] = {}
    fitting: dict[str, Names] = {}
    used: set[str] = set()
    for path, names in find_names(wanted, rename, transform).items():
        needed = {name for layer in names.layers.values() for name in layer}
        used |= needed
        if not needed or not needed <= arrays.keys():
            missing[path] = str(names)
        elif fault := _find_fault(arrays, names, wanted[path]):
            different[path] = fault
        else:
            fitting[path] = names
    patterns = [ignore] if isinstance(ignore, str) else ignore
    unused = {
        name: format_array(array)
        for name, array in arrays.items()
        if name not in used and not any(re.search(pattern, name) for pattern in patterns)
    }
    matched = {path: str(names) for path, names in fitting.items()}
    return WeightsReport(matched, missing, unused, different), fitting


def _find_fault(arrays: Mapping[str, np.ndarray], names: Names, leaf: Any) -> str | None:
    """A sentence if a model's array has another shape or type in the file."""
    # All layers are made alike, so making one tells the shape of each.
    layers = [*names.layers.values()]
    kinds = {first_few([format_array(arrays[name]) for name in each]) for each in layers}
    if len(kinds) > 1:
        return f"{names.path} has layers of {' and of '.join(sorted(kinds))} in the file"
    layer = names.read(arrays, layers[0])
    shape = (*leaf.shape[: names.depth], *layer.shape)
    found = jax.ShapeDtypeStruct(shape, layer.dtype)
    return describe_difference(names.path, found, leaf, f"in the file (as {names})")


def read_part(
    arrays: Mapping[str, np.ndarray],
    names: Names,
    part: tuple[range, ...],
    dtype: Any,
) -> np.ndarray:
    """A range of each dim of an array of a model, layer by layer."""
    out = np.empty([len(dim) for dim in part], dtype)
    rest = tuple(slice(dim.start, dim.stop) for dim in part[names.depth :])
    for at in np.ndindex(out.shape[: names.depth]):
        layer = names.layers[tuple(dim[i] for dim, i in zip(part, at))]
        out[(*at, ...)] = names.read(arrays, layer)[rest]
    return out
