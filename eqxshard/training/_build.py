"""Make the arrays of traced functions, each by a small program of its own.

XLA takes more than twice as long for one program of twice as many arrays. So small values,
above all keys, are computed at once, and each array that is left gets a program with
those values as arguments. Equal layers have equal programs, which are compiled once.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..sharding._explicit import auto_mesh, auto_sharding, with_types
from ..sharding._leaves import is_inexact, is_key
from ..sharding._mesh import is_on_cpus
from ._jit import cpu_options
from .rewrite._jaxprs import all_jaxprs, map_jaxpr, open_jaxpr

#: The most elements of a small value. Keys and integers are the same wherever they are
#: computed; what is rounded stays with the computation that needs it, unless it is tiny.
_SMALL, _TINY = 2**16, 2**10
#: How many programs may run at a time: each needs memory, and simulated devices block.
_IN_FLIGHT = 8
#: At its default level, LLVM takes up to four times as long to compile code no faster.
_LEVEL = {"xla_backend_optimization_level": 1}


class ArrayBuilder:
    """The equations of traced functions that call one another, and what they make.

    No large array is ever whole on one device.
    """

    def __init__(self):
        self._equations: list[Any] = []
        self._known: dict[Any, Any] = {}
        self._new_variable: Any = core.gensym()

    def call(self, fn: Any, inputs: Sequence[Any]) -> list[Any]:
        """Add the equations of a traced function.

        **Arguments:**

        - `fn`: a closed jaxpr. Jitted functions in it that make several arrays, such as a
            whole model, are taken apart.
        - `inputs`: variables and literals that another call returned, or values.

        **Returns:**

        Its outputs: variables and literals.
        """
        jaxpr = open_jaxpr(fn)
        names: dict[Any, Any] = {}
        variables, given = (*jaxpr.constvars, *jaxpr.invars), (*fn.consts, *inputs)
        for variable, value in zip(variables, given, strict=True):
            if not isinstance(value, core.Var | core.Literal):
                names[variable] = self._new_variable(variable.aval)
                self._known[names[variable]] = value
            else:
                names[variable] = value

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [names[x] if _is_variable(x) else x for x in atoms]

        for eqn in jaxpr.eqns:
            if _makes_several(eqn):
                outvars = self.call(eqn.params["jaxpr"], read(eqn.invars))
            else:
                outvars = [self._new_variable(v.aval) for v in eqn.outvars]
                new = eqn.replace(invars=read(eqn.invars), outvars=outvars)
                self._equations.append(new)
            names |= zip(eqn.outvars, outvars, strict=True)
        return read(jaxpr.outvars)

    def build(
        self, outputs: Sequence[Any], shardings: Sequence[NamedSharding]
    ) -> list[Array]:
        """Evaluate the equations.

        **Arguments:**

        - `outputs`: the variables and literals to return.
        - `shardings`: the sharding of each, all on one mesh.

        **Returns:**

        The arrays. None shares memory with another, or with what was given.
        """
        places = [auto_sharding(sharding) for sharding in shardings]
        mesh: Any = places[0].mesh
        equations = _needed(self._equations, outputs)
        # Not on the mesh, where each small computation would be one of all processes.
        with jax.default_device(next(iter(mesh.local_devices or ()), None)):
            values = {v: _off_mesh(x, mesh) for v, x in self._known.items()}
            equations = _compute_small(equations, values, {*filter(_is_variable, outputs)})
        pairs = list(zip(outputs, places, strict=True))
        wanted: dict[Any, NamedSharding] = {}
        for output, sharding in pairs:
            if _is_variable(output) and output not in values:
                wanted.setdefault(output, sharding)
        programs = _Programs(mesh)
        constants: list[Any] = []
        for group in _groups(equations):
            if any(v in values for eqn in group for v in _variables(eqn)):
                programs.run(group, values, wanted)
            else:
                constants += group
        # Such as the moments of an optimizer, which compile in no time.
        programs.run(constants, values, wanted)
        arrays = []
        for output, sharding in pairs:
            if _is_variable(output) and wanted.pop(output, None) is not None:
                arrays.append(values[output])
            else:
                arrays.append(programs.copy(_read(output, values), sharding))
        return [with_types(x, each) for x, each in zip(arrays, shardings, strict=True)]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _variables(eqn: Any) -> list[Any]:
    """The variables that an equation reads."""
    return [atom for atom in eqn.invars if _is_variable(atom)]


def _read(atom: Any, values: Mapping[Any, Any]) -> Any:
    if _is_variable(atom):
        return values[atom]
    return _as_numpy(np.asarray(atom.val, atom.aval.dtype), atom.aval.weak_type)


def _as_numpy(value: Any, weak_type: bool) -> Any:
    # A number of Python's is of a weak type, which a counter may rely on.
    value = np.asarray(value)
    return jnp.asarray(value.item()) if weak_type and not value.ndim else value


def _off_mesh(value: Any, mesh: Mesh) -> Any:
    """A value that may be computed with on any device, unless it is large and on a mesh."""
    sharding: Any = getattr(value, "sharding", None)
    on_mesh = isinstance(sharding, NamedSharding) and auto_mesh(sharding.mesh) == mesh
    if on_mesh and (value.size > _SMALL or not value.is_fully_addressable):
        return with_types(value, auto_sharding(sharding))
    if is_key(value):
        data = np.asarray(jax.random.key_data(value))
        return jax.random.wrap_key_data(jnp.asarray(data), impl=value.dtype)
    return _as_numpy(value, getattr(value, "weak_type", False))


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


def _compute_small(
    equations: Sequence[Any], values: dict[Any, Any], outputs: set[Any]
) -> list[Any]:
    """Add what can be computed of small values alone; return the other equations."""

    def is_small(variable: Any) -> bool:
        if not is_inexact(jax.ShapeDtypeStruct((), variable.aval.dtype)):
            return variable.aval.size <= _SMALL
        return variable.aval.size <= _TINY and variable not in outputs

    left = []
    for eqn in equations:
        at_hand = all(v in values and v.aval.size <= _SMALL for v in _variables(eqn))
        if at_hand and all(map(is_small, eqn.outvars)):
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


def _groups(equations: Sequence[Any]) -> list[list[Any]]:
    """The equations of each program: those that depend on one another."""
    producers = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
    groups = [[i] for i in range(len(equations))]
    for i, eqn in enumerate(equations):
        for j in (producers[v] for v in _variables(eqn) if v in producers):
            if groups[i] is not groups[j]:
                smaller, group = sorted((groups[i], groups[j]), key=len)
                group += smaller
                for k in smaller:
                    groups[k] = group
    unique = {id(group): sorted(group) for group in groups}
    return [[equations[i] for i in group] for group in unique.values()]


class _Programs:
    """Compiled programs on a mesh, each for all arrays that are made alike."""

    def __init__(self, mesh: Mesh):
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._options = cpu_options(**_LEVEL) if is_on_cpus(mesh) else None
        self._jitted: dict[Any, Any] = {}
        self._running: deque[Any] = deque()
        self._empty = jax.make_jaxpr(lambda: ())()

    def run(
        self,
        equations: Sequence[Any],
        values: dict[Any, Any],
        wanted: Mapping[Any, NamedSharding],
    ) -> None:
        """Add what is wanted of some equations to `values`."""
        made = dict.fromkeys(v for eqn in equations for v in eqn.outvars)
        read = dict.fromkeys(v for eqn in equations for v in _variables(eqn))
        invars = [v for v in read if v not in made]
        outvars = [v for v in made if v in wanted]
        parts = {"invars": invars, "outvars": outvars, "eqns": [*equations]}
        jaxpr = map_jaxpr(lambda empty: empty.replace(**parts), self._empty)
        # Whatever its variables are called; its text does not show constants.
        inside = (
            each for part, _ in all_jaxprs(jaxpr) for each in getattr(part, "consts", ())
        )
        what = (str(jaxpr), *map(id, inside))
        inputs, shardings = [values[v] for v in invars], [wanted[v] for v in outvars]
        arrays = self._call(what, core.jaxpr_as_fun(jaxpr), inputs, shardings)
        values.update(zip(outvars, arrays, strict=True))

    def copy(self, value: Any, sharding: NamedSharding) -> Array:
        """A copy of an array, in its place on the mesh."""
        if isinstance(value, np.ndarray):
            # From several processes, jit takes only what each device needs all of.
            place = NamedSharding(sharding.mesh, sharding.spec)
            value = jax.make_array_from_callback(value.shape, place, value.__getitem__)
        return self._call("copy", lambda x: [x], [value], [sharding])[0]

    def _call(
        self, what: Any, fn: Any, inputs: Sequence[Any], shardings: Sequence[NamedSharding]
    ) -> list[Array]:
        places = [getattr(x, "sharding", None) for x in inputs]
        places = tuple(
            x if isinstance(x, NamedSharding) else self._replicated for x in places
        )
        key = (what, places, tuple(shardings))
        if key not in self._jitted:

            def make_arrays(*given: Any) -> list[Array]:
                # What is returned must not be what was given.
                return [jnp.copy(x) for x in fn(*given)]

            self._jitted[key] = jax.jit(
                make_arrays,
                in_shardings=places,
                out_shardings=list(shardings),
                compiler_options=self._options,
            )
        arrays = self._jitted[key](*inputs)
        self._running.append(arrays)
        if len(self._running) > _IN_FLIGHT:
            jax.block_until_ready(self._running.popleft())
        return arrays
