"""Rules that look at one leaf: its size, its path, or the names of its dims."""

import difflib
import math
import re
import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, PartitionSpec

from ._hints import AnnotationError
from ._rule import AbstractRule, Decision, Leaves, Rule, axes_by_dim, leaf_dims
from ._spec import (
    Axes,
    as_axes,
    axes_of,
    check_axis,
    format_sizes,
    format_spec,
    make_spec,
)
from ._text import comma_list, did_you_mean


def replicate() -> Rule:
    """Keep every leaf whole on every device: plain data parallelism.

    **Returns:**

    A rule that claims every leaf with `P()`.
    """
    return Replicate()


@dataclass(frozen=True, repr=False)
class Replicate(AbstractRule):
    """What [`eqxshard.replicate`][] returns."""

    @property
    def label(self) -> str:
        """Its name."""
        return "replicate()"

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision:
        """Whole."""
        return Decision(PartitionSpec(), self.label)

    def check(self, leaves: Leaves, mesh: Mesh) -> None:
        """Names nothing, so nothing can be missing."""

    def __repr__(self) -> str:
        return self.label


def fsdp(min_size: int = 2**18, axis: Axes = "fsdp") -> Rule:
    """Split each large leaf over one mesh axis: fully sharded data parallelism.

    The largest dim that divides by the size of the axis is split, the first of equals. (A
    dim named `vocab`, as in `equinox.nn.Embedding`, comes last: the gradient of a lookup
    is cheap to reduce if the table is split over its features, and costs the whole table
    if it is split over its rows.) A leaf with no such dim stays whole, and
    [`eqxshard.explain`][] says so. Between steps each device holds its part of
    parameters, gradients and optimizer state (ZeRO stage 3, Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054); the step gathers parameters when it needs them.

    In [`eqxshard.combine`][], after other rules, it splits what they left whole: a dim,
    or if none divides, the parts of one that is already split. A leaf that is already
    split over the axis stays as it is.

    **Arguments:**

    - `min_size`: leaves with fewer elements stay whole: gathering them would cost more
        than they take.
    - `axis`: the mesh axis to split over, or several.

    **Returns:**

    A rule that claims every leaf.

    **Raises:**

    `TypeError` if `min_size` is not a number; when used, `ValueError` if the mesh does
    not have the axis.
    """
    return SplitLargest("fsdp", min_size, as_axes(axis))


@dataclass(frozen=True, repr=False)
class SplitLargest(AbstractRule):
    """What [`eqxshard.fsdp`][] returns, and what [`eqxshard.zero1`][] updates by."""

    maker: str
    min_size: int
    axis: Axes

    def __post_init__(self):
        if not isinstance(self.min_size, int | float):
            raise TypeError(
                f"{self.maker}(min_size={self.min_size!r}) is not a number of elements; "
                f"write {self.maker}(axis={self.min_size!r}) to name an axis."
            )

    @property
    def label(self) -> str:
        """The axis, unless it is the usual one."""
        default = {"fsdp": "fsdp", "zero1": "data"}[self.maker]
        return f"{self.maker}({'' if self.axis == default else repr(self.axis)})"

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision:
        """Split the largest dim that divides, of those that no other rule has split."""
        sizes = {axis: mesh.shape[axis] for axis in self._checked_axes(mesh)}
        taken, parts = axes_by_dim(leaf), math.prod(sizes.values())
        if not sizes.keys().isdisjoint(axis for axes in taken for axis in axes):
            return Decision(PartitionSpec(), self.label)
        count = math.prod(leaf.shape)
        if count < self.min_size:
            note = f"size {count:,}, below min_size={self.min_size:,}"
            return Decision(PartitionSpec(), self.label, note)
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        dims = [d for d, size in enumerate(shape) if size and size % parts == 0]
        if not dims:
            note = f"whole: no dim of {shape} divides by {format_sizes(sizes)}"
            return Decision(PartitionSpec(), self.label, note, undivided=True)
        vocab = _vocab_dim(leaf) if len(dims) > 1 else None
        dim = max(dims, key=lambda d: (not taken[d], d != vocab, shape[d]))
        return Decision(PartitionSpec(*[None] * dim, self.axis), self.label)

    def check(self, leaves: Leaves, mesh: Mesh) -> None:
        """The mesh must have the axes."""
        self._checked_axes(mesh)

    def _checked_axes(self, mesh: Mesh) -> tuple[str, ...]:
        axes = axes_of(self.axis)
        for axis in axes:
            check_axis(axis, mesh, self.label)
        return axes

    def __repr__(self) -> str:
        return f"{self.maker}(min_size={self.min_size}, axis={self.axis!r})"


def _vocab_dim(leaf: jax.ShapeDtypeStruct) -> int | None:
    try:
        dims = leaf_dims(leaf)
    except ValueError:
        # A rule about sizes does not fail on an annotation that cannot be resolved.
        return None
    return dims.index("vocab") if "vocab" in dims else None


def zero1(min_size: int = 2**18, axis: Axes = "data") -> Rule:
    """Split the optimizer's state only; every device holds all parameters.

    Each device updates its part of every large parameter, and the parts are gathered.
    Gradients are reduced to the device that uses them, so they are split too. (ZeRO
    stage 1, and 2 for the gradients; Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054.)

    **Arguments:**

    - `min_size`: the state of leaves with fewer elements stays whole.
    - `axis`: the mesh axis to split over, or several: axes that split the batch.

    **Returns:**

    A rule that claims every leaf: with `P()`, and its optimizer state as
    [`eqxshard.fsdp`][] does.

    **Raises:**

    `TypeError` if `min_size` is not a number; when used, `ValueError` if the mesh does
    not have the axis.

    !!! Example

        ```python
        rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.zero1())
        ```
    """
    return Zero1(SplitLargest("zero1", min_size, as_axes(axis)))


@dataclass(frozen=True, repr=False)
class Zero1(AbstractRule):
    """What [`eqxshard.zero1`][] returns."""

    update: SplitLargest

    @property
    def label(self) -> str:
        """That of `update`."""
        return self.update.label

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision:
        """Whole; `update` decides for the optimizer's state."""
        return Decision(PartitionSpec(), self.label)

    def check(self, leaves: Leaves, mesh: Mesh) -> None:
        """The mesh must have the axes."""
        self.update.check(leaves, mesh)

    def __repr__(self) -> str:
        return repr(self.update)


def by_path(specs: Mapping[str, PartitionSpec]) -> Rule:
    r"""Choose the spec of a leaf by its path, such as `layers.0.weight`.

    **Arguments:**

    - `specs`: a mapping from regular expressions, searched in the path (anchor them with
        `^` and `$` where that matters), to the `PartitionSpec` of the leaves that match.
        The first match decides.

    **Returns:**

    A rule that claims the leaves that match. Follow it by one that claims the others, as
    in `first_match(by_path(...), replicate())`.

    **Raises:**

    `ValueError` if an expression is invalid; when the rule is used, if one matches no
    leaf at all. `TypeError` if a spec is not one.

    !!! Example

        ```python
        attention = eqxshard.by_path({r"attention.*weight$": P("tensor", None)})
        rule = eqxshard.first_match(attention, eqxshard.replicate())
        ```
    """
    for pattern in specs:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"by_path: {pattern!r} is not a regular expression ({error}); escape its "
                "special characters with a backslash."
            ) from None
    for pattern, spec in specs.items():
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"by_path: {pattern!r} has {spec!r}, which is not a PartitionSpec; write a "
                "jax.P, such as P('tensor'), or P() to keep the array whole."
            )
    return ByPath(tuple(specs.items()))


@dataclass(frozen=True, repr=False)
class ByPath(AbstractRule):
    """What [`eqxshard.by_path`][] returns."""

    specs: tuple[tuple[str, PartitionSpec], ...]

    @property
    def label(self) -> str:
        """The patterns."""
        return f"by_path({comma_list(repr(pattern) for pattern, _ in self.specs)})"

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        """The spec of the first pattern found in the path."""
        for pattern, spec in self.specs:
            if re.search(pattern, path):
                return Decision(spec, f"by_path({pattern!r})")
        return None

    def check(self, leaves: Leaves, mesh: Mesh) -> None:
        """Every pattern must match a leaf: most likely it is misspelt."""
        for pattern, _ in self.specs:
            if not any(re.search(pattern, path) for path in leaves):
                raise ValueError(
                    f"by_path: {pattern!r} matches no leaf; {near_paths(pattern, leaves)}"
                )

    def __repr__(self) -> str:
        specs = comma_list(f"{name!r}: {format_spec(spec)}" for name, spec in self.specs)
        return f"by_path({{{specs}}})"


def near_paths(pattern: str, paths: Iterable[str]) -> str:
    """The path that a pattern may have meant, or the first few."""
    words = {word for path in paths for word in path.split(".")}
    for word in re.findall(r"\w+", pattern):
        near = difflib.get_close_matches(word, words, n=1)
        if word not in words and near:
            path = next(path for path in paths if near[0] in path.split("."))
            return f"did you mean {near[0]!r}, as in {path!r}?"
    some = [*paths][:3]
    return (
        f"the paths are {comma_list(map(repr, some))}{', ...' if len(some) == 3 else '.'}"
    )


def by_dim(axes: Mapping[str, Axes | None]) -> Rule:
    """Split arrays by the names of their dims: type annotations are the logical axes.

    The names are those in the jaxtyping annotations of a module's fields: with
    `up: Float[Array, "mlp embed"]` the dims of `up` are `mlp` and `embed`. They are found
    through inheritance, containers, optional fields and unions, and a type variable has
    none. The arrays of
    stacked modules have more dims than their annotation says: the first of them is called
    `layers`. The layers of `equinox.nn` have names too, such as `vocab embed` for the
    weight of `Embedding` and `out in` for that of `Linear`, and a field can rename them:
    `up: Annotated[nn.Linear, "mlp embed"]`.

    **Arguments:**

    - `axes`: a mapping from names of dims to the mesh axis that splits them; to a tuple
        of axes, the first over the largest blocks; or to `None` for dims that stay whole.

    **Returns:**

    A rule that claims the leaves that have a dim with one of these names. Follow it by
    one that claims the others, as in `combine(by_dim(...), fsdp())`.

    **Raises:**

    When it is used, `ValueError` if an annotation that has one of the names is wrong, if no
    leaf has any of the names, or if one is missing that looks like a misspelt one. Wrong
    annotations without these names are left alone, with a warning if they cannot be read.

    !!! Example

        ```python
        split = eqxshard.by_dim({"mlp": "tensor", "heads": "tensor", "embed": "fsdp"})
        rule = eqxshard.first_match(split, eqxshard.replicate())
        ```
    """
    return ByDim(tuple((dim, as_axes(entry)) for dim, entry in axes.items()))


def _dims_without(
    leaf: jax.ShapeDtypeStruct, names: Container[str]
) -> tuple[str | None, ...]:
    """The names of a leaf's dims, without wrong annotations that have none of `names`."""
    try:
        return leaf_dims(leaf)
    except AnnotationError as error:
        if any(word in names for word in error.words):
            raise
        return error.dims or ()


@dataclass(frozen=True, repr=False)
class ByDim(AbstractRule):
    """What [`eqxshard.by_dim`][] returns."""

    axes: tuple[tuple[str, Axes | None], ...]

    @property
    def label(self) -> str:
        """The names."""
        return f"by_dim({comma_list(name for name, _ in self.axes)})"

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        """Split each dim that has one of the names."""
        axes = dict(self.axes)
        dims = _dims_without(leaf, axes)
        named = [dim for dim in dims if dim is not None and dim in axes]
        if not named:
            return None
        spec = make_spec(axes_of(axes.get(dim) if dim else None) for dim in dims)
        said = comma_list(f"{dim}: {comma_list(axes_of(axes[dim]))}" for dim in named)
        return Decision(spec, f"by_dim({said})")

    def check(self, leaves: Leaves, mesh: Mesh) -> None:
        """The mesh must have the axes, and some leaf the names."""
        names = [name for name, _ in self.axes]
        for _, entry in self.axes:
            for axis in axes_of(entry):
                check_axis(axis, mesh, "by_dim")
        found, unread = set[str](), list[AnnotationError]()
        for leaf in leaves.values():
            try:
                found.update(filter(None, leaf_dims(leaf)))
            except AnnotationError as error:
                found.update(
                    filter(None, error.dims or ()), error.words.intersection(names)
                )
                unread += [] if error.is_read else [error]
        missing = [name for name in names if name not in found]
        for name in missing:
            # Rules are shared between models, so a name may well be absent from one.
            hint = did_you_mean(name, found - set(names), cutoff=0.75)
            if hint or len(missing) == len(names):
                if unread:  # It may have the name.
                    raise unread[0]
                raise ValueError(
                    f"by_dim: no leaf has a dim {name!r}; {hint}their dims are "
                    f"{comma_list(sorted(found)) or 'not annotated'}."
                )
        for error in unread:
            warnings.warn(f"by_dim leaves out what it cannot read: {error}", stacklevel=2)

    def __repr__(self) -> str:
        return f"by_dim({dict(self.axes)})"
