"""Make the arrays of traced functions, by programs of a few arrays each.

XLA takes more than twice as long for one program of twice as many arrays, and equal layers
can share programs. So small values, above all keys, are computed first, on one device. The
other equations fall into parts that need nothing of one another, mostly one for each array.
A program makes one or more parts of each layer from those values; all layers call it.

`ArrayBuilder` decides which parts those are. `Programs` compiles and runs one program for
all parts that compute the same.
"""

import enum
from collections import defaultdict, deque
from collections.abc import Container, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from .._jax import Literal, Var, context_of, gensym, jaxpr_as_fun
from ..sharding._explicit import auto_mesh, auto_sharding, with_types
from ..sharding._leaves import as_weak_as, is_inexact, is_key
from ..sharding._mesh import is_on_cpus
from ._jit import cpu_options
from .rewrite._jaxprs import (
    as_jaxpr,
    consts_of,
    has_shardings,
    is_jaxpr,
    open_jaxpr,
    variables,
)

#: How many calls may run at a time: each needs memory, and simulated devices block.
_IN_FLIGHT = 8
#: Types of parameters that are the same if they are equal and print the same.
_VALUES = bool | int | float | complex | str | bytes | None
#: Types of parameters that are the same if they are equal.
_OBJECTS = np.dtype | enum.Enum | type | Sharding


class Part(NamedTuple):
    """Equations, and the variables that they need and make.

    - `jaxpr`: the equations, without constants.
    - `inputs`, `outputs`: its variables.
    - `identity`: the same for parts that compute the same.
    """

    jaxpr: Any
    inputs: list[Any]
    outputs: list[Any]
    identity: int


class Programs:
    """Compiled programs on some devices."""

    def __init__(
        self, place: Sharding, options: dict[str, Any] | None, compilers: Executor
    ):
        """Compile nothing yet.

        **Arguments:**

        - `place`: where inputs from the host go.
        - `options`: options of the compiler.
        - `compilers`: the threads that it runs in.
        """
        self._place = place
        self._options = options
        self._compilers = compilers
        #: The programs, by what they compute and where, each with its compilation.
        self._compiled: dict[Hashable, tuple[Any, Future[Any]]] = {}
        self._running: deque[list[Array]] = deque()

    def compile(
        self,
        parts: Sequence[Part],
        given: Sequence[Sharding | None],
        places: Sequence[Sharding] | None,
    ) -> "tuple[Any, Future[Any]]":
        """Start to compile parts as one program, unless there is one for such parts.

        **Arguments:**

        - `parts`: the parts.
        - `given`: the sharding of each input: of the first part, then of the next, and so
            on. An input without one is on the host.
        - `places`: the sharding of each output; if there are none, they go to the host.

        **Returns:**

        The program, and a future that is done once it is compiled. Its outputs share no
        memory with one another or with the inputs.
        """
        wanted = None if places is None else tuple(places)
        key = (tuple(part.identity for part in parts), tuple(given), wanted)
        if key not in self._compiled:
            avals = [v.aval for part in parts for v in part.inputs]
            kinds = [_on_host(x) if y is None else _like(x) for x, y in zip(avals, given)]
            program = jax.jit(
                _as_function([part.jaxpr for part in parts], places is None),
                in_shardings=tuple(each or self._place for each in given),
                out_shardings=self._place if places is None else [*places],
                compiler_options=self._options,
            )
            done = self._compilers.submit(program.lower(*kinds).compile)
            self._compiled[key] = program, done
        return self._compiled[key]

    def run(
        self, parts: Sequence[Part], inputs: Sequence[Any], places: Sequence[Sharding]
    ) -> list[Array]:
        """Run the program of parts.

        **Arguments:**

        - `parts`, `places`: as for `compile`.
        - `inputs`: arrays; for values on the host, the results of `to_host`.

        **Returns:**

        The outputs of the parts.
        """
        given = [*map(sharding_of, inputs)]
        arrays = self._call(*self.compile(parts, given, places), inputs)
        self._running.append(arrays)
        if len(self._running) > _IN_FLIGHT:
            jax.block_until_ready(self._running.popleft())
        return arrays

    def compute(self, part: Part, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs of one part on the host, as `to_host` returns them."""
        arrays = self._call(*self.compile([part], [None] * len(inputs), None), inputs)
        return [*map(np.asarray, arrays)]

    def _call(self, program: Any, done: "Future[Any]", inputs: Any) -> list[Array]:
        compiled = done.result()
        # JAX 0.10 cannot call a compiled program with numbers of fewer than eight bits.
        return program(*inputs) if any(map(_is_narrow, inputs)) else compiled(*inputs)


def _is_narrow(x: Any) -> bool:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.iinfo(x.dtype).bits < 8
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8


def _as_function(jaxprs: Sequence[Any], to_host: bool) -> Any:
    """A function of all inputs of jaxprs that returns all their outputs."""
    # An output must not be an input itself.
    finish = _key_data if to_host else jnp.copy

    def make_arrays(*inputs: Any) -> list[Array]:
        made, left = [], iter(inputs)
        for jaxpr in jaxprs:
            # A Python number is of a weak type, which a counter may rely on.
            given = [as_weak_as(as_key(next(left), aval), aval) for aval in jaxpr.in_avals]
            made += jaxpr_as_fun(jaxpr)(*given)
        return [finish(x) for x in made]

    return make_arrays


def sharding_of(value: Any) -> Sharding | None:
    """The sharding of an input of a program; none if it is on the host."""
    return value.sharding if isinstance(value, jax.Array) else None


def to_host(value: Any) -> np.ndarray:
    """A small value as programs take it, a NumPy array; of keys, their data."""
    return np.asarray(_key_data(value))


def _on_host(aval: Any) -> Any:
    """The shape and type of a result of `to_host`."""
    like = _like(aval)
    return jax.eval_shape(jax.random.key_data, like) if is_key(aval) else like


def _like(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _key_data(value: Any) -> Any:
    return jax.random.key_data(value) if is_key(value) else value


def as_key(value: Any, aval: Any) -> Any:
    """Keys made of the data that `to_host` returned; any other value as it is."""
    if is_key(aval) and not is_key(value):
        return jax.random.wrap_key_data(value, impl=aval.dtype)
    return value


class Identities:
    """Numbers equations, such that equal numbers mean equal results.

    Equations with equal numbers apply the same primitives, with the same parameters, to
    inputs in the same places, whatever the variables are called and whichever line of code
    the equations are from. Parameters whose meaning is not known here, and constants, are
    the same only if they are one object.
    """

    def __init__(self):
        self._numbers: dict[Hashable, int] = {}
        # The numbers of jaxprs inside of equations: often one object in all equal layers.
        self._known: dict[Any, int] = {}

    def part(
        self, equations: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> Part:
        """Equations as a part."""
        jaxpr = as_jaxpr(equations, inputs, outputs)
        return Part(jaxpr, [*inputs], [*outputs], self._of(jaxpr))

    def _of(self, jaxpr: Any) -> int:
        inside = open_jaxpr(jaxpr)
        places: dict[Any, int] = {}
        for variable in (*inside.constvars, *inside.invars):
            places[variable] = len(places)

        def read(atoms: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(
                (_bits(x.val), x.aval) if isinstance(x, Literal) else places[x]
                for x in atoms
            )

        equations = []
        for eqn in inside.eqns:
            inputs, params = read(eqn.invars), self._value(eqn.params)
            for variable in eqn.outvars:
                places[variable] = len(places)
            # JAX has one object for each context, such as of `jax.threefry_partitionable`.
            equations.append((eqn.primitive, params, inputs, context_of(eqn)))
        avals = tuple(variable.aval for variable in places)
        consts = self._value([*consts_of(jaxpr)])
        key = (avals, consts, tuple(equations), read(inside.outvars))
        return self._numbers.setdefault(key, len(self._numbers))

    def _value(self, part: Any) -> Hashable:
        """A stand-in for a parameter, equal to those of parameters that are the same."""
        if is_jaxpr(part):
            if part not in self._known:
                self._known[part] = self._of(part)
            return "jaxpr", self._known[part]
        if isinstance(part, dict):
            names = sorted(part, key=repr)
            return dict, tuple((name, self._value(part[name])) for name in names)
        if isinstance(part, tuple | list):
            return type(part), tuple(map(self._value, part))
        if isinstance(part, _VALUES):
            # Zeros of both signs are equal.
            return type(part), repr(part)
        return part if isinstance(part, _OBJECTS) else _Itself(part)


class _Itself:
    """Any object, which equals itself alone."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return object.__hash__(self._value)


def _bits(value: Any) -> Hashable:
    """The dtype and the bits of a literal: 0 and -0 differ, and nan equals itself."""
    array = np.asarray(value)
    return array.dtype, array.tobytes()


#: The most elements of a small value. Keys and integers are the same wherever they are
#: computed; numbers that are rounded stay with the computation that needs them, unless they
#: are tiny.
_SMALL, _TINY = 2**16, 2**10
#: The most parts of a program, and the most elements that its equations make, on all
#: devices together. A part that makes more is a program of its own.
_PARTS, _ELEMENTS = 16, 2**24
#: About how many constant arrays a program makes: they compile fast.
_CONSTANTS = 64
#: How many programs are compiled at a time.
_COMPILERS = 8
#: At LLVM's default level, compiling takes up to four times as long, for code no faster.
_LEVEL = {"xla_backend_optimization_level": 1}


class ArrayBuilder:
    """The equations of traced functions that call one another, and the arrays they make.

    No large array is ever whole on one device.
    """

    def __init__(self):
        self._equations: list[Any] = []
        self._known: dict[Any, Any] = {}
        self._new_variable: Any = gensym()

    def call(self, fn: Any, inputs: Sequence[Any]) -> list[Any]:
        """Add the equations of a traced function.

        **Arguments:**

        - `fn`: a closed jaxpr. Jitted functions in it that make several arrays, such as a
            whole model, are taken apart.
        - `inputs`: variables and literals that another call returned, or values.

        **Returns:**

        The outputs of the function: variables and literals.
        """
        jaxpr = open_jaxpr(fn)
        names: dict[Any, Any] = {}
        takes, given = (*jaxpr.constvars, *jaxpr.invars), (*fn.consts, *inputs)
        for variable, value in zip(takes, given, strict=True):
            if isinstance(value, Var | Literal):
                names[variable] = value
            else:
                names[variable] = self._new_variable(variable.aval)
                self._known[names[variable]] = value

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [x if isinstance(x, Literal) else names[x] for x in atoms]

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

        The arrays. None shares memory with another, or with a value that was given.
        """
        outputs = [*map(self._as_variable, outputs)]
        places = [auto_sharding(sharding) for sharding in shardings]
        mesh: Any = places[0].mesh
        values = {v: _off_mesh(x, mesh) for v, x in self._known.items()}
        # One output may be wanted in several places, and is copied to the later ones.
        firsts: dict[Any, NamedSharding] = {}
        for output, place in zip(outputs, places, strict=True):
            firsts.setdefault(output, place)
        # Programs have devices of their own, not those of a caller's `jax.set_mesh`.
        with jax.set_mesh(None), ThreadPoolExecutor(_COMPILERS) as compilers:
            evaluator = _Evaluator(mesh, values, compilers)
            made = evaluator.make(_needed(self._equations, outputs), firsts)
            arrays = []
            for output, place, sharding in zip(outputs, places, shardings, strict=True):
                array = made.pop(output, None)
                if array is None:
                    array = evaluator.copy(output, place)
                arrays.append(with_types(array, sharding))
        return arrays

    def _as_variable(self, atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return atom
        aval: Any = atom.aval
        variable = self._new_variable(aval)
        self._known[variable] = np.asarray(atom.val, aval.dtype)
        return variable


def _off_mesh(value: Any, mesh: Mesh) -> Any:
    """A value on the host, unless it is on the mesh and large."""
    sharding: Any = getattr(value, "sharding", None)
    on_mesh = isinstance(sharding, NamedSharding) and auto_mesh(sharding.mesh) == mesh
    if on_mesh and (value.size > _SMALL or not value.is_fully_addressable):
        return with_types(value, auto_sharding(sharding))
    return to_host(value)


def _makes_several(eqn: Any) -> bool:
    """True if an equation calls a jitted function that returns several arrays."""
    is_call = eqn.primitive.name in ("jit", "pjit")
    return is_call and len(eqn.outvars) > 1 and not has_shardings(eqn)


def _needed(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The equations that outputs depend on, or that have effects, such as printing."""
    needed = {*outputs}
    kept = []
    for eqn in reversed(equations):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


class _Evaluator:
    """Evaluates equations, some on one device and the others on a mesh."""

    def __init__(self, mesh: Mesh, values: dict[Any, Any], compilers: Executor):
        """Evaluate nothing yet.

        **Arguments:**

        - `mesh`: where large values are made.
        - `values`: the values that are known, on the mesh or as `to_host` returns them.
        - `compilers`: threads to compile in.
        """
        self._values = values
        self._identities = Identities()
        options = cpu_options(**_LEVEL) if is_on_cpus(mesh) else None
        replicated = NamedSharding(mesh, PartitionSpec())
        self._large = Programs(replicated, options, compilers)
        # Not on the mesh, where each small computation would be one of all processes.
        device: Any = [*mesh.local_devices, *jax.local_devices()][0]
        self._small = Programs(SingleDeviceSharding(device), options, compilers)

    def make(
        self, equations: Sequence[Any], places: Mapping[Any, NamedSharding]
    ) -> dict[Any, Array]:
        """Evaluate equations.

        **Arguments:**

        - `equations`: each after those that it needs.
        - `places`: where the outputs go, by variable.

        **Returns:**

        The outputs on the mesh. Those that are small or known are left to `copy`.
        """
        small, large = _split(equations, self._values, places)
        steps = [(eqn, None if _takes(eqn) else self._part([eqn])) for eqn in small]
        calls = _calls([self._part(group, places) for group in _groups(large)])
        # All are compiled at once, and the first run meanwhile.
        for _, part in steps:
            if part is not None:
                self._small.compile([part], [None] * len(part.inputs), None)
        for parts in calls:
            given = [
                sharding_of(self._values.get(v)) for part in parts for v in part.inputs
            ]
            wanted = [places[v] for part in parts for v in part.outputs]
            self._large.compile(parts, given, wanted)
        for eqn, part in steps:
            self._compute(eqn, part)
        made: dict[Any, Array] = {}
        for parts in calls:
            inputs = [self._values[v] for part in parts for v in part.inputs]
            outputs = [v for part in parts for v in part.outputs]
            arrays = self._large.run(parts, inputs, [places[v] for v in outputs])
            made.update(zip(outputs, arrays, strict=True))
        self._values.update(made)
        return made

    def _part(
        self, equations: Sequence[Any], outputs: Container[Any] | None = None
    ) -> Part:
        """Equations as a part that makes some outputs, or all."""
        made = dict.fromkeys(v for eqn in equations for v in eqn.outvars)
        read = dict.fromkeys(v for eqn in equations for v in variables(eqn.invars))
        inputs = [v for v in read if v not in made]
        wanted = [v for v in made if outputs is None or v in outputs]
        return self._identities.part(equations, inputs, wanted)

    def _compute(self, eqn: Any, part: Part | None) -> None:
        """Add the small values that an equation makes."""
        if part is None:
            made = [_take(eqn, self._values[eqn.invars[0]])]
        else:
            made = self._small.compute(part, [self._values[v] for v in part.inputs])
        self._values.update(zip(eqn.outvars, made, strict=True))

    def copy(self, variable: Any, place: NamedSharding) -> Array:
        """A copy of a value, in its place on the mesh."""
        value = self._values[variable]
        if isinstance(value, np.ndarray):
            # With several processes, jit takes a host array only if each device needs all
            # of it.
            parts = NamedSharding(place.mesh, place.spec)
            value = jax.make_array_from_callback(value.shape, parts, value.__getitem__)
            value = as_key(value, variable.aval)
        part = self._identities.part([], [variable], [variable])
        return self._large.run([part], [value], [place])[0]


def _split(
    equations: Sequence[Any], values: Mapping[Any, Any], outputs: Container[Any]
) -> tuple[list[Any], list[Any]]:
    """The equations that compute small values of small values, and the others."""
    at_hand = {
        v for v in values if sharding_of(values[v]) is None and v.aval.size <= _SMALL
    }

    def is_small(variable: Any) -> bool:
        if not is_inexact(jax.ShapeDtypeStruct((), variable.aval.dtype)):
            return variable.aval.size <= _SMALL
        return variable.aval.size <= _TINY and variable not in outputs

    small, large = [], []
    for eqn in equations:
        if at_hand.issuperset(variables(eqn.invars)) and all(map(is_small, eqn.outvars)):
            at_hand.update(eqn.outvars)
            small.append(eqn)
        else:
            large.append(eqn)
    return small, large


def _takes(eqn: Any) -> bool:
    """True if an equation takes a part of a value, such as the key of a layer.

    Each layer takes another part, which would be another program.
    """
    return eqn.primitive.name in ("slice", "squeeze") and bool(variables(eqn.invars))


def _take(eqn: Any, value: np.ndarray) -> np.ndarray:
    """The part that an equation of `_takes` takes of a value on the host."""
    # The data of keys have a dim more, the last, which stays whole.
    if eqn.primitive.name == "squeeze":
        return value.squeeze(eqn.params["dimensions"])
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or [None] * len(starts)
    return value[tuple(map(slice, starts, limits, strides))]


def _groups(equations: Sequence[Any]) -> list[list[Any]]:
    """The equations of each part: those that depend on one another."""
    producers = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
    groups = [[i] for i in range(len(equations))]
    for i, eqn in enumerate(equations):
        for j in (producers[v] for v in variables(eqn.invars) if v in producers):
            if groups[i] is not groups[j]:
                smaller, group = sorted((groups[i], groups[j]), key=len)
                group += smaller
                for k in smaller:
                    groups[k] = group
    unique = [sorted(group) for i, group in enumerate(groups) if min(group) == i]
    return [[equations[i] for i in group] for group in unique]


def _calls(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of each call of a program; many calls are of the same program.

    Which parts share a program does not depend on the mesh, so neither do the values.
    """
    alike: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        alike[part.identity].append(part)
    constants = [kind for kind in alike.values() if not kind[0].inputs]
    calls = _constant_calls(constants)
    # In equal layers, there are equally many of each kind.
    by_count: dict[int, list[list[Part]]] = defaultdict(list)
    for kind in alike.values():
        if kind[0].inputs:
            by_count[len(kind)].append(kind)
    for kinds in by_count.values():
        for batch in _batches(kinds):
            calls += map(list, zip(*batch, strict=True))
    return calls


def _constant_calls(kinds: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """Calls of one program that makes several of each kind, and of one for the rest."""
    count = max(1, sum(map(len, kinds)) // _CONSTANTS)
    calls: list[list[Part]] = [[] for _ in range(count)]
    rest: list[Part] = []
    for kind in kinds:
        each = len(kind) // count
        for i, call in enumerate(calls):
            call += kind[i * each : (i + 1) * each]
        rest += kind[count * each :]
    return [call for call in (*calls, rest) if call]


def _batches(kinds: Sequence[Sequence[Part]]) -> list[list[Sequence[Part]]]:
    """The kinds of parts of each program, within the limits."""
    batches: list[list[Sequence[Part]]] = []
    left = -1
    for kind in kinds:
        size = sum(v.aval.size for eqn in kind[0].jaxpr.eqns for v in eqn.outvars)
        if size > left or len(batches[-1]) == _PARTS:
            batches.append([])
            left = _ELEMENTS
        batches[-1].append(kind)
        left -= size
    return batches
