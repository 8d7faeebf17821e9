"""A table of what a rule decides, for people to read before they train."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from .mesh import describe
from .rules import Rule, decide
from .sharding import named_leaves


@dataclass(frozen=True)
class Leaf:
    """One row of an [`eqxshard.Explanation`][].

    - `path`: such as `layers.0.weight`.
    - `shape`, `dtype`: of the whole array.
    - `spec`: its `PartitionSpec`.
    - `bytes_whole`, `bytes_per_device`: of the whole array, and of one device's part.
    - `rule`: the rule that decided.
    - `note`: why the leaf could not be split, where it could not.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_whole: int
    bytes_per_device: int
    rule: str
    note: str


@dataclass(frozen=True)
class Explanation:
    """What a rule decides for each array of a PyTree: `print` it.

    - `leaves`: one [`eqxshard.Leaf`][] for each array.
    - `mesh`: the mesh, in words.
    """

    leaves: tuple[Leaf, ...]
    mesh: str

    @property
    def bytes_per_device(self) -> int:
        """Bytes that each device holds."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def bytes_whole(self) -> int:
        """Bytes of all the arrays, whole."""
        return sum(leaf.bytes_whole for leaf in self.leaves)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Table]:
        table = Table(
            title=f"on {self.mesh}",
            caption=f"{_size(self.bytes_per_device)} on each device, of "
            f"{_size(self.bytes_whole)}",
        )
        for column in ("path", "shape", "dtype", "spec", "bytes/device", "rule"):
            justify = "right" if column == "bytes/device" else "left"
            table.add_column(column, justify=justify, overflow="fold")
        for leaf in self.leaves:
            cells = (
                leaf.path,
                " x ".join(map(str, leaf.shape)) or "scalar",
                leaf.dtype,
                _spec(leaf.spec),
                _size(leaf.bytes_per_device),
                f"{leaf.rule}: {leaf.note}" if leaf.note else leaf.rule,
            )
            # As `Text`, because rich reads brackets in a `str`, as in by_path('[a-z]'),
            # as markup.
            table.add_row(*map(Text, cells))
        yield table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=140, color_system=None).print(self)
        return text.getvalue()


def explain(tree: PyTree, mesh: Mesh, rule: Rule) -> Explanation:
    """Say where each array of a PyTree would lie, and why.

    Nothing is placed: `tree` may be of `jax.ShapeDtypeStruct`s, as from
    `equinox.filter_eval_shape`, for a model larger than this machine.

    **Arguments:**

    - `tree`: any PyTree.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: as for [`eqxshard.shardings`][].

    **Returns:**

    An [`eqxshard.Explanation`][], which prints as a table: path, shape, dtype, spec,
    bytes per device, the rule that decided, and why where a leaf could not be split.

    **Raises:**

    `ValueError` as [`eqxshard.shardings`][] does.

    !!! Example

        ```python
        print(eqxshard.explain(model, mesh, eqxshard.fsdp()))
        ```
    """
    rows = []
    for name, leaf in named_leaves(tree):
        if leaf is not None:
            decision = decide(rule, name, leaf, mesh)
            part = NamedSharding(mesh, decision.spec).shard_shape(leaf.shape)
            itemsize = leaf.dtype.itemsize
            rows.append(
                Leaf(
                    path=name,
                    shape=tuple(leaf.shape),
                    dtype=str(leaf.dtype),
                    spec=decision.spec,
                    bytes_whole=math.prod(leaf.shape) * itemsize,
                    bytes_per_device=math.prod(part) * itemsize,
                    rule=decision.rule,
                    note=decision.note,
                )
            )
    return Explanation(tuple(rows), describe(mesh))


def _spec(spec: PartitionSpec) -> str:
    entries = ("None" if entry is None else repr(entry) for entry in spec)
    return f"P({', '.join(entries)})"


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"
    return f"{size / 1000:.3g} TB"
