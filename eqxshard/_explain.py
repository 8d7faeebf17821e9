"""What a rule decides, for people to read before they train."""

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ._draw import Panel, draw_panels
from .mesh import describe
from .rules import Decision, Rule, axes_of, check_rule, decide, optimizer_rule
from .sharding import is_array, named_leaves
from .state import (
    TrainState,
    is_param,
    opt_state_shardings,
    split_model,
    without_state,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: As many arrays as one can look at; `draw` says how many there are besides.
_DRAWN = 12


class Bytes(NamedTuple):
    """The size of some arrays: of all of each, and of what each device holds of them."""

    whole: int
    per_device: int


class _Path(NamedTuple):
    """A path that is broken at its dots where a line is too short for it."""

    path: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._parts())), len(self.path))

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        lines = [""]
        for part in self._parts():
            if len(lines[-1] + part) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(filter(None, lines)), overflow="fold")

    def _parts(self) -> list[str]:
        return re.findall(r"[^.]*\.?", self.path)


@dataclass(frozen=True)
class Leaf:
    """One row of an [`eqxshard.Explanation`][].

    - `path`: such as `layers.0.weight`.
    - `shape`, `dtype`: of the whole array.
    - `spec`: its `PartitionSpec`.
    - `bytes_whole`, `bytes_per_device`: of the whole array, and of one device's part.
    - `rule`: the rule that decided.
    - `note`: why the leaf could not be split, where it could not; and whether it is
        frozen.
    - `update_spec`, `update_rule`: the same for its gradient and its part of the
        optimizer's state, which [`eqxshard.zero1`][] places elsewhere. `None` and empty
        if the leaf is not trained.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_whole: int
    bytes_per_device: int
    rule: str
    note: str
    update_spec: PartitionSpec | None
    update_rule: str


@dataclass(frozen=True)
class Explanation:
    """What a rule decides for each array of a model: `print` it, or `draw` it.

    - `leaves`: one [`eqxshard.Leaf`][] for each array.
    - `mesh`: the mesh.
    - `parameters`: the bytes of its floating-point (and complex) arrays: a pair, of
        which `whole` is of the whole arrays, and `per_device` of what each device holds.
    - `other`: those of its other arrays.
    - `gradients`: those of the gradients.
    - `optimizer_state`: those of the optimizer's state; `None` without an optimizer.
    """

    leaves: tuple[Leaf, ...]
    mesh: Mesh
    parameters: Bytes
    other: Bytes
    gradients: Bytes
    optimizer_state: Bytes | None

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the model that each device holds."""
        return self.parameters.per_device + self.other.per_device

    @property
    def bytes_whole(self) -> int:
        """Bytes of all the model's arrays, whole."""
        return self.parameters.whole + self.other.whole

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, strings and numbers, such as `json.dump` takes.

        **Returns:**

        A dict with the entries `mesh` (`axes`, by name; `devices`; `platform`), `leaves`
        (the fields of each [`eqxshard.Leaf`][]) and `totals` (`bytes_whole` and
        `bytes_per_device` of the `parameters`, of `other` arrays, of the `gradients`, of
        the `optimizer_state` and in `total`). A spec is a list with an axis, a list of
        axes, or `None` for each dim.
        """

        def plain(size: Bytes) -> dict[str, int]:
            return {"bytes_whole": size.whole, "bytes_per_device": size.per_device}

        optimizer_state = self.optimizer_state
        return {
            "mesh": {
                "axes": dict(self.mesh.shape),
                "devices": self.mesh.size,
                "platform": self.mesh.devices.flat[0].platform,
            },
            "leaves": [
                {
                    **vars(leaf),
                    "shape": list(leaf.shape),
                    "spec": _plain(leaf.spec),
                    "update_spec": _plain(leaf.update_spec),
                }
                for leaf in self.leaves
            ],
            "totals": {
                "parameters": plain(self.parameters),
                "other": plain(self.other),
                "gradients": plain(self.gradients),
                "optimizer_state": optimizer_state and plain(optimizer_state),
                "total": plain(self._total()),
            },
        }

    def draw(self, paths: str | Sequence[str] | None = None) -> "Figure":
        """Draw which device holds which block of which array.

        Each array is a rectangle, cut into the blocks that JAX cuts it into. In each
        block are the numbers of the devices that hold it. Of arrays of more than two dims
        those are drawn that are split. If the gradient and the optimizer's state lie
        elsewhere, these have a picture of their own.

        **Arguments:**

        - `paths`: which arrays: a regular expression that is searched in their paths, as
            by [`eqxshard.by_path`][], or several. By default the twelve largest.

        **Returns:**

        A `matplotlib.figure.Figure`, which belongs to no window: `savefig` it.

        **Raises:**

        `ImportError` if Matplotlib is not installed; `ValueError` if an expression is in
        no path.

        !!! Example

            ```python
            eqxshard.explain(model, mesh, rule).draw("layers.0").savefig("layout.png")
            ```
        """
        chosen = self._chosen([paths] if isinstance(paths, str) else paths)
        panels = []
        for leaf in chosen:
            panels.append(self._panel(leaf, leaf.path, leaf.spec))
            if leaf.update_spec not in (None, leaf.spec):
                panels.append(self._panel(leaf, f"{leaf.path} (update)", leaf.update_spec))
        left_out = len(self.leaves) - len(chosen)
        footnote = f"{left_out} more arrays are not drawn" if left_out else ""
        return draw_panels(
            panels, f"the devices that hold each block, on {describe(self.mesh)}", footnote
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield self._table()
        yield Text()
        yield self._totals()

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=140, color_system=None).print(self)
        return text.getvalue()

    def _table(self) -> Table:
        updates = any(leaf.update_spec not in (None, leaf.spec) for leaf in self.leaves)
        table = Table(title=f"on {describe(self.mesh)}")
        columns = ["path", "shape", "dtype", "spec", "bytes/device", "rule"]
        columns[4:4] = ["update spec"] if updates else []
        for column in columns:
            justify = "right" if column == "bytes/device" else "left"
            table.add_column(column, justify=justify, overflow="fold")
        for leaf in self.leaves:
            # Of the two, that for the update names all who had a say.
            rule = leaf.update_rule or leaf.rule
            cells = [
                _shape(leaf.shape),
                leaf.dtype,
                _spec(leaf.spec),
                _size(leaf.bytes_per_device),
                f"{rule}: {leaf.note}" if leaf.note else rule,
            ]
            elsewhere = leaf.update_spec not in (None, leaf.spec)
            cells[3:3] = [_spec(leaf.update_spec) if elsewhere else ""] if updates else []
            # As `Text`, because rich reads brackets in a `str`, as in by_path('[a-z]'),
            # as markup.
            table.add_row(_Path(leaf.path), *map(Text, cells))
        return table

    def _totals(self) -> Table:
        kinds = {
            "parameters": self.parameters,
            "other arrays": self.other if self.other.whole else None,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
        }
        table = Table(show_edge=False, show_footer=True)
        total = "total" if self.optimizer_state else "total without optimizer state"
        whole, per_device = map(_size, self._total())
        table.add_column("", total)
        table.add_column("each device", per_device, justify="right")
        table.add_column("whole", whole, justify="right")
        for kind, size in kinds.items():
            if size is not None:
                table.add_row(kind, _size(size.per_device), _size(size.whole))
        return table

    def _total(self) -> Bytes:
        kinds = (self.parameters, self.other, self.gradients, self.optimizer_state)
        return Bytes(*map(sum, zip(*filter(None, kinds))))

    def _panel(self, leaf: Leaf, title: str, spec: PartitionSpec) -> Panel:
        subtitle = f"{_shape(leaf.shape)}, {_spec(spec)}"
        return Panel(title, subtitle, leaf.shape, NamedSharding(self.mesh, spec))

    def _chosen(self, patterns: Sequence[str] | None) -> list[Leaf]:
        """The leaves to draw, in their order."""
        if patterns is None:
            largest = sorted(self.leaves, key=lambda leaf: -leaf.bytes_whole)[:_DRAWN]
            return [leaf for leaf in self.leaves if leaf in largest]
        for pattern in patterns:
            if not any(_matches(pattern, leaf) for leaf in self.leaves):
                some = ", ".join(leaf.path for leaf in self.leaves[:3])
                raise ValueError(
                    f"draw: {pattern!r} is in no path of an array; "
                    + (f"the first are {some}." if some else "there are none.")
                )
        return [leaf for leaf in self.leaves if any(_matches(p, leaf) for p in patterns)]


def explain(
    tree: PyTree,
    mesh: Mesh,
    rule: Rule,
    *,
    optim: optax.GradientTransformation | None = None,
    trainable: PyTree = True,
) -> Explanation:
    """Say where each array of a model would lie, why, and what each device would hold.

    Nothing is placed: `tree` may be of `jax.ShapeDtypeStruct`s, as from
    `equinox.filter_eval_shape`, for a model larger than this machine.

    **Arguments:**

    - `tree`: a model, or any PyTree; for a model with state, the pair of both.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: as for [`eqxshard.shardings`][].
    - `optim`: an optax optimizer, to count its state too.
    - `trainable`: as for [`eqxshard.init_state`][]: which arrays have gradients and
        optimizer state.

    **Returns:**

    An [`eqxshard.Explanation`][]. It prints as a table: path, shape, dtype, spec, bytes
    per device, the rule that decided, and why where a leaf could not be split. (Where
    gradients and optimizer state lie is shown if they lie elsewhere.) Below it are the
    bytes of parameters, gradients and optimizer state. `to_dict` has the same for
    programs, and `draw` a picture of it.

    **Raises:**

    `ValueError` and `TypeError` as [`eqxshard.shardings`][] does, and `ValueError` if
    `trainable` is not a prefix of the model; `TypeError` for a whole
    [`eqxshard.TrainState`][].

    !!! Example

        ```python
        print(eqxshard.explain(model, mesh, eqxshard.fsdp(), optim=optax.adamw(1e-3)))
        ```
    """
    if isinstance(tree, TrainState):
        raise TypeError("explain takes a model; give it state.model, and optim=.")

    def shapes(model: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        params, _ = split_model(model, trainable)
        return model, params, None if optim is None else optim.init(params)

    model, model_state = without_state(tree)
    # Also for the types that arrays of NumPy will have as JAX's.
    model, params, opt_state = eqx.filter_eval_shape(shapes, model)
    leaves = [(path, leaf) for path, leaf in named_leaves(model) if leaf is not None]
    check_rule(rule, dict(leaves), mesh)
    trained = {path for path, _ in named_leaves(params)}
    update_rule = optimizer_rule(rule)
    rows, parameters, other, gradients = [], [], [], []
    for path, leaf in leaves:
        decision, update = decide(rule, path, leaf, mesh), None
        notes = [decision.note]
        if path in trained:
            differs = update_rule is not rule
            update = decide(update_rule, path, leaf, mesh) if differs else decision
            gradients.append((leaf, NamedSharding(mesh, update.spec)))
            notes.append(update.note)
        elif is_param(leaf):
            notes.append("frozen")
        kind = parameters if is_param(leaf) else other
        kind.append((leaf, NamedSharding(mesh, decision.spec)))
        rows.append(_row(path, leaf, mesh, decision, update, notes))
    for path, leaf in named_leaves({"model_state": model_state}):
        if leaf is not None:
            decision = Decision(PartitionSpec(), "model state")
            other.append((leaf, NamedSharding(mesh, decision.spec)))
            notes = ["whole, whatever the rule"]
            rows.append(_row(path, leaf, mesh, decision, None, notes))
    optimizer_state = None
    if optim is not None:
        places = opt_state_shardings(opt_state, params, optim, mesh, rule)
        arrays = [leaf for leaf in jax.tree.leaves(opt_state) if is_array(leaf)]
        optimizer_state = _bytes(zip(arrays, jax.tree.leaves(places), strict=True))
    return Explanation(
        leaves=tuple(rows),
        mesh=mesh,
        parameters=_bytes(parameters),
        other=_bytes(other),
        gradients=_bytes(gradients),
        optimizer_state=optimizer_state,
    )


def _row(
    path: str,
    leaf: jax.ShapeDtypeStruct,
    mesh: Mesh,
    decision: Decision,
    update: Decision | None,
    notes: Sequence[str],
) -> Leaf:
    size = _bytes([(leaf, NamedSharding(mesh, decision.spec))])
    return Leaf(
        path=path,
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype),
        spec=decision.spec,
        bytes_whole=size.whole,
        bytes_per_device=size.per_device,
        rule=decision.rule,
        note="; ".join(dict.fromkeys(filter(None, notes))),
        update_spec=update and update.spec,
        update_rule=update.rule if update else "",
    )


def _bytes(arrays: Iterable[tuple[Any, NamedSharding]]) -> Bytes:
    sizes = [
        (leaf.dtype.itemsize, leaf.shape, there.shard_shape(leaf.shape))
        for leaf, there in arrays
    ]
    return Bytes(
        sum(size * math.prod(shape) for size, shape, _ in sizes),
        sum(size * math.prod(part) for size, _, part in sizes),
    )


def _matches(pattern: str, leaf: Leaf) -> bool:
    try:
        return re.search(pattern, leaf.path) is not None
    except re.error as error:
        raise ValueError(
            f"draw: {pattern!r} is not a regular expression ({error}); escape its special "
            "characters with a backslash."
        ) from None


def _plain(spec: PartitionSpec | None) -> list[str | list[str] | None] | None:
    if spec is None:
        return None
    entries = [[*axes_of(entry)] for entry in spec]
    return [axes[0] if len(axes) == 1 else axes or None for axes in entries]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _spec(spec: PartitionSpec | None) -> str:
    if spec is None:
        return ""
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
