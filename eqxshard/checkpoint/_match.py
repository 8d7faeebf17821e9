"""Matches saved arrays with those of a state: some are renamed, initialized or dropped."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._errors import UsageError
from ..sharding._leaves import format_array
from ..sharding._text import did_you_mean, first_few
from ..training._donation import check_not_donated, copy_array
from ._manifest import abstract_array

Missing = Literal["error", "init"]
Unused = Literal["error", "drop"]


class Changed(NamedTuple):
    """The changes that a restore made, by path."""

    initialized: list[str]
    renamed: dict[str, str]
    dropped: list[str]

    def __str__(self) -> str:
        moved = [f"{old} -> {new}" for old, new in self.renamed.items()]
        parts = zip(self._fields, (self.initialized, moved, self.dropped))
        said = [f"{what} {len(x)} ({first_few(x)})" for what, x in parts if x]
        return "; ".join(said)


@dataclass(frozen=True)
class Changes:
    """The changes that a restore may make.

    - `rename`: the new path of what was saved at a path or below it; `None` to drop it.
    - `missing`: `"init"` to initialize arrays that the checkpoint lacks, or `"error"`.
    - `unused`: `"drop"` to drop arrays that only the checkpoint has, or `"error"`.
    """

    rename: Mapping[str, str | None]
    missing: Missing
    unused: Unused

    def __post_init__(self):
        for name, allowed in (("missing", "init"), ("unused", "drop")):
            value = getattr(self, name)
            if value not in ("error", allowed):
                raise UsageError(
                    f"{name}={value!r} is unknown; use 'error' or {allowed!r}."
                )

    def match(
        self,
        wanted: Mapping[str, Any],
        saved: Mapping[str, Any],
        done: Sequence[Mapping[str, str | None]],
        where: str,
    ) -> tuple[dict[str, str], Changed]:
        """Find the saved array of each that is wanted.

        **Arguments:**

        - `wanted`: arrays or `jax.ShapeDtypeStruct`s by path.
        - `saved`: those of the checkpoint, as its description has them.
        - `done`: the renames that the run has made. One of them is not made again if the
            checkpoint fits without it.
        - `where`: the name of the checkpoint in errors.

        **Returns:**

        The saved path of each wanted array that was saved, and the changes.

        **Raises:**

        `ValueError` naming what does not fit and may not change, or a `rename` of a path
        that was not saved, or of two arrays to one path.
        """
        if self.rename and self.rename in done:
            with contextlib.suppress(ValueError):
                as_it_is = dataclasses.replace(self, rename={})
                return as_it_is.match(wanted, saved, done, where)
        paths = _Paths({*saved, *wanted})
        moved = dict(self._rename(wanted, saved, paths, where))
        sources: dict[str, str] = {}
        for old, new in moved.items():
            if new is not None and sources.setdefault(new, old) != old:
                raise UsageError(
                    f"{sources[new]} and {old} of {where} would both be {new}; rename "
                    "one of them, too, to None to drop it."
                )
        unsure = self._numbered(wanted, sources, paths)
        sure = {k: v for k, v in sources.items() if k in wanted and k not in unsure}
        kept = {*sure.values()}
        changed = Changed(
            [path for path in wanted if path not in sure],
            {old: new for new, old in sure.items() if new != old},
            [path for path in saved if path not in kept],
        )
        lacks = changed.initialized if self.missing == "error" else []
        has: list[str] = []
        if self.unused == "error":
            has = [path for path in changed.dropped if moved[path] is not None]
        _check_structure(
            {path: wanted[path] for path in wanted if path in sure or path in lacks},
            {new: saved[old] for new, old in sources.items() if old in kept or old in has},
            where,
            _remedy(lacks, has),
        )
        return sure, changed

    def _rename(
        self,
        wanted: Collection[str],
        saved: Collection[str],
        paths: "_Paths",
        where: str,
    ) -> Iterator[tuple[str, str | None]]:
        """Each path that was saved, and the new one: `None` if it is dropped."""
        for old, new in self.rename.items():
            # In a checkpoint that was saved since, it has the new name.
            if not any(_is_below(path, name) for path in saved for name in (old, new)):
                beginnings = {*saved, *(path.rpartition(".")[0] for path in saved)}
                raise UsageError(
                    f"{where} has nothing at {old}, which rename= names; "
                    f"{did_you_mean(old, beginnings)}use the path of an array there, or "
                    "the beginning of one."
                )
        for old in saved:
            new = _move(old, self.rename)
            # What an optimizer keeps for a parameter moves with it.
            if new is not None and (found := paths.parameter(old, saved)):
                before, parameter, after = found
                follows = _move(parameter, self.rename)
                if follows is None:
                    new = None
                elif follows != parameter:
                    _, _, rest = paths.split(follows)
                    other = _move(".".join((*before, *rest, *after)), self.rename)
                    # A path that looks like a parameter's may be of something else.
                    new = other if other in wanted or new not in wanted else new
            yield old, new

    def _numbered(
        self, wanted: Collection[str], sources: Collection[str], paths: "_Paths"
    ) -> set[str]:
        """The parts of a model's own state, if it has more or fewer of them than before.

        `equinox.nn.State` numbers them, so nobody knows which ones they were.
        """
        ours, theirs = (
            {path for path in each if paths.split(path)[1] == "model_state"}
            for each in (wanted, sources)
        )
        named = any(paths.split(old)[1] == "model_state" for old in self.rename)
        return set() if named or ours == theirs else ours & theirs


class _Paths:
    """Takes the paths of states apart."""

    def __init__(self, every: Collection[str]):
        self._every = every

    def split(self, path: str) -> tuple[list[str], str, list[str]]:
        """The path of a state, one of its fields, and the path in that field."""
        parts = path.split(".")
        for i, field in enumerate(parts):
            if ".".join((*parts[:i], "step")) in self._every:
                return parts[:i], field, parts[i + 1 :]
        return [], parts[0], parts[1:]

    def parameter(
        self, path: str, among: Collection[str]
    ) -> tuple[list[str], str, list[str]] | None:
        """The parameter that a part of an optimizer's state belongs to.

        An optimizer's state has trees like that of the parameters in it, so the path of a
        parameter is a part of `path`. The longest such part counts, the last of equals.

        **Returns:**

        The parts of the path before it, its path in the model, and the parts after it.
        """
        root, field, rest = self.split(path)
        if field != "opt_state":
            return None
        spans = sorted(
            ((j - i, i, j) for i in range(len(rest)) for j in range(i + 1, len(rest) + 1)),
            reverse=True,
        )
        for _, i, j in spans:
            parameter = ".".join((*root, "model", *rest[i:j]))
            if parameter in among:
                return [*root, field, *rest[:i]], parameter, rest[j:]
        return None


def fill(
    arrays: Mapping[str, Array], wanted: Mapping[str, Any], where: str
) -> dict[str, Array]:
    """All arrays of a state: those that are known, and copies of the others."""
    check_not_donated([wanted[path] for path in wanted if path not in arrays], "state")
    filled = {}
    for path, leaf in wanted.items():
        if path not in arrays and not isinstance(leaf, jax.Array):
            raise UsageError(
                f"{path} is missing in {where}, and like has no values for it; give "
                "restore a state of init_state, not of abstract_state."
            )
        # A copy, because steps donate it, and like may be used again.
        filled[path] = arrays[path] if path in arrays else copy_array(leaf)
    return filled


def _remedy(lacks: Collection[str], has: Collection[str]) -> str:
    """The options to give if the differences are intended."""
    if not lacks and not has:
        return (
            "give rename={PATH: None} and missing='init' to begin anew with what has "
            "another shape"
        )
    options = ["missing='init'"] if lacks else []
    options += ["unused='drop'"] if has else []
    return (
        f"give {' and '.join(options)} to train or restore if this is meant (and "
        "rename={OLD: NEW} for what only has another path)"
    )


def _move(path: str, rename: Mapping[str, str | None]) -> str | None:
    """A path whose longest beginning in `rename` is replaced; `None` if it is dropped."""
    known = [old for old in rename if _is_below(path, old)]
    if not known:
        return path
    old = max(known, key=len)
    new = rename[old]
    return None if new is None else f"{new}{path[len(old) :]}"


def _is_below(path: str, beginning: str | None) -> bool:
    return path == beginning or path.startswith(f"{beginning}.")


def _check_structure(
    wanted: Mapping[str, Any],
    saved: Mapping[str, Mapping[str, Any]],
    where: str,
    remedy: str,
) -> None:
    """Raise `ValueError` naming the arrays that only one of the two has, or that differ."""
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
    """A phrase if a saved array cannot become a leaf. Floating-point types convert."""
    alike = saved.dtype == leaf.dtype or any(
        jnp.issubdtype(saved.dtype, kind) and jnp.issubdtype(leaf.dtype, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )
    if saved.shape == leaf.shape and alike:
        return None
    return f"{path} is {format_array(saved)} {where}, not {format_array(leaf)}"
