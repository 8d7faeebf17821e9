"""Rules: from a leaf of a PyTree to the part of the mesh that holds it."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

#: The axis or axes of a mesh that split one dim, the first over the largest blocks.
Axes = str | tuple[str, ...]


class NamedLeaf(jax.ShapeDtypeStruct):
    """What a rule is told of an array: its shape and dtype, and where they are known

    - `dims`: the names of its dims, from the annotation of the field that it is in;
    - `sharding`: how the rules before this one in [`eqxshard.combine`][] split it.
    """

    __slots__ = ("_read_dims",)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        read_dims: Callable[[], tuple[str | None, ...] | None],
        sharding: NamedSharding | None = None,
    ):
        super().__init__(shape, dtype, sharding=sharding)
        self._read_dims = read_dims

    @property
    def dims(self) -> tuple[str | None, ...] | None:
        """Names, `None` for a dim without one; `None` for all if nothing is annotated."""
        # Not before it is asked for: an annotation that cannot be read is an error.
        return self._read_dims()


#: A rule maps `(path, leaf, mesh)` to a `PartitionSpec`, or to `None`: "not mine".
Rule = Callable[[str, jax.ShapeDtypeStruct, Mesh], PartitionSpec | None]


#: JAX's name for memory of the host that devices can reach.
HOST_MEMORY = "pinned_host"

#: The arrays of a PyTree, by their paths.
Leaves = Mapping[str, jax.ShapeDtypeStruct]


class Decision(NamedTuple):
    """What a rule said of a leaf: its spec, which rule it was, and why."""

    spec: PartitionSpec
    rule: str
    note: str = ""


def _accept(leaves: Leaves, mesh: Mesh) -> None:
    pass


@dataclass(frozen=True)
class _Rule:
    """One of our own rules: called like any other, and able to say more.

    - `decide`: the spec, and why it is that.
    - `check`: raises if the rule names what a PyTree or its mesh does not have.
    - `optimizer`: the rule for the optimizer's state, where it is not this one.
    - `offloads`: whether the optimizer's state lies in the host's memory.
    """

    name: str
    decide: Callable[[str, jax.ShapeDtypeStruct, Mesh], Decision | None]
    check: Callable[[Leaves, Mesh], None] = _accept
    optimizer: "_Rule | None" = None
    offloads: bool = False

    def __call__(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh
    ) -> PartitionSpec | None:
        decision = self.decide(path, leaf, mesh)
        return None if decision is None else decision.spec

    def __repr__(self) -> str:
        return self.name


def replicate() -> Rule:
    """Every device holds the whole leaf: plain data parallelism.

    **Returns:**

    A rule that claims every leaf with `P()`.
    """
    return _Rule("replicate()", lambda *_: Decision(PartitionSpec(), "replicate()"))


def fsdp(min_size: int = 2**18, axis: Axes = "fsdp") -> Rule:
    """Split each large leaf over one mesh axis: fully sharded data parallelism.

    The largest dim that divides by the size of the axis is split, the first of equals.
    A leaf with no such dim stays whole, and [`eqxshard.explain`][] says so. Between
    steps each device holds its part of parameters, gradients and optimizer state (ZeRO
    stage 3, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); the step gathers
    the parameters for the computation.

    In [`eqxshard.combine`][], after other rules, it splits what they left: a whole dim,
    or if none divides the parts of one that is split already. A leaf that is split over
    the axis already stays as it is.

    **Arguments:**

    - `min_size`: leaves of fewer elements than this stay whole: gathering them would
        cost more than they take.
    - `axis`: the mesh axis to split over, or several.

    **Returns:**

    A rule that claims every leaf.
    """
    name = "fsdp()" if axis == "fsdp" else f"fsdp({axis!r})"
    return _Rule(name, _split_largest(name, min_size, axis))


def zero1(min_size: int = 2**18, axis: Axes = "data") -> Rule:
    """Split the optimizer's state alone; every device holds the whole parameters.

    Each device updates its part of every large parameter, and the parts are gathered.
    Gradients are reduced to where they are used, so that they are split likewise. (ZeRO
    stage 1, and 2 for the gradients; Rajbhandari et al. 2020,
    https://arxiv.org/abs/1910.02054.)

    **Arguments:**

    - `min_size`: the state of leaves with fewer elements than this stays whole.
    - `axis`: the mesh axis to split over, or several: axes that split the batch.

    **Returns:**

    A rule that claims every leaf: with `P()`, and its optimizer state as
    [`eqxshard.fsdp`][] does.

    **Raises:**

    When it is used, `ValueError` if the mesh does not have the axis.

    !!! Example

        ```python
        rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.zero1())
        ```
    """
    name = "zero1()" if axis == "data" else f"zero1({axis!r})"

    def check(leaves: Leaves, mesh: Mesh) -> None:
        for each in axes_of(axis):
            check_axis(each, mesh, name)

    return _Rule(
        name,
        lambda *_: Decision(PartitionSpec(), name),
        check,
        optimizer=_Rule(name, _split_largest(name, min_size, axis)),
    )


def offload(rule: Rule) -> Rule:
    """Keep the optimizer's state in the host's memory; all else is as another rule says.

    Each device has its part of the state in pinned memory of its own host (JAX's memory
    kind `pinned_host`), fetches it for the update and sends it back: for Adam, two thirds
    of what is kept between steps leave the device, for two copies over the bus in each
    step. (ZeRO-Offload, Ren et al. 2021, https://arxiv.org/abs/2101.06840, which also
    updates on the host.) Scalars of the state stay on the devices.

    **Arguments:**

    - `rule`: where everything lies, whatever the memory: any rule, with all of
        [`eqxshard.combine`][] and the like inside.

    **Returns:**

    A rule that claims what the other claims.

    **Raises:**

    When it is used, `ValueError` if the mesh's devices have no such memory, or JAX is
    older than 0.10.2, which cannot split what lies there.

    !!! Example

        ```python
        rule = eqxshard.offload(eqxshard.fsdp())
        ```
    """
    name = f"offload({_name(rule)})"

    def check(leaves: Leaves, mesh: Mesh) -> None:
        if jax.__version_info__ < (0, 10, 2):
            raise ValueError(
                f"{name} needs JAX 0.10.2 or newer, and this is {jax.__version__}; install "
                "it, or leave offload out."
            )
        for device in mesh.local_devices or ():
            kinds = [memory.kind for memory in device.addressable_memories()]
            if HOST_MEMORY not in kinds:
                raise ValueError(
                    f"{name} needs memory of the kind {HOST_MEMORY!r}, and {device} has "
                    f"{_list(kinds)}; leave offload out."
                )
        check_rule(rule, leaves, mesh)

    other = optimizer_rule(rule)
    assert other is rule or isinstance(other, _Rule)
    return _Rule(
        name,
        lambda path, leaf, mesh: _ask(rule, path, leaf, mesh),
        check,
        optimizer=other if isinstance(other, _Rule) and other is not rule else None,
        offloads=True,
    )


def _split_largest(
    name: str, min_size: int, axis: Axes
) -> Callable[[str, jax.ShapeDtypeStruct, Mesh], Decision]:
    axes = axes_of(axis)

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision:
        for each in axes:
            check_axis(each, mesh, name)
        taken, count = _taken(leaf), math.prod(leaf.shape)
        size = math.prod(mesh.shape[each] for each in axes)
        if not {*axes}.isdisjoint(each for entry in taken for each in entry):
            return Decision(PartitionSpec(), name)
        if count < min_size:
            return Decision(
                PartitionSpec(), name, f"size {count:,}, below min_size={min_size:,}"
            )
        part = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        dims = [d for d, n in enumerate(part) if n and n % size == 0]
        if not dims:
            terms = " x ".join(f"{each}={mesh.shape[each]}" for each in axes)
            return Decision(
                PartitionSpec(), name, f"whole: no dim of {part} divides by {terms}"
            )
        dim = max(dims, key=lambda d: (not taken[d], part[d]))
        return Decision(PartitionSpec(*[None] * dim, axis), name)

    return decide


def by_path(specs: Mapping[str, PartitionSpec]) -> Rule:
    r"""Name leaves by their path, such as `layers.0.weight`.

    **Arguments:**

    - `specs`: a mapping from regular expressions, searched in the path (anchor them with
        `^` and `$` where that matters), to the `PartitionSpec` of the leaves that match.
        The first match decides.

    **Returns:**

    A rule that claims the leaves that match.

    **Raises:**

    `ValueError` if an expression is not valid; when the rule is used, if one matches no
    leaf at all.

    !!! Example

        ```python
        rule = eqxshard.by_path({r"attention.*weight$": P("tensor", None)})
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

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        for pattern, spec in specs.items():
            if re.search(pattern, path):
                return Decision(spec, f"by_path({pattern!r})")
        return None

    def check(leaves: Leaves, mesh: Mesh) -> None:
        for pattern in specs:
            if not any(re.search(pattern, path) for path in leaves):
                raise ValueError(
                    f"by_path: {pattern!r} matches no leaf; {_near_paths(pattern, leaves)}"
                )

    return _Rule(f"by_path({', '.join(map(repr, specs))})", decide, check)


def by_dim(axes: Mapping[str, Axes | None]) -> Rule:
    """Split arrays by the names of their dims: type annotations are the logical axes.

    The names are those in the jaxtyping annotations of a module's fields: with
    `up: Float[Array, "mlp embed"]` the dims of `up` are `mlp` and `embed`. They are found
    through inheritance, generics, containers, optional fields and unions. The arrays of
    stacked modules have more dims than their annotation says: the first of them is called
    `layers`. The layers of `equinox.nn` have names too, such as `vocab embed` for the
    weight of `Embedding` and `out in` for that of `Linear`, and a field can rename them:
    `up: Annotated[nn.Linear, "mlp embed"]`.

    **Arguments:**

    - `axes`: a mapping from names of dims to the mesh axis that splits them; a tuple of
        axes, the first over the largest blocks; or `None` for dims that stay whole.

    **Returns:**

    A rule that claims the leaves that have a dim with one of these names.

    **Raises:**

    When it is used, `ValueError` if an annotation cannot be resolved, if no leaf has any
    of the names, or if one is missing that looks like a misspelt one.

    !!! Example

        ```python
        rule = eqxshard.by_dim({"mlp": "tensor", "heads": "tensor", "embed": "fsdp"})
        ```
    """

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        named = [dim for dim in _dims(leaf) if dim is not None and dim in axes]
        if not named:
            return None
        entries = [axes.get(dim) if dim else None for dim in _dims(leaf)]
        while entries and entries[-1] is None:
            entries.pop()
        said = ", ".join(f"{dim}: {_list(axes_of(axes[dim]))}" for dim in named)
        return Decision(PartitionSpec(*entries), f"by_dim({said})")

    def check(leaves: Leaves, mesh: Mesh) -> None:
        for axis in axes.values():
            for each in axes_of(axis):
                check_axis(each, mesh, "by_dim")
        found = {dim for leaf in leaves.values() for dim in _dims(leaf) if dim}
        missing = [dim for dim in axes if dim not in found]
        for dim in missing:
            near = difflib.get_close_matches(dim, found - axes.keys(), n=1, cutoff=0.75)
            if near or len(missing) == len(axes):
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"by_dim: no leaf has a dim {dim!r}; {hint}"
                    f"their dims are {_list(sorted(found)) or 'not annotated'}."
                )

    return _Rule(f"by_dim({', '.join(axes)})", decide, check)


def first_match(*rules: Rule) -> Rule:
    """Ask rules in turn; the first that claims a leaf decides.

    **Arguments:**

    - `rules`: the rules, most particular first.

    **Returns:**

    A rule that claims what any of them claims.

    !!! Example

        ```python
        rule = eqxshard.first_match(eqxshard.by_path({"embed": P()}), eqxshard.fsdp())
        ```
    """

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        decisions = (_ask(rule, path, leaf, mesh) for rule in rules)
        return next((d for d in decisions if d is not None), None)

    return _composed(first_match, rules, decide)


def combine(*rules: Rule) -> Rule:
    """Split each leaf as all of several rules say: tensor, then fsdp on what is left.

    Each rule sees in `leaf.sharding` what those before it have split. [`eqxshard.fsdp`][]
    takes that into account; where two rules split the same dim, the earlier one has the
    larger blocks.

    **Arguments:**

    - `rules`: the rules, most particular first.

    **Returns:**

    A rule that claims what any of them claims.

    **Raises:**

    When it is used, `ValueError` if two rules split a leaf over the same axis.

    !!! Example

        ```python
        rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.fsdp())
        ```
    """

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        claimed: list[Decision] = []
        owner: dict[str, str] = {}
        for rule in rules:
            decision = _ask(rule, path, leaf, mesh)
            if decision is None:
                continue
            _check_decision(decision, path, leaf, mesh)
            claimed.append(decision)
            taken = _taken(leaf)
            for dim, entry in enumerate(decision.spec):
                for axis in axes_of(entry):
                    if axis in owner:
                        raise ValueError(
                            f"{path or 'the array'} {leaf.shape}: both {owner[axis]} and "
                            f"{decision.rule} split it over the axis {axis!r}, which can "
                            "split one dim only; leave it to one of the two."
                        )
                    owner[axis] = decision.rule
                taken[dim] += axes_of(entry)
            place = NamedSharding(mesh, _spec(taken))
            leaf = NamedLeaf(leaf.shape, leaf.dtype, partial(_dims, leaf), place)
        if not claimed:
            return None
        # Who split the leaf has decided; where none did, all of them have.
        split = [d for d in claimed if any(map(axes_of, d.spec))] or claimed
        notes = [d.note if d in split else f"{d.rule} {d.note}" for d in claimed if d.note]
        names = dict.fromkeys(d.rule for d in split)
        return Decision(_spec(_taken(leaf)), " + ".join(names), "; ".join(notes))

    return _composed(combine, rules, decide)


def _composed(
    maker: Callable[..., Rule],
    rules: Sequence[Rule],
    decide: Callable[[str, jax.ShapeDtypeStruct, Mesh], Decision | None],
) -> Rule:
    for rule in rules:
        if offloads(rule):
            raise ValueError(
                f"{_name(rule)} is inside {maker.__name__}, and offload goes around all: "
                f"write offload({maker.__name__}(...))."
            )

    def check(leaves: Leaves, mesh: Mesh) -> None:
        for rule in rules:
            check_rule(rule, leaves, mesh)

    optimizer = [optimizer_rule(rule) for rule in rules]
    differs = any(other is not rule for other, rule in zip(optimizer, rules))
    other = maker(*optimizer) if differs else None
    assert other is None or isinstance(other, _Rule)
    name = f"{maker.__name__}({', '.join(map(_name, rules))})"
    return _Rule(name, decide, check, other)


def decide(rule: Rule, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision:
    """Ask a rule for a leaf, and check that the answer fits the leaf and the mesh."""
    decision = _ask(rule, path, leaf, mesh)
    if decision is None:
        return Decision(PartitionSpec(), "no rule", "claimed by no rule: replicated")
    _check_decision(decision, path, leaf, mesh)
    return decision


def check_rule(rule: Rule, leaves: Leaves, mesh: Mesh) -> None:
    """Raise `ValueError` if a rule names what is not there: most likely misspelt."""
    if isinstance(rule, _Rule) and leaves:
        rule.check(leaves, mesh)


def optimizer_rule(rule: Rule) -> Rule:
    """The rule for the optimizer's state: the same, unless it says otherwise."""
    return (isinstance(rule, _Rule) and rule.optimizer) or rule


def offloads(rule: Rule) -> bool:
    """Whether the optimizer's state lies in the host's memory."""
    return isinstance(rule, _Rule) and rule.offloads


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def check_axis(axis: str, mesh: Mesh | AbstractMesh, where: str) -> None:
    """Raise `ValueError` unless the mesh has the axis."""
    if axis not in mesh.shape:
        near = difflib.get_close_matches(axis, mesh.axis_names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{where} names the axis {axis!r}, which the mesh does not have; {hint}"
            f"its axes are {_list(mesh.axis_names)}."
        )


def check_spec(
    path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Raise `ValueError` unless a spec fits an array and a mesh."""
    where = f"{path or 'the array'} {shape}: {spec}"
    if len(spec) > len(shape):
        raise ValueError(
            f"{where} has {len(spec)} entries and the array {len(shape)} dims; give at "
            "most one entry per dim."
        )
    seen: set[str] = set()
    for dim, entry in enumerate(spec):
        axes = axes_of(entry)
        for axis in axes:
            check_axis(axis, mesh, where)
            if axis in seen:
                raise ValueError(
                    f"{where} uses the axis {axis!r} twice; an axis can split one dim only."
                )
            seen.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % parts:
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise ValueError(
                f"{where} splits dim {dim} of size {shape[dim]} over {sizes}, which does "
                f"not divide it; choose a dim that is a multiple of {parts}, or leave this "
                "one whole."
            )


def _ask(rule: Rule, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
    if isinstance(rule, _Rule):
        return rule.decide(path, leaf, mesh)
    makers = (replicate, fsdp, zero1, offload, by_path, by_dim, first_match, combine)
    if any(rule is maker for maker in makers):
        raise TypeError(
            f"{_name(rule)} makes a rule and is not one; call it, as {_name(rule)}()."
        )
    spec = rule(path, leaf, mesh)
    return None if spec is None else Decision(spec, _name(rule))


def _check_decision(
    decision: Decision, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh
) -> None:
    if not isinstance(decision.spec, PartitionSpec):
        raise TypeError(
            f"the rule {decision.rule} answers {decision.spec!r} for "
            f"{path or 'the array'}; answer with a jax.P, or None for a leaf that is not "
            "the rule's."
        )
    if PartitionSpec.UNCONSTRAINED in tuple(decision.spec):
        raise ValueError(
            f"the rule {decision.rule} leaves a dim of {path or 'the array'} "
            "UNCONSTRAINED; only activations can be that: write None, or an axis."
        )
    check_spec(path, leaf.shape, decision.spec, mesh)


def _dims(leaf: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
    return (leaf.dims or ()) if isinstance(leaf, NamedLeaf) else ()


def _taken(leaf: jax.ShapeDtypeStruct) -> list[tuple[str, ...]]:
    """For each dim the axes that split it already."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    entries = [axes_of(entry) for entry in spec]
    return entries + [()] * (len(leaf.shape) - len(entries))


def _spec(entries: Iterable[tuple[str, ...]]) -> PartitionSpec:
    plain = [axes[0] if len(axes) == 1 else axes or None for axes in entries]
    while plain and plain[-1] is None:
        plain.pop()
    return PartitionSpec(*plain)


def _near_paths(pattern: str, leaves: Iterable[str]) -> str:
    """The paths with the words that a pattern may have meant."""
    words = {word for path in leaves for word in path.split(".")}
    for word in re.findall(r"\w+", pattern):
        near = difflib.get_close_matches(word, words, n=1)
        if word not in words and near:
            path = next(path for path in leaves if near[0] in path.split("."))
            return f"did you mean {near[0]!r}, as in {path!r}?"
    some = [*leaves][:3]
    return f"the paths are {_list(map(repr, some))}{', ...' if len(some) == 3 else '.'}"


def _name(rule: Rule) -> str:
    return getattr(rule, "__name__", repr(rule))


def _list(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))
