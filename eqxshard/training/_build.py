"""Make the arrays of a traced function, each by a small program of its own.

XLA takes more than twice as long for one program of twice as many arrays. So small values,
above all keys, are computed at once, and each array that is left gets a program with
those values as arguments. Equal layers have equal programs, which are compiled once.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ..sharding._combinators import HOST_MEMORY
from ..sharding._leaves import is_key
from .rewrite._jaxprs import jaxprs_in, map_jaxpr, open_jaxpr

#: The most elements of a small value. Keys and integers are the same wherever they are
#: computed; what is rounded stays with the computation that needs it, unless it is tiny.
_SMALL, _TINY = 2**16, 2**10
#: How many programs may run at a time: each needs memory, and simulated devices block.
_IN_FLIGHT = 8


def build_arrays(
    equations: Sequence[Any],
    known: Mapping[Any, Any],
    outputs: Sequence[Any],
    shardings: Sequence[NamedSharding],
) -> list[Array]:
    """Evaluate equations, without making a large array whole.

    **Arguments:**

    - `equations`: those of a jaxpr, or of several in a row.
    - `known`: the values of the variables that no equation computes.
    - `outputs`: the variables, or literals, to return.
    - `shardings`: the sharding of each output, all on one mesh.

    **Returns:**

    The outputs. None shares memory with another, or with what was known.
    """
    mesh = shardings[0].mesh
    equations, known, outputs = _inline(equations, known, outputs)
    # Not on the mesh, where each small computation would be one of all processes.
    with jax.default_device(next(iter(mesh.local_devices or ()), None)):
        values = {variable: _uncommitted(value) for variable, value in known.items()}
        equations = _compute_small(_needed(equations, outputs), values)
    wanted: dict[Any, NamedSharding] = {}
    for output, sharding in zip(outputs, shardings, strict=True):
        if _is_variable(output) and output not in values:
            wanted.setdefault(output, sharding)
    programs = _Programs(NamedSharding(mesh, PartitionSpec()))
    for group in _groups(equations, wanted, values):
        programs.run([equations[i] for i in group], values, wanted)
    arrays, taken = [], set()
    for output, sharding in zip(outputs, shardings, strict=True):
        if _is_variable(output) and output in wanted and output not in taken:
            taken.add(output)
            arrays.append(values[output])
        else:
            arrays.append(programs.copy(_read(output, values), sharding))
    return arrays


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _read(atom: Any, values: Mapping[Any, Any]) -> Any:
    if _is_variable(atom):
        return values[atom]
    value = np.asarray(atom.val, atom.aval.dtype)
    # A number of Python's is of a weak type, which a counter may rely on.
    return jnp.asarray(value.item()) if atom.aval.weak_type else value


def _variables(eqn: Any) -> list[Any]:
    """The variables that an equation reads."""
    return [atom for atom in eqn.invars if _is_variable(atom)]


def _is_small(aval: Any) -> bool:
    inexact = jnp.issubdtype(aval.dtype, jnp.inexact)
    return aval.size <= (_TINY if inexact else _SMALL)


def _uncommitted(value: Any) -> Any:
    """A small value as NumPy, or as keys, which may be computed with on any device."""
    if value.size > _SMALL or not getattr(value, "is_fully_addressable", True):
        return value
    if is_key(value):
        data = np.asarray(jax.random.key_data(value))
        return jax.random.wrap_key_data(jnp.asarray(data), impl=value.dtype)
    return np.asarray(value)


def _inline(
    equations: Sequence[Any], known: Mapping[Any, Any], outputs: Sequence[Any]
) -> tuple[list[Any], dict[Any, Any], list[Any]]:
    """Take apart jitted functions that make several arrays, such as a whole model."""
    flat: list[Any] = []
    known = dict(known)
    new_variable: Any = core.gensym()

    def read(atoms: Sequence[Any], names: Mapping[Any, Any]) -> list[Any]:
        return [names.get(x, x) if _is_variable(x) else x for x in atoms]

    def add(equations: Sequence[Any], names: dict[Any, Any]) -> None:
        for eqn in equations:
            inputs = read(eqn.invars, names)
            if _makes_several(eqn):
                called = eqn.params["jaxpr"]
                jaxpr = open_jaxpr(called)
                inside = dict(zip(jaxpr.invars, inputs, strict=True))
                for variable, value in zip(jaxpr.constvars, called.consts, strict=True):
                    inside[variable] = new_variable(variable.aval)
                    known[inside[variable]] = value
                add(jaxpr.eqns, inside)
                outvars = read(jaxpr.outvars, inside)
            else:
                outvars = [new_variable(v.aval) for v in eqn.outvars]
                flat.append(eqn.replace(invars=inputs, outvars=outvars))
            names |= zip(eqn.outvars, outvars, strict=True)

    names: dict[Any, Any] = {}
    add(equations, names)
    return flat, known, read(outputs, names)


def _makes_several(eqn: Any) -> bool:
    """Whether an equation calls a jitted function that returns several arrays."""
    if eqn.primitive.name not in ("jit", "pjit") or len(eqn.outvars) < 2:
        return False
    given = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    return not any(isinstance(each, jax.sharding.Sharding) for each in given)


def _needed(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The equations that outputs depend on, or that do something, such as to print."""
    needed = {*filter(_is_variable, outputs)}
    kept = []
    for eqn in reversed(equations):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(_variables(eqn))
            kept.append(eqn)
    return kept[::-1]


def _compute_small(equations: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    """Add what can be computed of small values alone; return the other equations."""
    left = []
    for eqn in equations:
        read = _variables(eqn)
        at_hand = all(v in values and v.aval.size <= _SMALL for v in read)
        if at_hand and all(_is_small(v.aval) for v in eqn.outvars):
            inputs = [_read(atom, values) for atom in eqn.invars]
            values.update(zip(eqn.outvars, _compute(eqn, inputs), strict=True))
        else:
            left.append(eqn)
    return left


def _compute(eqn: Any, inputs: list[Any]) -> list[Any]:
    if eqn.primitive.name == "slice" and {*(eqn.params["strides"] or (1,))} == {1}:
        # Compiled for all slices of one size, such as the keys of layers.
        starts = [*map(np.int32, eqn.params["start_indices"])]
        return [jax.lax.dynamic_slice(inputs[0], starts, eqn.outvars[0].aval.shape)]
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _groups(
    equations: Sequence[Any], wanted: Mapping[Any, Any], values: Mapping[Any, Any]
) -> list[list[int]]:
    """The numbers of the equations of each program, in order.

    What is wanted is in one program with all that it is computed from. Programs that share
    an equation are one.
    """
    producers = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
    owners: dict[int, set[int]] = {}
    effects = [i for i, eqn in enumerate(equations) if eqn.effects]
    for root in [*(producers[v] for v in wanted), *effects]:
        group: set[int] = set()
        stack = [root]
        while stack:
            i = stack.pop()
            owner = owners.get(i)
            if owner is None:
                owners[i] = group
                group.add(i)
                read = _variables(equations[i])
                stack += [producers[v] for v in read if v not in values]
            elif owner is not group:
                group, smaller = sorted((group, owner), key=len, reverse=True)
                group |= smaller
                owners.update(dict.fromkeys(smaller, group))
    groups = {id(group): sorted(group) for group in owners.values()}
    return [*groups.values()]


class _Programs:
    """Compiled programs, each for all arrays that are made alike.

    **Arguments:**

    - `whole`: the sharding of what every device needs all of.
    """

    def __init__(self, whole: NamedSharding):
        self._whole = whole
        self._compiled: dict[Any, Any] = {}
        self._running: deque[Any] = deque()

    def run(
        self, equations: Sequence[Any], values: dict[Any, Any], wanted: Mapping[Any, Any]
    ) -> None:
        """Add what is wanted of some equations to `values`."""
        outvars = [v for eqn in equations for v in eqn.outvars]
        read = dict.fromkeys(v for eqn in equations for v in _variables(eqn))
        invars = [v for v in read if v not in {*outvars}]
        outvars = [v for v in outvars if v in wanted]
        parts = {"invars": invars, "outvars": outvars, "eqns": [*equations]}
        empty = jax.make_jaxpr(lambda: ())()
        jaxpr = map_jaxpr(lambda empty: empty.replace(**parts), empty)
        # Whatever its variables are called.
        what = (str(jaxpr), *map(id, _consts(jaxpr)))
        inputs = [self._input(values[v], self._whole) for v in invars]
        shardings = [wanted[v] for v in outvars]
        arrays = self._call(what, core.jaxpr_as_fun(jaxpr), inputs, shardings)
        values.update(zip(outvars, arrays, strict=True))

    def copy(self, value: Any, sharding: NamedSharding) -> Array:
        """A copy of an array, in its place on the mesh."""
        given = self._input(value, sharding)
        aval = (value.shape, value.dtype)
        (array,) = self._call(aval, lambda x: [x], [given], [sharding])
        return array

    def _call(
        self, what: Any, fn: Any, inputs: Sequence["_Input"], shardings: list[NamedSharding]
    ) -> list[Array]:
        def make_arrays(*given: Any) -> list[Array]:
            typed = [
                x if each.impl is None else jax.random.wrap_key_data(x, impl=each.impl)
                for x, each in zip(given, inputs)
            ]
            typed = [
                jax.device_put(x, jax.memory.Space.Device)
                if each.sharding.memory_kind == HOST_MEMORY
                else x
                for x, each in zip(typed, inputs)
            ]
            # What is returned must not be what was given.
            return [jnp.copy(x) for x in fn(*typed)]

        key = (what, tuple((x.sharding, x.impl) for x in inputs), tuple(shardings))
        program = self._compiled.get(key)
        if program is None:
            program = self._compiled[key] = jax.jit(
                make_arrays,
                in_shardings=tuple(x.sharding for x in inputs),
                out_shardings=shardings,
            )
        arrays = program(*(x.value for x in inputs))
        self._running.append(arrays)
        if len(self._running) > _IN_FLIGHT:
            jax.block_until_ready(self._running.popleft())
        return arrays

    def _input(self, value: Any, there: NamedSharding) -> "_Input":
        """What to give to a program for a value, which is put `there` unless it is."""
        sharding = getattr(value, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == there.mesh:
            return _Input(value, sharding)
        impl = value.dtype if is_key(value) else None
        data = np.asarray(jax.random.key_data(value) if is_key(value) else value)
        if not there.is_fully_replicated:
            # From several processes, jit takes only what each device needs all of.
            data = jax.make_array_from_callback(data.shape, there, data.__getitem__)
        elif getattr(value, "weak_type", False) and not value.ndim:
            data = data.item()
        return _Input(data, there, impl)


class _Input(NamedTuple):
    """An array for a program, its sharding, and the type of keys that it holds."""

    value: Any
    sharding: NamedSharding
    impl: Any = None


def _consts(jaxpr: Any) -> list[Any]:
    """The constants in the jaxprs inside of a jaxpr, which its text does not show."""
    found = []
    for eqn in open_jaxpr(jaxpr).eqns:
        for part in jaxprs_in(eqn.params):
            found += [*getattr(part, "consts", ()), *_consts(part)]
    return found
