"""What the arrays of a model are called in a file, and how they lie there."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..sharding._text import first_few

Rename = Callable[[str], str | Sequence[str] | None] | Mapping[str, str | None]
Transform = Callable[[str, Any], Any]


class Names(NamedTuple):
    """The names in a file of one array of a model.

    - `path`: the array's, in the model.
    - `names`: with a `*` for the numbers along each of the array's first dims.
    - `is_list`: whether `rename` returned a list: `transform` joins or splits arrays.
    - `layers`: the sizes of the dims that the stars stand for.
    """

    path: str
    names: tuple[str, ...]
    is_list: bool
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return first_few(self.names)

    def each(self) -> Iterator[tuple[int, ...]]:
        """The numbers of each layer, and of each expert in it, and so on."""
        return np.ndindex(self.layers)

    def of(self, numbers: tuple[int, ...]) -> list[str]:
        """The names with numbers for the stars."""
        names = list(self.names)
        for number in numbers:
            names = [name.replace("*", str(number), 1) for name in names]
        return names

    def apply(self, transform: Transform | None, value: Any) -> Any:
        """Change an array, or the arrays of a list of names."""
        if transform is None:
            return value
        try:
            return transform(self.path, value)
        except Exception as error:
            error.add_note(f"(in the transform of {self} for {self.path})")
            raise


def find_names(leaves: Mapping[str, Any], rename: Rename | None) -> dict[str, Names | None]:
    """The names of each array of a model, by its path; `None` if it is left alone.

    **Arguments:**

    - `leaves`: the arrays by path.
    - `rename`: as for [`eqxshard.load_weights`][].

    **Raises:**

    `TypeError` or `ValueError` if `rename` is wrong.
    """
    if isinstance(rename, Mapping):
        found: Mapping[str, Any] = _substitute([*leaves], rename)
    else:
        found = {path: path if rename is None else rename(path) for path in leaves}
    return {
        path: None if names is None else _parse(path, names, leaves[path].shape)
        for path, names in found.items()
    }


def _parse(path: str, found: Any, shape: tuple[int, ...]) -> Names:
    is_list = isinstance(found, list | tuple)
    names = tuple(found) if is_list else (found,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"rename({path!r}) returned {found!r}; return the name in the file, a list of "
            "names, or None to leave the array as it is."
        )
    stars = max((name.count("*") for name in names), default=0)
    if stars > len(shape):
        raise ValueError(
            f"{path} has the shape {[*shape]}, and {first_few(names)} more stars than "
            "that; each stands for the numbers along one dim."
        )
    return Names(path, names, is_list, shape[:stars])


def _substitute(
    paths: Sequence[str], patterns: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Apply regular expressions in turn."""
    names: dict[str, str | None] = {path: path for path in paths}
    for pattern, replacement in patterns.items():
        try:
            found = {
                path: None if replacement is None else re.sub(pattern, replacement, name)
                for path, name in names.items()
                if name is not None and re.search(pattern, name)
            }
        # The replacement may name a group that the pattern lacks: an IndexError.
        except (re.error, IndexError) as error:
            raise ValueError(
                f"rename: {pattern!r} or its replacement {replacement!r} is not a regular "
                f"expression ({error}); escape special characters with a backslash."
            ) from None
        if not found:
            raise ValueError(
                f"rename: {pattern!r} matches no path of the model; the first paths are "
                f"{first_few(paths)}."
            )
        names |= found
    return names
