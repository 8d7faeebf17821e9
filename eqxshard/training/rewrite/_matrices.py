"""Updates that need whole matrices, each computed by one device.

Muon and its kind multiply each matrix with itself, again and again. Of a matrix that is
split, XLA would gather it, or sum parts of the product, in each iteration and on every
device. Here matrices of one kind (those of stacked layers, or of a list of layers) are
dealt out to the devices: an all-to-all brings each of them whole to its owner, which
computes alone, and another brings the results back to where the arrays are stored. Over
axes that do not split a matrix, such as `data`, owners are dealt their share without a
transfer, and results are gathered. The rest of an update stays where arrays are stored.

This is a rewrite of the update's jaxpr, because Newton-Schulz is in the optimizer. As in
"Muon is Scalable for LLM Training" (Liu et al., https://arxiv.org/abs/2502.16982), each
matrix is whole somewhere; as in Dion's Muon (https://github.com/microsoft/dion) the
matrices are dealt out, rather than gathered by all.
"""

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from ...sharding._leaves import is_key
from ...sharding._spec import axes_of, make_spec
from ._jaxprs import all_jaxprs, call_function, equations, map_jaxpr, variables
from ._regions import Regions, has_matrices, inline_calls
from ._rewrite import is_rewriting, run_rewritten

_PLACED = ("shard_map", "sharding_constraint")
#: A smaller matrix that is not split costs less to compute than to send. As in `fsdp`.
_MIN_SIZE = 2**18

_NO_MESH = jax.sharding.AbstractMesh((), ())

#: What is done to one layer of a stack, by the name of the function that does it to all.
_BODIES: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "eqxshard_bodies", default=None
)


def deal_matrices(
    update: Callable[..., Any], mesh: Mesh, shardings: Sequence[NamedSharding | None]
) -> Callable[..., Any]:
    """Have each matrix of an optimizer's update computed by one device.

    **Arguments:**

    - `update`: a function of PyTrees of arrays.
    - `mesh`: with Auto axes.
    - `shardings`: where each of its arrays is, if that is known.

    **Returns:**

    The same function.
    """

    def dealt(*args: Any) -> Any:
        if mesh.size == 1 or not is_rewriting():
            return update(*args)
        bodies: dict[str, Any] = {}
        # Without a mesh in types and equations, which is another one in per-device code.
        like = jax.tree.map(_untyped, args)
        try:
            with _collecting(bodies), jax.sharding.use_abstract_mesh(_NO_MESH):
                jaxpr, out = jax.make_jaxpr(update, return_shape=True)(*like)
        except Exception:  # It needs the mesh, or raises its own error again.
            return update(*args)
        if not has_matrices(jaxpr) or jaxpr.effects:
            return update(*args)

        def rewrite(jaxpr: Any) -> Any:
            return map_jaxpr(lambda jaxpr: _deal(jaxpr, bodies, mesh, shardings), jaxpr)

        return run_rewritten(rewrite, jaxpr, out, args)[0]

    return dealt


def _untyped(x: Array) -> jax.ShapeDtypeStruct:
    weak_type = getattr(jax.typeof(x), "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak_type)


@contextlib.contextmanager
def _collecting(bodies: dict[str, Any]) -> Iterator[None]:
    token = _BODIES.set(bodies)
    try:
        yield
    finally:
        _BODIES.reset(token)


def each_layer(update: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one layer, to be called under `jax.vmap` for all that are stacked.

    While `deal_matrices` traces, it takes note of what is done to matrices of one layer.
    """

    def noted(*args: Any) -> Any:
        bodies = _BODIES.get()
        if bodies is None:
            return update(*args)
        jaxpr, out = jax.make_jaxpr(update, return_shape=True)(*args)
        if not has_matrices(jaxpr) or jaxpr.effects:
            return update(*args)

        def rewrite(jaxpr: Any) -> Any:
            return map_jaxpr(lambda jaxpr: _note(jaxpr, bodies), jaxpr)

        return run_rewritten(rewrite, jaxpr, out, args)[0]

    return noted


def _note(jaxpr: Any, bodies: dict[str, Any]) -> Any:
    """Call each region of a jaxpr by a name, under which its body is noted."""
    jaxpr = inline_calls(jaxpr)
    regions = Regions(jaxpr)

    def call(region: list[int]) -> Any:
        body = regions.body(region)
        compute = core.jaxpr_as_fun(body)

        @custom_vmap
        def one(*args: Array) -> list[Array]:
            return compute(*args)

        @one.def_vmap
        def _(size: int, batched: list[bool], *args: Array) -> tuple[list[Array], Any]:
            def every(*args: Array) -> list[Array]:
                return jax.vmap(compute)(*args)

            every.__name__ = every.__qualname__ = f"each_layer_{len(bodies)}"
            bodies[every.__name__] = body
            pairs = zip(args, batched, strict=True)
            stacks = [
                x if split else jnp.broadcast_to(x, (size, *x.shape)) for x, split in pairs
            ]
            outs = jax.jit(every)(*stacks)
            return outs, [True] * len(outs)

        called = call_function(one, regions.inputs(region))
        return called.replace(outvars=regions.outputs(region))

    return _replaced(regions, lambda found: map(call, found))


def _replaced(regions: Regions, replace: Callable[[list[list[int]]], Iterable[Any]]) -> Any:
    """A jaxpr with other equations in place of its regions.

    They are given by a function of those regions that do not wait for each other.
    """
    levels = regions.levels()
    if levels is None:
        return regions.jaxpr
    inside = {i for region in regions.found for i in region}
    eqns: list[Any] = []
    for level in sorted({*levels}):
        here = [i for i, each in enumerate(levels) if each == level]
        eqns += [regions.eqns[i] for i in here if i not in inside]
        eqns += replace([region for region in regions.found if levels[region[0]] == level])
    return regions.jaxpr.replace(eqns=eqns)


def _deal(
    jaxpr: Any,
    bodies: dict[str, Any],
    mesh: Mesh,
    shardings: Sequence[NamedSharding | None],
) -> Any:
    """Deal out the regions of an update."""
    jaxpr = inline_calls(jaxpr, bodies)
    regions = Regions(jaxpr, bodies)
    splits = _find_splits(jaxpr, mesh, shardings)

    def replace(found: list[list[int]]) -> Iterator[Any]:
        kinds: dict[Any, list[_Work]] = {}
        for region in found:
            work = _Work.of(regions, region, bodies, splits)
            kinds.setdefault(work.kind(), []).append(work)
        for works in kinds.values():
            deal = _Deal.of(works, mesh)
            if deal is None:
                yield from (regions.eqns[i] for work in works for i in work.region)
                continue
            call = call_function(deal, [x for work in works for x in work.inputs])
            yield call.replace(outvars=[x for work in works for x in work.outputs])

    return _replaced(regions, replace)


#: The mesh axes that split each dim of an array.
Split = tuple[tuple[str, ...], ...]


def _find_splits(
    jaxpr: Any, mesh: Mesh, shardings: Sequence[NamedSharding | None]
) -> dict[Any, Split]:
    """How arrays are split, as far as it follows from how the inputs are."""
    splits: dict[Any, Split] = {}
    for x, sharding in zip(jaxpr.invars, shardings, strict=True):
        if sharding is not None:
            entries = [*sharding.spec] + [None] * (x.aval.ndim - len(sharding.spec))
            axes = (filter(lambda axis: mesh.shape[axis] > 1, axes_of(e)) for e in entries)
            splits[x] = tuple(map(tuple, axes))
    for eqn in jaxpr.eqns:
        inputs = [x for x in variables(eqn.invars) if x in splits]
        if eqn.primitive.name == "transpose" and inputs:
            split = splits[inputs[0]]
            splits[eqn.outvars[0]] = tuple(split[d] for d in eqn.params["permutation"])
            continue
        for out in eqn.outvars:
            shape = getattr(out.aval, "shape", None)
            like = next((x for x in inputs if x.aval.shape == shape), None)
            if like is not None:
                splits[out] = splits[like]
    return splits


class _Work(NamedTuple):
    """A region for one matrix, or for each of a stack of them.

    - `region`, `inputs`, `outputs`: the region in the jaxpr.
    - `body`: what is done for one.
    - `rows`: how many there are; `None` for one that is not stacked.
    - `splits`: how each input of `body` is split.
    - `row_axes`: how the stack is.
    """

    region: list[int]
    inputs: list[Any]
    outputs: list[Any]
    body: Any
    rows: int | None
    splits: tuple[Split, ...]
    row_axes: tuple[str, ...]

    @staticmethod
    def of(
        regions: Regions,
        region: list[int],
        bodies: dict[str, Any],
        splits: dict[Any, Split],
    ) -> "_Work":
        """A region of the jaxpr."""
        first = regions.eqns[region[0]]
        body, rows = bodies.get(first.params.get("name")), None
        if body is None:
            inputs, outputs = regions.inputs(region), regions.outputs(region)
            body = regions.body(region)
        else:
            inputs, outputs = first.invars, first.outvars
            rows = first.invars[0].aval.shape[0]
        found = [splits[x] if x in splits else ((),) * x.aval.ndim for x in inputs]
        if rows is None:
            return _Work(region, inputs, outputs, body, None, tuple(found), ())
        largest = max(range(len(inputs)), key=lambda i: inputs[i].aval.size)
        row_axes = found[largest][0]
        found = [
            tuple(tuple(a for a in axes if a not in row_axes) for axes in split[1:])
            for split in found
        ]
        return _Work(region, inputs, outputs, body, rows, tuple(found), row_axes)

    def kind(self) -> Any:
        """What is the same for those that are dealt out together.

        The text of a jaxpr does not have the values of constants inside, such as a mask.
        """
        parts = (part for part, _ in all_jaxprs(self.body))
        constants = [id(x) for part in parts for x in getattr(part, "consts", ())]
        return str(self.body.jaxpr), *constants, self.splits, self.row_axes


class _Deal(NamedTuple):
    """How some matrices of one kind are dealt out, and computed.

    - `works`: what is to be computed.
    - `free`: the mesh axes that split none of it, and whose devices share the work.
    - `axes`: those that split some of it. Owners are in the order of both.
    """

    works: list[_Work]
    mesh: Mesh
    free: tuple[str, ...]
    axes: tuple[str, ...]

    @staticmethod
    def of(works: list[_Work], mesh: Mesh) -> "_Deal | None":
        """A way to deal them out, unless they had better stay where they are."""
        body, splits, row_axes = works[0].body, works[0].splits, works[0].row_axes
        rows = sum(work.rows or 1 for work in works) // _size(mesh, row_axes)
        largest = max(range(len(splits)), key=lambda i: body.in_avals[i].size)
        # Its axes first, so that the others follow in its order.
        entries = [axes for i in (largest, *range(len(splits))) for axes in splits[i]]
        axes = [*dict.fromkeys(axis for entry in entries for axis in entry)]
        free: list[str] = []
        for axis in reversed(mesh.axis_names):
            few = _size(mesh, (*free, *axes)) >= rows
            if few or body.in_avals[largest].size < _MIN_SIZE:
                break
            if mesh.shape[axis] > 1 and axis not in (*axes, *row_axes):
                free.insert(0, axis)
        starts = [axes.index(entry[0]) if entry else 0 for entry in entries]
        in_order = all(
            tuple(axes[start : start + len(entry)]) == entry
            for start, entry in zip(starts, entries)
        )
        # Those of experts are already dealt out, as one stack of a layer.
        odd = "expert" in axes or any(map(is_key, body.in_avals))
        # What says itself where it is, stays there.
        odd |= any(eqn.primitive.name in _PLACED for eqn in equations(body))
        if rows < 2 or not (free or axes) or not in_order or odd:
            return None
        return _Deal(works, mesh, tuple(free), tuple(axes))

    def __call__(self, *args: Array) -> list[Array]:
        works, row_axes = self.works, self.works[0].row_axes
        specs = [make_spec((row_axes, *split)) for split in works[0].splits]
        outs = [make_spec((row_axes, *split)) for split in self._out_splits()]
        compute = jax.shard_map(
            self._on_device,
            mesh=self.mesh,
            in_specs=tuple(specs * len(works)),
            out_specs=outs * len(works),
            check_vma=False,
        )
        single = [work.rows is None for work in works]
        args = tuple(x[None] if single[i // len(specs)] else x for i, x in enumerate(args))
        results = enumerate(compute(*args))
        return [x[0] if single[i // len(outs)] else x for i, x in results]

    def _out_splits(self) -> list[Split]:
        """Each result is stored as an input of its shape is."""
        body, splits = self.works[0].body, self.works[0].splits
        known = {x.shape: split for x, split in zip(body.in_avals, splits)}
        outs = body.out_avals
        return [known[x.shape] if x.shape in known else ((),) * x.ndim for x in outs]

    def _on_device(self, *args: Array) -> list[Array]:
        """The work of one device."""
        works, width = self.works, len(self.works[0].splits)
        ends = [*itertools.accumulate(x.shape[0] for x in args[::width])]
        compute = core.jaxpr_as_fun(works[0].body)
        mine = [
            self._to_owners(jnp.concatenate(args[i::width]), split)
            for i, split in enumerate(works[0].splits)
        ]
        outs = jax.lax.map(lambda one: compute(*one), mine)
        outs = [
            self._to_storage(x, split, ends[-1])
            for x, split in zip(outs, self._out_splits(), strict=True)
        ]
        return [x[i:end] for i, end in zip([0, *ends], ends) for x in outs]

    def _to_owners(self, x: Array, split: Split) -> Array:
        """Of so many arrays, the parts that this device has, those that it owns, whole."""
        for axis in self.free:
            x = self._share(_padded(x, self.mesh.shape[axis]), (axis,))
        x = _padded(x, _size(self.mesh, self.axes))
        for axes, dim in self._steps(split):
            if dim is None:
                x = self._share(x, axes)
            else:
                x = jax.lax.all_to_all(x, axes, 0, dim, tiled=True)
        return x

    def _to_storage(self, x: Array, split: Split, rows: int) -> Array:
        """The inverse."""
        for axes, dim in reversed(self._steps(split)):
            if dim is None:
                x = jax.lax.all_gather(x, axes, tiled=True)
            else:
                x = jax.lax.all_to_all(x, axes, dim, 0, tiled=True)
        counts = [rows]
        for axis in self.free:
            counts.append(-(-counts[-1] // self.mesh.shape[axis]))
        x = x[: counts.pop()]
        for axis in reversed(self.free):
            # Without what was only there to fill up.
            x = jax.lax.all_gather(x, axis, tiled=True)[: counts.pop()]
        return x

    def _steps(self, split: Split) -> list[tuple[tuple[str, ...], int | None]]:
        """Groups of axes, in order, each with the dim that they split, if they do."""
        dims = {axes: d + 1 for d, axes in enumerate(split) if axes}
        entry_of = {axis: axes for axes in dims for axis in axes}
        steps = dict.fromkeys(entry_of.get(axis, (axis,)) for axis in self.axes)
        return [(axes, dims.get(axes)) for axes in steps]

    def _share(self, x: Array, axes: tuple[str, ...]) -> Array:
        count = x.shape[0] // _size(self.mesh, axes)
        start = jax.lax.axis_index(axes) * count
        return jax.lax.dynamic_slice_in_dim(x, start, count)


def _padded(x: Array, multiple: int) -> Array:
    """Arrays of a number that divides: the last is there more than once."""
    more = -x.shape[0] % multiple
    return jnp.concatenate([x, *[x[-1:]] * more]) if more else x


def _size(mesh: Mesh, axes: Iterable[str]) -> int:
    """How many devices some axes have."""
    return math.prod(mesh.shape[axis] for axis in axes)
