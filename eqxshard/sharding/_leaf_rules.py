"""Rules that look at one leaf: its size, its path, or the names of its dims."""

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from .._errors import UsageError, UsageTypeError
from ._dims import AnnotationError
from ._rule import AbstractRule, Decision, Leaves, axes_by_dim, leaf_dims
from ._spec import (
    AnyMesh,
    Axes,
    axes_of,
    axis_sizes,
    check_axis,
    format_sizes,
    format_spec,
    make_spec,
)
from ._text import comma_list, did_you_mean, first_few


@dataclass(frozen=True)
class replicate(AbstractRule):
    """Replicate every leaf on every device: plain data parallelism.

    The rule claims every leaf with `P()`.
    """

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh) -> Decision:
        """Replicated."""
        return Decision(PartitionSpec(), self.label)

    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """Names nothing, so nothing can be missing."""


@dataclass(frozen=True)
class fsdp(AbstractRule):
    """Split each large leaf over one mesh axis: fully sharded data parallelism.

    The largest dim that is divisible by the size of the axis is split. (Of equal dims, the
    first. A dim named `vocab`, as in `equinox.nn.Embedding`, comes last: the gradient of a
    lookup is cheap to reduce if the table is split over its features, and costs the whole
    table if it is split over its rows.) A leaf with no divisible dim stays replicated, and
    [`eqxshard.explain`][] says so. Between steps each device holds its part of parameters,
    gradients and optimizer state (ZeRO stage 3, Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054); the step gathers parameters when it needs them.

    In [`eqxshard.combine`][], after other rules, it splits a dim that they did not split,
    or, if none is divisible, the parts of one that they did. A leaf that is already split
    over the axis stays as it is.

    The rule claims every leaf.

    **Arguments:**

    - `min_size`: leaves with fewer elements stay replicated: gathering them would cost more
        than the memory that it saves is worth.
    - `axis`: the mesh axis to split over, or several.

    **Raises:**

    `TypeError` if `min_size` is not a number; when used, `ValueError` if the mesh does
    not have the axis.
    """

    min_size: int = 2**18
    axis: Axes = "fsdp"

    def __post_init__(self):
        _check_size(self.min_size)

    @property
    def label(self) -> str:
        """The axis, unless it is the usual one."""
        return f"fsdp({'' if self.axis == 'fsdp' else repr(self.axis)})"

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh) -> Decision:
        """Split the largest divisible dim, of those that no other rule has split."""
        self.check({}, mesh)
        sizes = axis_sizes(axes_of(self.axis), mesh)
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
            note = f"replicated: no dim of {shape} is divisible by {format_sizes(sizes)}"
            return Decision(PartitionSpec(), self.label, note, undivided=True)
        # A rule about sizes does not fail on an annotation that is wrong.
        names = dict(enumerate(_read_dims(leaf)[0]))
        dim = max(dims, key=lambda d: (not taken[d], names.get(d) != "vocab", shape[d]))
        return Decision(PartitionSpec(*[None] * dim, self.axis), self.label)

    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """The mesh must have the axes."""
        for axis in axes_of(self.axis):
            check_axis(axis, mesh, self.label)


@dataclass(frozen=True)
class zero1(AbstractRule):
    """Split the optimizer's state only; every device holds all parameters.

    Each device updates its part of every large parameter, and the parts are gathered.
    Gradients are reduced to the device that uses them, so they are split too. (ZeRO
    stage 1, and 2 for the gradients; Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054.)

    The rule claims every leaf: with `P()`, and its gradient and optimizer state as
    [`eqxshard.fsdp`][] over the same axis does.

    **Arguments:**

    - `min_size`: the state of leaves with fewer elements stays replicated.
    - `axis`: the mesh axis to split over, or several: axes that split the batch.

    **Raises:**

    `TypeError` if `min_size` is not a number; when used, `ValueError` if the mesh does
    not have the axis.

    !!! Example

        ```python
        rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.zero1())
        ```
    """

    min_size: int = 2**18
    axis: Axes = "data"

    def __post_init__(self):
        _check_size(self.min_size)

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh) -> Decision:
        """Replicated; `update_rule` decides for the optimizer's state."""
        return Decision(PartitionSpec(), self.label)

    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """The mesh must have the axes."""
        self.update_rule.check(leaves, mesh)

    @property
    def update_rule(self) -> fsdp:
        """The rule for gradients and optimizer state."""
        return _Zero1Update(self.min_size, self.axis)


@dataclass(frozen=True)
class _Zero1Update(fsdp):
    """The rule for gradients and optimizer state, by the name that its user knows."""

    @property
    def label(self) -> str:
        """The axis, unless it is the usual one."""
        return f"zero1({'' if self.axis == 'data' else repr(self.axis)})"


def _check_size(min_size: int) -> None:
    if not isinstance(min_size, int | float):
        raise UsageTypeError(
            f"min_size={min_size!r} is not a number of elements; write axis={min_size!r} "
            "to name an axis."
        )


@dataclass(frozen=True, init=False, repr=False)
class by_path(AbstractRule):
    r"""Choose the spec of a leaf by its path, such as `layers.0.weight`.

    The rule claims the leaves that match. Follow it by one that claims the others, as in
    `first_match(by_path(...), replicate())`.

    **Arguments:**

    - `specs`: a mapping from regular expressions, searched in the path (anchor them with
        `^` and `$` where that matters), to the `PartitionSpec` of the leaves that match.
        The first match decides.

    **Raises:**

    `ValueError` if an expression is invalid; when the rule is used, if one matches no
    leaf at all. `TypeError` if a spec is not a `PartitionSpec`.

    !!! Example

        ```python
        attention = eqxshard.by_path({r"attention.*weight$": P("tensor", None)})
        rule = eqxshard.first_match(attention, eqxshard.replicate())
        ```
    """

    specs: tuple[tuple[str, PartitionSpec], ...]

    def __init__(self, specs: Mapping[str, PartitionSpec]):
        object.__setattr__(self, "specs", tuple(specs.items()))
        for pattern, spec in specs.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"by_path: {pattern!r} is not a regular expression ({error}); escape "
                    "its special characters with a backslash."
                ) from None
            if not isinstance(spec, PartitionSpec):
                raise UsageTypeError(
                    f"by_path: {pattern!r} has {spec!r}, which is not a PartitionSpec; "
                    "write a jax.P, such as P('tensor'), or P() to replicate the array."
                )

    @property
    def label(self) -> str:
        """The patterns."""
        return f"by_path({comma_list(repr(pattern) for pattern, _ in self.specs)})"

    def decide(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> Decision | None:
        """The spec of the first pattern found in the path."""
        for pattern, spec in self.specs:
            if re.search(pattern, path):
                return Decision(spec, f"by_path({pattern!r})")
        return None

    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """Every pattern must match a leaf: most likely it is misspelt."""
        for pattern, _ in self.specs:
            if not any(re.search(pattern, path) for path in leaves):
                raise UsageError(
                    f"by_path: {pattern!r} matches no leaf; {did_you_mean(pattern, leaves)}"
                    f"the paths are {first_few([*leaves])}."
                )

    def __repr__(self) -> str:
        specs = comma_list(f"{name!r}: {format_spec(spec)}" for name, spec in self.specs)
        return f"by_path({{{specs}}})"


@dataclass(frozen=True, init=False, repr=False)
class by_dim(AbstractRule):
    """Split arrays by the names of their dims: type annotations are the logical axes.

    The names are those in the jaxtyping annotations of a module's fields: with
    `up: Float[Array, "mlp embed"]` the dims of `up` are `mlp` and `embed`. They are found
    through inheritance, containers, optional fields and unions. The arrays of
    stacked modules have more dims than their annotation says: the first of them is called
    `layers`. The layers of `equinox.nn` have names too, such as `vocab embed` for the
    weight of `Embedding` and `out in` for that of `Linear`, and a field can rename them:
    `up: Annotated[nn.Linear, "mlp embed"]`.

    The rule claims the leaves that have a dim with one of its names. Follow it by one that
    claims the others, as in `combine(by_dim(...), fsdp())`.

    **Arguments:**

    - `axes`: a mapping from names of dims to the mesh axis that splits them; to a tuple
        of axes, the first over the largest blocks; or to `None` for dims to leave alone.

    **Raises:**

    When it is used, `ValueError` if an annotation that has one of the names is wrong, if no
    leaf has any of the names, or if one is missing that looks like a misspelt one. Wrong
    annotations without these names are left alone, with a warning.

    !!! Example

        ```python
        split = eqxshard.by_dim({"mlp": "tensor", "heads": "tensor", "embed": "fsdp"})
        rule = eqxshard.first_match(split, eqxshard.replicate())
        ```
    """

    axes: tuple[tuple[str, Axes | None], ...]

    def __init__(self, axes: Mapping[str, Axes | None]):
        object.__setattr__(self, "axes", tuple(axes.items()))

    @property
    def label(self) -> str:
        """The names."""
        return f"by_dim({comma_list(name for name, _ in self.axes)})"

    def decide(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> Decision | None:
        """Split each dim that has one of the names."""
        axes = dict(self.axes)
        dims, wrong = _read_dims(leaf)
        if wrong is not None and not wrong.words.isdisjoint(axes):
            raise wrong
        named = [dim for dim in dims if dim is not None and dim in axes]
        if not named:
            return None
        spec = make_spec(axes_of(axes.get(dim) if dim else None) for dim in dims)
        said = comma_list(f"{dim}: {comma_list(axes_of(axes[dim]))}" for dim in named)
        return Decision(spec, f"by_dim({said})")

    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """The mesh must have the axes, and some leaf the names."""
        names = dict(self.axes)
        for entry in names.values():
            for axis in axes_of(entry):
                check_axis(axis, mesh, "by_dim")
        found, wrong = set[str](), list[AnnotationError]()
        for dims, error in map(_read_dims, leaves.values()):
            found.update(filter(None, dims))
            if error is not None:
                # If it has one of the names, this is an error where the rule decides.
                found.update(error.words.intersection(names))
                wrong.append(error)
        missing = [name for name in names if name not in found]
        for name in missing:
            # Rules are shared between models, so a name may well be absent from one.
            hint = did_you_mean(name, found - names.keys(), cutoff=0.75)
            if hint or len(missing) == len(names):
                if wrong:  # It may have the name.
                    raise wrong[0]
                raise UsageError(
                    f"by_dim: no leaf has a dim {name!r}; {hint}their dims are "
                    f"{comma_list(sorted(found)) or 'not annotated'}."
                )
        for error in wrong:
            warnings.warn(f"by_dim leaves out a wrong annotation: {error}", stacklevel=2)

    def __repr__(self) -> str:
        return f"by_dim({dict(self.axes)})"


def _read_dims(
    leaf: jax.ShapeDtypeStruct,
) -> tuple[tuple[str | None, ...], AnnotationError | None]:
    """The names of a leaf's dims, if it has any, and the error in an annotation."""
    try:
        return leaf_dims(leaf), None
    except AnnotationError as error:
        return error.dims or (), error
