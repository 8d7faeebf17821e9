"""Parameters on their way from where they are stored to where they are used, and back.

A stored parameter is a value: a `Stored`, which is an array and, as static data, how to
gather it. The user's code is traced with gathered arrays, and then evaluated with the
parameters as they are stored. Where it loops over stacked layers, each in
`jax.checkpoint`, as [`eqxshard.scan_layers`][] does, the loop takes the layers of a
`Stored`, and each iteration gathers one. Every other equation takes gathered arrays.
"""

import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._errors import UsageError, UsageTypeError
from .._jax import jaxpr_as_fun
from ..sharding._explicit import (
    computing_on_auto,
    constrain_to,
    replicated_on,
    to_auto,
    to_explicit,
)
from ..sharding._leaves import leaf_path, stacked_depth
from ..sharding._mesh import batch_sharding
from ..sharding._placement import compute_sharding
from ..sharding._spec import AnyMesh, axes_of
from ._advice import add_advice
from ._precision import Precision, cast
from ._state import state_indices
from .rewrite._guards import mark_gradient
from .rewrite._interpreter import (
    CHECKPOINTS,
    Interpreter,
    is_rewriting,
    looks_for_nan,
    warn_once,
)
from .rewrite._jaxprs import equations, jaxprs_in, open_jaxpr, scan_counts


def call_as_used(
    fn: Callable[..., Any],
    given: Mapping[str, PyTree],
    storage: Mapping[str, PyTree[NamedSharding | None]],
    update: Mapping[str, PyTree[NamedSharding | None]],
    batch: PyTree,
    others: tuple[PyTree, ...],
    mesh: AnyMesh,
    precision: Precision | None,
) -> Any:
    """Call `fn(given, batch, *others)`, all cast, gathered and on the mesh of a step.

    **Arguments:**

    - `fn`: a function that calls the user's code.
    - `given`: a dict of PyTrees, whose entry `model` is the model.
    - `storage`, `update`: dicts like it, with the shardings of the arrays, and of their
        gradients.
    - `batch`: a batch.
    - `others`: more arguments, which are the same on all devices.
    - `mesh`, `precision`: those of the step.

    **Returns:**

    The result of the function.
    """
    if precision is not None:
        batch = precision.cast(batch, "batch")
    used, stored = gather_all(given, storage, update, mesh, precision)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        rows = batch_sharding(mesh)
        typed = jax.tree.map(lambda x: to_explicit(x, rows), batch)
        args = used, typed, *replicated_on(others, mesh)
        try:
            if not any(x is not None and x.may_be_stack for x in stored):
                return to_auto(fn(*args))
            return to_auto(gather_in_loops(fn, args, stored))
        except Exception as error:
            add_advice(error, typed, stateful=bool(state_indices(given["model"])))
            raise


class Stored(eqx.Module):
    """A parameter as it is stored, and how to gather it for use.

    - `array`: the array as it is stored.
    - `storage`: its sharding.
    - `update`: the sharding of its gradient.
    - `dtype`: the type to compute in, if it is another.
    - `is_layer`: whether a loop has taken it out of a stack.
    """

    array: Array
    storage: NamedSharding = eqx.field(static=True)
    update: NamedSharding = eqx.field(static=True)
    dtype: DTypeLike | None = eqx.field(static=True)
    is_layer: bool = eqx.field(static=True, default=False)

    def gather(self) -> Array:
        """The array as it is used: cast, and whole along the axes that split the batch.

        Its gradient goes back in one go: cast, summed over the batch's axes and left
        where the array is updated, which is a reduce-scatter.
        """
        used = compute_sharding(self.storage)
        dtypes = self.array.dtype, self.dtype
        gather = _gather_function(self.storage, self.update, *dtypes)
        with computing_on_auto(used.mesh):
            array = gather(to_auto(self.array))
        return to_explicit(array, used)

    @property
    def is_split(self) -> bool:
        """True if there is something to gather."""
        return compute_sharding(self.storage).spec != self.storage.spec

    @property
    def splits_layers(self) -> bool:
        """True if the first dim, that of layers in a stack, is split."""
        specs = (self.storage.spec, self.update.spec)
        sizes = self.storage.mesh.shape
        return any(sizes[axis] > 1 for spec in specs if spec for axis in axes_of(spec[0]))

    @property
    def may_be_stack(self) -> bool:
        """True if a loop may gather it layer by layer: it may be a stack of matrices.

        For a stack of vectors alone, such as biases, it is not worth tracing code twice.
        """
        return self.is_split and not self.splits_layers and self.array.ndim > 2

    def layers(self) -> "Stored":
        """The stack as a loop takes it apart: with the shardings of one layer."""
        storage, update = (
            NamedSharding(each.mesh, PartitionSpec(*each.spec[1:]))
            for each in (self.storage, self.update)
        )
        return Stored(self.array, storage, update, self.dtype, is_layer=True)


def _gather_function(
    storage: NamedSharding,
    update: NamedSharding,
    dtype: Any,
    compute: DTypeLike | None,
) -> Callable[[Array], Array]:
    """A function that gathers arrays of a dtype, and casts them to the one to compute in.

    It closes over no array: JAX's caches keep functions.
    """
    used = compute_sharding(storage)

    def for_use(array: Array) -> Array:
        if compute is not None and jnp.issubdtype(dtype, jnp.floating):
            # Left to itself, the compiler may gather first: twice the bytes.
            array = array.astype(compute)
            array = constrain_to(array, storage)
        return constrain_to(array, used)

    def back(_: None, grad: Array) -> tuple[Array]:
        grad = constrain_to(mark_gradient(grad), update)
        return (constrain_to(grad.astype(dtype), update),)

    if not jnp.issubdtype(dtype, jnp.inexact):
        return for_use
    gather = jax.custom_vjp(for_use)
    gather.defvjp(lambda array: (for_use(array), None), back)
    return gather


def gather_all(
    model: PyTree,
    storage: PyTree[NamedSharding | None],
    update: PyTree[NamedSharding | None],
    mesh: AnyMesh,
    precision: Precision | None = None,
) -> tuple[PyTree, list[Stored | None]]:
    """PyTrees as they are used: each array gathered along the axes that split the batch.

    **Arguments:** as for `call_as_used`, with `given` as `model`.

    **Returns:**

    The dict with gathered arrays; and a `Stored` for each of its leaves, or `None` for
    those that are not stored on the mesh.
    """
    every: list[Stored | None] = []

    def gather(keys: tuple[Any, ...], leaf: Any, storage: Any, update: Any) -> Any:
        dtype = None if precision is None else precision.compute_type(leaf_path(keys))
        stored = None
        if storage is not None:
            # On the axes that user code sees, where it may loop over layers.
            leaf = to_explicit(leaf, storage)
            stored = Stored(leaf, storage, update or storage, dtype)
        if leaf is not None:
            every.append(stored)
        return replicated_on(cast(leaf, dtype), mesh) if stored is None else stored.gather()

    is_none = lambda leaf: leaf is None  # noqa: E731
    used = jax.tree_util.tree_map_with_path(gather, model, storage, update, is_leaf=is_none)
    return used, every


def gather_in_loops(
    fn: Callable[..., Any], args: Sequence[Any], stored: Sequence[Stored | None]
) -> Any:
    """Call a function of gathered arrays, but gather stacked layers one by one.

    **Arguments:**

    - `fn`: a function of PyTrees.
    - `args`: its arguments, of which the first leaves are those that were gathered.
    - `stored`: from `gather_all`.
    """
    if not is_rewriting() or looks_for_nan():
        return fn(*args)
    leaves, structure = jax.tree.flatten(tuple(args))
    where = [i for i, leaf in enumerate(leaves) if eqx.is_array(leaf)]
    others: list[Any] = []

    def flat(*arrays: Any) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(where, arrays, strict=True))
        out = fn(*jax.tree.unflatten(structure, [*given.values()]))
        found, rest = eqx.partition(out, eqx.is_array)
        others.append(rest)
        return found

    arrays = [leaves[i] for i in where]
    # A mistake in the user's code is raised here.
    jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    loops = _Loops()
    if not loops.are_in(jaxpr):
        if any(eqn.primitive.name == "custom_vjp_call" for eqn in equations(jaxpr)):
            # Its derivative may close over an array of this trace.
            return fn(*args)
        outputs = jaxpr_as_fun(jaxpr)(*arrays)
    else:
        inputs = [(stored[i] if i < len(stored) else None) or leaves[i] for i in where]
        try:
            outputs = loops.evaluate(jaxpr, inputs, dict(enumerate(arrays)))
        except Exception as error:
            warn_once(f"{type(error).__name__}: {error}")
            outputs = jaxpr_as_fun(jaxpr)(*arrays)
    found = jax.tree.unflatten(jax.tree.structure(out), outputs)
    return eqx.combine(found, others[-1])


# Loops over stored layers


class _Loops:
    """The rule for loops over stored layers, and for what passes them on."""

    def __init__(self):
        self._interpreter = Interpreter(
            [self._rule], [_no_rule], plain=_as_array, reads=_reads, differentiated=False
        )

    def are_in(self, jaxpr: Any) -> bool:
        """True if a jaxpr has loops over stacked layers."""
        return any(
            _is_loop(eqn, i)
            for eqn in open_jaxpr(jaxpr).eqns
            for i in range(len(eqn.invars))
        )

    def evaluate(self, jaxpr: Any, inputs: Sequence[Any], arrays: Any = None) -> list[Any]:
        """The outputs of a jaxpr, some of whose inputs are stored."""
        return self._interpreter.evaluate(jaxpr, inputs, arrays)[0]

    def _rule(self, jaxpr: Any) -> dict[int, Any]:
        found = {}
        for i, eqn in enumerate(jaxpr.eqns):
            build = {
                "scan": self._scan,
                "jit": self._interpreter.jit,
                "cond": self._interpreter.cond,
                **dict.fromkeys(CHECKPOINTS, self._interpreter.checkpoint),
            }.get(eqn.primitive.name)
            is_layer = eqn.primitive.name in CHECKPOINTS
            if build and (
                is_layer or any(_is_loop(eqn, n) for n in range(len(eqn.invars)))
            ):
                found[i] = ft.partial(self._if_stored, build, eqn)
        return found

    def _if_stored(self, build: Any, eqn: Any, inputs: list[Any]) -> list[Any] | None:
        return build(eqn, inputs) if any(isinstance(x, Stored) for x in inputs) else None

    def _scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        inputs = [x.layers() if isinstance(x, Stored) else x for x in inputs]
        return self._interpreter.scan(eqn, inputs)


def _as_array(value: Any) -> Any:
    return value.gather() if isinstance(value, Stored) else value


def _no_rule(jaxpr: Any) -> dict[int, Any]:
    """The rule for code per device, which takes gathered arrays: it picks nothing."""
    return {}


def _reads(eqn: Any, i: int, x: Any) -> bool:
    """True if an equation is given an input as it is stored."""
    if not isinstance(x, Stored):
        return False
    if x.is_layer and eqn.primitive.name in CHECKPOINTS:
        return True
    return _is_loop(eqn, i) and not x.splits_layers


def _is_loop(eqn: Any, i: int) -> bool:
    """True if an equation loops over an input for functions in `jax.checkpoint` alone.

    Also if it passes the input on to such a loop. If anything else took parts of the input,
    all of them would be kept for the backward pass once they are gathered.
    """
    name = eqn.primitive.name
    if name == "scan":
        inside = open_jaxpr(eqn.params["jaxpr"])
        readers = _readers(inside, inside.invars[i])
        is_part = i >= sum(scan_counts(eqn)) and inside.invars[i] not in inside.outvars
        return is_part and all(each.primitive.name in CHECKPOINTS for each, _ in readers)
    parts = [*jaxprs_in(eqn.params)] if name in ("jit", "cond", *CHECKPOINTS) else []
    # The first input of a branch is the second of the equation.
    before = 1 if name == "cond" else 0
    return i >= before and any(
        _is_loop(*reader)
        for part in map(open_jaxpr, parts)
        for reader in _readers(part, part.invars[i - before])
    )


def _readers(jaxpr: Any, variable: Any) -> list[tuple[Any, int]]:
    """The equations that read a variable, each with the position of the input."""
    return [
        (eqn, i) for eqn in jaxpr.eqns for i, x in enumerate(eqn.invars) if x is variable
    ]


# Stacked layers

#: A policy of `jax.checkpoint`, or the name of one of ours.
Remat = Literal["none", "dots", "full", "offload"] | Callable[..., Any]

#: Products with weights, but not the scores of each pair of tokens; and attention's output.
_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names("attention"),
)
#: The value by which a policy offloads an operation. It has no public name.
_TO_HOST = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")(
    jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ()))
)


def scan_layers(
    layers: PyTree,
    x: PyTree,
    *args: Any,
    key: PRNGKeyArray | None = None,
    remat: Remat = "full",
) -> PyTree:
    """Apply stacked layers in turn: one layer is compiled, whatever the depth.

    Inside a step, under FSDP, the parameters of one layer at a time are gathered, freed
    before the next layer, and gathered again in the backward pass. (`jax.lax.scan` of
    layers that are not in `jax.checkpoint` would gather all of them at the start of the
    step and keep them to its end.) If the rule splits the dim of layers itself, all are
    gathered at once. Optimizers that look at shapes, such as Muon, go with stacked layers
    through [`eqxshard.per_layer`][].

    **Arguments:**

    - `layers`: a module whose arrays have a leading dim of layers, as made by
        `eqx.filter_vmap(make_layer)(keys)`. Inside a step these must be the model's own
        arrays; change them (cast them, say) inside the layer. All layers of other arrays
        are gathered at once, which lint finds.
    - `x`: the input of the first layer. Each layer returns the input of the next, of the
        same shapes and types.
    - `args`: more arguments, the same for all layers.
    - `key`: a random key; each layer gets one of its own as `key=`.
    - `remat`: which values inside each layer to keep for the backward pass. The others are
        computed again.
        `"full"`: nothing. `"none"`: everything but gathered parameters. `"dots"`: the
        products with weights and the arrays named `"attention"`, as
        [`eqxshard.nn.attention`][] names its output. `"offload"`: the same, in the host's
        memory. (JAX 0.10.1 cannot compile that for several CPU devices.) Or a policy of
        [`jax.checkpoint`][], such as `jax.checkpoint_policies.dots_saveable`.

    **Returns:**

    The output of the last layer.

    **Raises:**

    `TypeError` if the layers cannot be called, such as a list of them; `ValueError` if the
    arrays do not all have the same leading dim, or if `remat` is not one of these.

    !!! Example

        ```python
        class Model(eqx.Module):
            blocks: Block

            def __init__(self, depth, *, key):
                self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, depth))

            def __call__(self, x, key=None):
                return eqxshard.scan_layers(self.blocks, x, key=key)
        ```
    """
    if not callable(layers):
        raise UsageTypeError(
            f"the layers are a {type(layers).__name__}, which cannot be called; stack them "
            "in one module with eqx.filter_vmap(make_layer)(keys)."
        )
    depth = stacked_depth(layers)
    arrays, static = eqx.partition(layers, eqx.is_array)
    # As a pipeline does, so that dropout is the same in both.
    numbers = jnp.arange(depth)
    keys = None if key is None else jax.vmap(ft.partial(jax.random.fold_in, key))(numbers)

    def body(x: PyTree, layer: tuple[PyTree, Array | None]) -> tuple[PyTree, None]:
        arrays, key = layer
        module = eqx.combine(arrays, static)
        return (module(x, *args) if key is None else module(x, *args, key=key)), None

    return jax.lax.scan(_rematerialize(body, remat), x, (arrays, keys))[0]


def _rematerialize(fn: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A function that recomputes what it does not keep for the backward pass.

    It is for the body of a scan, which keeps XLA from undoing it.
    """
    named: dict[Any, Any] = {
        "none": _keep_all_but_gathered,
        "dots": _keep_products,
        "full": None,
        "offload": _offload,
    }
    if not callable(remat) and remat not in named:
        raise UsageError(
            f"unknown remat={remat!r}; use one of 'none', 'dots', 'full' and 'offload', "
            "or a policy of jax.checkpoint."
        )
    policy = remat if callable(remat) else named[remat]
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)


def _keep_all_but_gathered(prim: Any, *avals: Any, **params: Any) -> bool:
    # Weights are gathered by these operations. If their results were kept, all layers would
    # be gathered at once.
    return prim.name not in ("sharding_constraint", "reshard")


def _keep_products(prim: Any, *avals: Any, **params: Any) -> bool:
    # The backward pass of cuDNN's attention needs more of its results than the output.
    cudnn = prim.name.startswith("dot_product_attention_fwd")
    return cudnn or _PRODUCTS(prim, *avals, **params)


def _offload(prim: Any, *avals: Any, **params: Any) -> Any:
    """Keep the results of `_keep_products` in the host's memory."""
    return _TO_HOST if _keep_products(prim, *avals, **params) else False
