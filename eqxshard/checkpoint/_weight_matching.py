"""Which arrays of a file are those of a model."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..sharding._leaves import format_array
from ..sharding._text import comma_list, first_few
from ._arrays import converts

Names = str | Sequence[str]
Rename = Callable[[str], Names | None] | Mapping[str, str | None]
Transform = Callable[[str, np.ndarray], Any]
Patterns = str | Sequence[str]
#: The numbers of a layer, and of an expert in it.
Index = tuple[int, ...]


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


def list_left_out(report: WeightsReport) -> list[str]:
    """What a partial load leaves out."""
    phrases = []
    if report.missing:
        phrases.append(f"the model keeps its own {first_few([*report.missing])}")
    if report.unused:
        phrases.append(f"the file's {first_few([*report.unused])} are not used")
    return phrases


def _rows(names: Mapping[str, str]) -> list[str]:
    width = max(map(len, names), default=0)
    return [f"{path:{width}}  {name}" for path, name in names.items()]


class Joined:
    """Several arrays of a file as one, which is only ever read in parts.

    - `sources`: the arrays.
    - `axis`: the dim of their own along which they follow each other; `None` if they are
        stacked along a new first one.
    """

    def __init__(self, sources: Sequence["Source"], axis: int | None):
        self._sources, self._axis = sources, axis
        shape = [*sources[0].shape]
        if axis is None:
            shape = [len(sources), *shape]
        else:
            shape[axis] = sum(source.shape[axis] for source in sources)
        self.shape: tuple[int, ...] = tuple(shape)
        self.ndim = len(self.shape)
        self.dtypes = set[np.dtype]().union(*map(_dtypes, sources))

    def read(self, part: tuple[range, ...], out: np.ndarray) -> None:
        """Copy a range of each dim to `out`, with its dtype."""
        if self._axis is None:
            for row, number in enumerate(part[0]):
                read_part(self._sources[number], part[1:], out[row, ...])
            return
        axis, begin = self._axis, 0
        dim = part[axis]
        for source in self._sources:
            end = begin + source.shape[axis]
            common = range(max(dim.start, begin), min(dim.stop, end))
            if common:
                own = range(common.start - begin, common.stop - begin)
                rows = slice(common.start - dim.start, common.stop - dim.start)
                into = out[(*[slice(None)] * axis, rows)]
                read_part(source, (*part[:axis], own, *part[axis + 1 :]), into)
            begin = end


Source = np.ndarray | Joined


def read_part(source: Source, part: tuple[range, ...], out: np.ndarray) -> None:
    """Copy a range of each dim of an array to `out`, with its dtype."""
    if isinstance(source, Joined):
        source.read(part, out)
    else:
        out[...] = source[tuple(slice(dim.start, dim.stop) for dim in part)]


#: The names of the arrays that are joined, or of the one.
_Tree = str | list[Any]


def match_weights(
    arrays: Mapping[str, np.ndarray],
    wanted: Mapping[str, Any],
    rename: Rename | None,
    transform: Transform | None,
    ignore: Patterns = (),
) -> tuple[WeightsReport, dict[str, Callable[[], Source]]]:
    """Find the array of a file for each array of a model.

    **Arguments:**

    - `arrays`: the file's arrays by name.
    - `wanted`: the model's arrays by path.
    - `rename`, `transform`, `ignore`: as for [`eqxshard.load_weights`][].

    **Returns:**

    A report, and for each array that fits, by its path, a function that makes its source.
    """
    names_of = new_names(wanted, rename)
    matched, missing, different = {}, {}, {}
    makers: dict[str, Callable[[], Source]] = {}
    used: set[str] = set()
    for path, names in names_of.items():
        if names is None:
            continue
        leaf, text = wanted[path], names if isinstance(names, str) else first_few(names)
        tree = _expand(names, leaf.shape)
        flat = list(_flatten(tree))
        used.update(flat)
        if not flat or any(name not in arrays for name in flat):
            missing[path] = text
            continue
        make = _maker(path, tree, leaf.shape, arrays, transform)
        there = "there" if text == path else f"there (as {text})"
        fault = _fault(make, leaf, there)
        if fault is None:
            matched[path], makers[path] = text, make
        else:
            different[path] = f"{path} has {fault}"
    kept = tuple(path for path, names in names_of.items() if names is None)
    used.update(name for name in arrays if _is_ignored(name, ignore))
    unused = {name: format_array(x) for name, x in arrays.items() if name not in used}
    return WeightsReport(matched, missing, kept, unused, different), makers


def new_names(wanted: Iterable[str], rename: Rename | None) -> dict[str, Names | None]:
    """What `rename` says for each path."""
    if rename is None:
        return {path: path for path in wanted}
    if isinstance(rename, Mapping):
        return _substitute(wanted, rename)
    names_of: dict[str, Names | None] = {}
    for path in wanted:
        names = names_of[path] = rename(path)
        parts = [names] if isinstance(names, str) or names is None else names
        if not isinstance(parts, list | tuple) or not all(
            isinstance(part, str) for part in parts if names is not None
        ):
            raise TypeError(
                f"rename({path!r}) returned {names!r}; return the name in the file, a list "
                "of names, or None to leave the array as it is."
            )
    return names_of


def _substitute(
    wanted: Iterable[str], patterns: Mapping[str, str | None]
) -> dict[str, Names | None]:
    names_of: dict[str, Names | None] = {path: path for path in wanted}
    for pattern, replacement in patterns.items():
        found = False
        for path, name in names_of.items():
            try:
                if not isinstance(name, str) or not re.search(pattern, name):
                    continue
                found = True
                names_of[path] = (
                    None if replacement is None else re.sub(pattern, replacement, name)
                )
            # The replacement may name a group that the pattern lacks: an IndexError.
            except (re.error, IndexError) as error:
                raise ValueError(
                    f"rename: {pattern!r} or its replacement {replacement!r} is not a "
                    f"regular expression ({error}); escape special characters with a "
                    "backslash."
                ) from None
        if not found:
            raise ValueError(
                f"rename: {pattern!r} matches no path of the model; the first paths are "
                f"{comma_list([*names_of][:3])}."
            )
    return names_of


def _is_ignored(name: str, patterns: Patterns) -> bool:
    for pattern in as_list(patterns):
        try:
            if re.search(pattern, name):
                return True
        except re.error as error:
            raise ValueError(
                f"ignore: {pattern!r} is not a regular expression ({error}); escape "
                "special characters with a backslash."
            ) from None
    return False


def _expand(names: Names, shape: tuple[int, ...]) -> _Tree:
    """Put the numbers from 0 for the first `*`, as many as the first dim is long."""
    if _has_star(names):
        return [
            _expand(_replace_star(names, str(i)), shape[1:]) for i in range((*shape, 0)[0])
        ]
    return names if isinstance(names, str) else [*names]


def unstack(names: Names, shape: tuple[int, ...]) -> Iterator[tuple[Index, Names]]:
    """The index of each part of an array that has names of its own, and these."""
    if not _has_star(names):
        yield (), names
        return
    for i in range(shape[0]):
        for at, more in unstack(_replace_star(names, str(i)), shape[1:]):
            yield (i, *at), more


def as_list(names: Names) -> Sequence[str]:
    """Several names, or one."""
    return [names] if isinstance(names, str) else names


def _has_star(names: Names) -> bool:
    return any("*" in name for name in as_list(names))


def _replace_star(names: Names, number: str) -> Names:
    if isinstance(names, str):
        return names.replace("*", number, 1)
    return [name.replace("*", number, 1) for name in names]


def _flatten(tree: _Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for part in tree:
            yield from _flatten(part)


def _maker(
    path: str,
    tree: _Tree,
    shape: tuple[int, ...],
    arrays: Mapping[str, np.ndarray],
    transform: Transform | None,
) -> Callable[[], Source]:
    def make(tree: _Tree, shape: tuple[int, ...]) -> Source:
        if not isinstance(tree, str):
            return _join([make(part, shape[1:]) for part in tree], shape)
        if transform is None:
            return arrays[tree]
        try:
            return np.asarray(transform(path, arrays[tree]))
        except Exception as error:
            error.add_note(f"(in the transform of {tree} for {path})")
            raise

    return lambda: make(tree, shape)


def _join(sources: Sequence[Source], shape: tuple[int, ...]) -> Joined:
    """Stack arrays of one dim less than the whole; put others one after the other."""
    shapes = dict.fromkeys(source.shape for source in sources)
    stacks = all(len(each) == len(shape) - 1 for each in shapes)
    axis = None if stacks else _common_axis(shapes, shape)
    if () in shapes and not stacks:
        raise _Unlike(shapes)
    if len({each if axis is None else _without(each, axis) for each in shapes}) > 1:
        raise _Unlike(shapes)
    return Joined(sources, axis)


def _common_axis(shapes: Iterable[tuple[int, ...]], shape: tuple[int, ...]) -> int:
    """The dim in which arrays are parts of a shape; the first if there is none."""
    axes = range(len(shape))
    whole = [[_without(each, axis) for each in (*shapes, shape)] for axis in axes]
    return next((axis for axis in axes if len({*whole[axis]}) == 1), 0)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


class _Unlike(ValueError):
    """Arrays of these shapes cannot be joined."""


def _fault(make: Callable[[], Source], leaf: Any, there: str) -> str | None:
    """What differs, if anything does."""
    try:
        source = make()
    except _Unlike as error:
        shapes = first_few([str([*shape]) for shape in error.args[0]])
        return f"parts of shapes {shapes} {there}, which cannot be joined"
    if source.shape != leaf.shape:
        return f"shape {[*source.shape]} {there}, not {[*leaf.shape]}"
    unlike = [dtype for dtype in _dtypes(source) if not converts(str(dtype), leaf)]
    return f"dtype {unlike[0]} {there}, not {leaf.dtype}" if unlike else None


def _dtypes(source: Source) -> set[np.dtype]:
    return source.dtypes if isinstance(source, Joined) else {source.dtype}
