"""`Explanation`: a rule's decisions as a table and a dict."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from ..sharding._mesh import describe_mesh
from ..sharding._optimizer_state import is_split
from ..sharding._spec import AnyMesh, axes_of, format_sizes
from ..sharding._text import format_bytes
from ._tables import render


class Bytes(NamedTuple):
    """The bytes of some arrays: of the whole arrays, and of one device's part of them."""

    whole: int
    per_device: int


@dataclass(frozen=True)
class Leaf:
    """One array of an [`eqxshard.inspect.Explanation`][], or of a plan.

    - `path`: the path of the array, such as `layers.0.weight`.
    - `shape`, `dtype`: those of the whole array.
    - `spec`: its `PartitionSpec`.
    - `bytes_whole`, `bytes_per_device`: the bytes of the whole array, and of one device's
        part of it.
    - `rule`: the rule that decided; empty in a plan by [`eqxshard.plan_step`][].
    - `note`: why the leaf is replicated, if the rule could not split it; and whether it is
        frozen.
    - `update_spec`, `update_rule`: the spec and the rule of its gradient and its part of
        the optimizer's state, which differ under [`eqxshard.zero1`][]. `None` and empty if
        the leaf is not trained.
    - `gradient`: the bytes of one device's part of its gradient; 0 if it is not trained.
    - `optimizer`: the bytes of one device's part of the optimizer's arrays that belong to
        this leaf, without those in the host's memory; 0 without an optimizer.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_whole: int
    bytes_per_device: int
    rule: str = ""
    note: str = ""
    update_spec: PartitionSpec | None = None
    update_rule: str = ""
    gradient: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """The bytes that a device holds for it: array, gradient and optimizer state."""
        return self.bytes_per_device + self.gradient + self.optimizer

    @property
    def updates_elsewhere(self) -> bool:
        """True if its gradient and optimizer state are split otherwise than the array."""
        return self.update_spec not in (None, self.spec)

    def to_dict(self) -> dict[str, Any]:
        """Its fields as plain values; a spec is a list with one entry per dim."""
        return {
            **vars(self),
            "shape": list(self.shape),
            "spec": _plain_spec(self.spec),
            "update_spec": _plain_spec(self.update_spec),
        }


@dataclass(frozen=True)
class Explanation:
    """The decisions of a rule for the arrays of a model; `print` shows them as a table.

    - `leaves`: one [`eqxshard.inspect.Leaf`][] for each array.
    - `mesh`: the mesh.
    - `parameters`: the bytes of the floating-point (and complex) arrays: a pair of
        `whole`, those of the whole arrays, and `per_device`, those of one device's part.
    - `other`: the bytes of the other arrays.
    - `gradients`: the bytes of the gradients.
    - `optimizer_state`: the bytes of the optimizer's state; `None` without an optimizer.
    - `host`: the bytes of each device's part of the optimizer's state that are in the
        host's memory, under [`eqxshard.offload`][]. They are not in `per_device`.
    - `other_shapes`: one [`eqxshard.inspect.Leaf`][] for each array of the optimizer's
        state that is not shaped like its parameter, such as the factors of Adafactor.
    """

    leaves: tuple[Leaf, ...]
    mesh: AnyMesh
    parameters: Bytes
    other: Bytes
    gradients: Bytes
    optimizer_state: Bytes | None
    host: int
    other_shapes: tuple[Leaf, ...] = ()

    @property
    def bytes_per_device(self) -> int:
        """The bytes of the model on each device."""
        return self.parameters.per_device + self.other.per_device

    @property
    def bytes_whole(self) -> int:
        """The bytes of all the model's arrays, whole."""
        return self.parameters.whole + self.other.whole

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        yield _table(self.leaves, f"on {describe_mesh(self.mesh)}", self._unused())
        yield Text()
        if self.other_shapes:
            title = "optimizer state of other shapes than the parameters"
            yield _table(self.other_shapes, title, self._replicated())
            yield Text()
        yield self._totals()

    def __str__(self) -> str:
        return render(self, columns=80) + "\n"

    __repr__ = __str__  # A notebook shows it.

    def _repr_html_(self) -> str:
        return f'<pre style="line-height:1.2">{escape(str(self))}</pre>'

    def _unused(self) -> str | None:
        """A note on axes over which no array is split; the batch and activations may be."""
        specs = [spec for x in self.leaves for spec in (x.spec, x.update_spec) if spec]
        split = {axis for spec in specs for entry in spec for axis in axes_of(entry)}
        sizes = {axis: n for axis, n in self.mesh.shape.items() if n > 1}
        unused = {axis: n for axis, n in sizes.items() if axis not in {*split, "data"}}
        return f"no array is split over {format_sizes(unused)}" if unused else None

    def _replicated(self) -> str | None:
        """A note on optimizer state of other shapes that every device holds whole."""
        whole = [
            x.bytes_whole for x in self.other_shapes if not is_split(x.spec, self.mesh)
        ]
        return f"replicated: {format_bytes(sum(whole))}" if whole else None

    def _totals(self) -> Any:
        from rich.table import Table

        table = Table(show_edge=False, show_footer=True)
        total = "total" if self.optimizer_state else "total without optimizer state"
        whole, per_device = map(format_bytes, self._total())
        table.add_column("", total)
        table.add_column("each device", per_device, justify="right")
        table.add_column("whole", whole, justify="right")
        for kind, size in (
            ("parameters", self.parameters),
            ("other arrays", self.other if self.other.whole else None),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer_state),
        ):
            if size is not None:
                table.add_row(kind, format_bytes(size.per_device), format_bytes(size.whole))
        if self.host:
            table.add_row("the host's memory", format_bytes(self.host))
        return table

    def _total(self) -> Bytes:
        kinds = (self.parameters, self.other, self.gradients, self.optimizer_state)
        return Bytes(*map(sum, zip(*filter(None, kinds))))


def _table(leaves: Iterable[Leaf], title: str, caption: str | None) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("path", no_wrap=True)
    table.add_column("array", overflow="fold")
    table.add_column("on a device", justify="right", no_wrap=True)
    table.add_column("rule", overflow="fold")
    for path, (leaf, *others) in _fold(leaves):
        times = f"{1 + len(others)} x " if others else ""
        size = times + format_bytes(leaf.bytes_per_device)
        # The update's rule names every rule that took part; the leaf's may not.
        rule = leaf.update_rule or leaf.rule
        why = f"{rule}: {leaf.note}" if leaf.note else rule
        # As `Text`: in a `str`, rich would read brackets, as in by_path('[a-z]'), as
        # markup.
        table.add_row(*map(Text, (path, _split_array(leaf, leaf.spec), size, why)))
        if leaf.update_spec is not None and leaf.updates_elsewhere:
            update = _split_array(leaf, leaf.update_spec)
            table.add_row("  its update", Text(update))
    return table


def _split_array(leaf: Leaf, spec: PartitionSpec) -> str:
    """An array as JAX writes types: `f32[512@fsdp,64]`, its first dim split over fsdp."""
    dtype = re.sub(r"(b?)(f|u|i|c)[a-z]+(\d+)", r"\1\2\3", leaf.dtype)
    dims = []
    for size, entry in itertools.zip_longest(leaf.shape, spec):
        axes = ",".join(axes_of(entry))
        dims.append(f"{size}@({axes})" if "," in axes else f"{size}@{axes}".rstrip("@"))
    return f"{dtype}[{','.join(dims)}]"


def _fold(leaves: Iterable[Leaf]) -> Iterator[tuple[str, list[Leaf]]]:
    """Groups of arrays that differ only in numbers of their paths: `layers.0-11.weight`."""
    alike: dict[Leaf, list[Leaf]] = {}
    for leaf in leaves:
        pattern = ".".join("*" if x.isdecimal() else x for x in leaf.path.split("."))
        alike.setdefault(replace(leaf, path=pattern), []).append(leaf)
    for group in alike.values():
        parts = [dict.fromkeys(part) for part in zip(*(x.path.split(".") for x in group))]
        yield ".".join(_first_to_last(*part) for part in parts), group


def _first_to_last(first: str, *others: str) -> str:
    return f"{first}-{others[-1]}" if others else first


def _plain_spec(spec: PartitionSpec | None) -> list[str | list[str] | None] | None:
    if spec is None:
        return None
    entries = [[*axes_of(entry)] for entry in spec]
    return [axes[0] if len(axes) == 1 else axes or None for axes in entries]
