"""Compile and run parts of jaxprs: one program for all parts that compute the same.

Next door, `_build.py` decides which parts those are.
"""

import enum
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from .._jax import Literal, context_of, jaxpr_as_fun
from ..sharding._leaves import as_weak_as, is_key
from .rewrite._jaxprs import as_jaxpr, consts_of, is_jaxpr, open_jaxpr

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
        #: By what they compute and where: a function, and when it will be compiled.
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
        - `inputs`: arrays, or of what is on the host what `to_host` returned.

        **Returns:**

        Their outputs.
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
        # JAX 0.10 calls what was compiled with no numbers of less than eight bits.
        return program(*inputs) if any(map(_is_narrow, inputs)) else compiled(*inputs)


def _is_narrow(x: Any) -> bool:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.iinfo(x.dtype).bits < 8
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8


def _as_function(jaxprs: Sequence[Any], to_host: bool) -> Any:
    """A function of all inputs of jaxprs that returns all their outputs."""
    # What is returned must not be what was given.
    finish = _key_data if to_host else jnp.copy

    def make_arrays(*inputs: Any) -> list[Array]:
        made, left = [], iter(inputs)
        for jaxpr in jaxprs:
            # A number of Python's is of a weak type, which a counter may rely on.
            given = [as_weak_as(as_key(next(left), aval), aval) for aval in jaxpr.in_avals]
            made += jaxpr_as_fun(jaxpr)(*given)
        return [finish(x) for x in made]

    return make_arrays


def sharding_of(value: Any) -> Sharding | None:
    """The sharding of an input of a program; none if it is on the host."""
    return value.sharding if isinstance(value, jax.Array) else None


def to_host(value: Any) -> np.ndarray:
    """A small value as programs take it: of a key, its data."""
    return np.asarray(_key_data(value))


def _on_host(aval: Any) -> Any:
    """The shape and type of what `to_host` returns."""
    like = _like(aval)
    return jax.eval_shape(jax.random.key_data, like) if is_key(aval) else like


def _like(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _key_data(value: Any) -> Any:
    return jax.random.key_data(value) if is_key(value) else value


def as_key(value: Any, aval: Any) -> Any:
    """The keys whose data `to_host` returned; of anything else, the value itself."""
    if is_key(aval) and not is_key(value):
        return jax.random.wrap_key_data(value, impl=aval.dtype)
    return value


class Identities:
    """Numbers equations, such that equal numbers mean equal results.

    Equations with equal numbers apply the same primitives, with the same parameters, to
    inputs in the same places, whatever the variables are called and whichever line of code
    the equations are from. Of parameters whose meaning is not known here, and of constants,
    only the very same object is the same.
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
    """A number of a literal."""
    array = np.asarray(value)
    return array.dtype, array.tobytes()
