"""Where the gradients of parameters are summed over examples, and what in.

XLA sums over devices where it sums over examples: at the product, the sum or the scatter
that makes a gradient, and in the type of its result. A cast of the gradient comes after
that. So each gradient is followed back, from where the step casts it, through what does
not change its values, through loops and calls, to what sums it; that then returns the type
to sum in. Gradients of lookups are also reduced on the way (see `_lookups.py`).

This is a rewrite of the gradient's jaxpr, because the sums are in the user's model. What
is not known here ends the search, such as per-device code (`jax.shard_map`): there a
gradient is summed in the type that it has.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from ..._errors import UsageTypeError
from ...sharding._explicit import is_explicit
from ...sharding._mesh import is_on_cpus
from ...transforms._dtypes import accumulation_dtype
from ._jaxprs import (
    call_function,
    equations,
    jaxprs_in,
    map_jaxpr,
    map_jaxprs_in,
    open_jaxpr,
    scan_counts,
    variables,
)
from ._lookups import LookupGradient, batch_devices, is_split, scatter_rows
from ._rewrite import is_rewriting, looks_for_nan, run_rewritten
from ._types import erase_types

_GRADIENT = "eqxshard_gradient"
#: Operations of which each result is made of entries of the operands, or of their sums.
_MOVES = (
    "add",
    "add_any",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "dynamic_update_slice",
    "name",
    "neg",
    "pad",
    "reshape",
    "rev",
    "select_n",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "sub",
    "transpose",
)
_SUMS = ("conv_general_dilated", "dot_general", "reduce_sum")
_CALLS = ("checkpoint", "closed_call", "jit", "remat2", "scan")
#: Of the moves, the ones whose result has the placement of the gradient.
_IN_PLACE = (
    "add",
    "add_any",
    "convert_element_type",
    "copy",
    "name",
    "sharding_constraint",
)
#: How far a search has come: at the gradient itself; behind a product with other
#: parameters; behind a sum, where activations begin.
_START, _PRODUCT, _SUM = range(3)


class How(NamedTuple):
    """How to sum gradients of 16 bits.

    - `dtype`: the type to sum in; `None` for their own.
    - `devices`: how many devices the examples are split over.
    - `on_cpus`: whether these are CPUs.
    """

    dtype: Any
    devices: int
    on_cpus: bool


def mark_gradient(grad: Array) -> Array:
    """The gradient of a parameter, as the gradient of the model gives it."""
    return checkpoint_name(grad, _GRADIENT)


def sum_gradients(
    gradient: Callable[..., Any],
    shardings: Sequence[NamedSharding],
    reduce: DTypeLike | None,
    overflows: bool,
) -> Callable[..., Any]:
    """Rewrite how a function sums gradients over examples.

    **Arguments:**

    - `gradient`: a function of PyTrees of arrays, that closes over the parameters, and
        marks their gradients.
    - `shardings`: where the gradients are updated.
    - `reduce`: the type to sum gradients of 16 bits in; `None` for their own.
    - `overflows`: whether sums in their own type may overflow, which must not depend on
        the number of devices.

    **Returns:**

    The same function.
    """
    typed = any(is_explicit(sharding.mesh) for sharding in shardings)
    several = overflows or any(sharding.mesh.size > 1 for sharding in shardings)
    if not typed and not (
        several and (reduce is not None or any(map(is_split, shardings)))
    ):
        return gradient

    devices = max(map(batch_devices, shardings))
    on_cpus = all(is_on_cpus(x.mesh) for x in shardings)  # pyright: ignore
    how = How(None if reduce is None else jnp.dtype(reduce), devices, on_cpus)

    def rewrite(jaxpr: Any) -> Any:
        jaxpr = erase_types(jaxpr) if typed else jaxpr
        return map_jaxpr(lambda part: _Sums(part, part.invars, how).rewrite(), jaxpr)

    def summed(*args: Any) -> Any:
        if not is_rewriting() or looks_for_nan():
            return gradient(*args)
        jaxpr, out = jax.make_jaxpr(gradient, return_shape=True)(*args)
        return run_rewritten(rewrite, jaxpr, out, args)[0]

    return summed


class _Sums:
    """The search for sums in one jaxpr, and the jaxpr that it makes of it.

    It goes through the equations from the last to the first: when it comes to one, all
    that use its results have said whether they want them in the type to sum in.

    - `examples`: the variables that may depend on examples; all others are made of
        parameters alone.
    - `how`: how to sum.
    - `given`: the positions of inputs that come in the type to sum in, too.
    - `outside`: whether the search for an input, by its position, finds a sum outside.
    """

    def __init__(
        self,
        jaxpr: Any,
        examples: Iterable[Any],
        how: How,
        given: Iterable[int] = (),
        outside: Callable[[int, int], bool] = lambda index, depth: False,
    ):
        self.jaxpr, self.how, self.outside = jaxpr, how, outside
        self.examples = {*examples}
        self.inputs = {x: i for i, x in enumerate(jaxpr.invars)}
        self.made_by: dict[Any, Any] = {}
        self.used_by: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            if self._of_examples(eqn.invars):
                self.examples.update(eqn.outvars)
            self.made_by.update(dict.fromkeys(eqn.outvars, eqn))
        for eqn in (*jaxpr.eqns, None):
            for x in variables(jaxpr.outvars if eqn is None else eqn.invars):
                self.used_by.setdefault(x, []).append(eqn)
        self.known: dict[tuple[Any, int], bool] = {}
        self.parts: dict[int, list[_Sums]] = {}
        self.new: Any = core.gensym()
        #: What is wanted: as which variable, how far from the gradient, and its sharding.
        self.wanted: dict[Any, tuple[Any, int, NamedSharding | None]] = {}
        self.given = {jaxpr.invars[index] for index in given}
        for var in self.given:
            self.wanted[var] = self._like(var), _START, None
        #: From the last to the first; and what comes before the one at hand.
        self.eqns: list[Any] = []
        self.before: list[Any] = []

    def _of_examples(self, atoms: Iterable[Any]) -> list[Any]:
        return [x for x in variables(atoms) if x in self.examples]

    def _dtype(self, x: Any) -> Any:
        """The type to sum an array in."""
        dtype = getattr(x.aval, "dtype", None)
        if (
            self.how.dtype is None
            or dtype is None
            or not jnp.issubdtype(dtype, jnp.floating)
        ):
            return dtype
        if self.how.dtype.itemsize == 4:
            return accumulation_dtype(dtype)
        return self.how.dtype if dtype == jnp.float32 else dtype

    def _narrows(self, x: Any) -> bool:
        """Whether the type to sum an array in has fewer bits than its own."""
        return self._dtype(x).itemsize < x.aval.dtype.itemsize

    def _like(self, x: Any) -> Any:
        """A variable for an array in the type to sum in; itself, if that is its own."""
        dtype = self._dtype(x)
        return x if dtype == x.aval.dtype else self.new(x.aval.update(dtype=dtype))

    # The search

    def found(self, x: Any, depth: int) -> bool:
        """Whether the search for a gradient finds a sum over examples."""
        if isinstance(x, core.Literal) or not jnp.issubdtype(x.aval.dtype, jnp.inexact):
            return False
        if x in self.given:
            return True
        # Activations are used elsewhere, too.
        if depth == _SUM and len(self.used_by.get(x, ())) > 1:
            return False
        if (x, depth) not in self.known:
            self.known[x, depth] = False
            eqn = self.made_by.get(x)
            if eqn is not None:
                self.known[x, depth] = self._found_in(eqn, x, depth)
            elif x in self.inputs:
                self.known[x, depth] = self.outside(self.inputs[x], depth)
        return self.known[x, depth]

    def _found_in(self, eqn: Any, x: Any, depth: int) -> bool:
        name, of_examples = eqn.primitive.name, self._of_examples(eqn.invars)
        if name in _MOVES:
            return any(self.found(each, depth) for each in eqn.invars)
        if name in ("mul", "div"):
            scaled = self._scaled(eqn)
            return scaled is not None and depth < _SUM and self.found(scaled, depth)
        if _parts(eqn):
            index = eqn.outvars.index(x)
            if name == "scan" and self._narrows(x):
                return False
            if id(eqn) not in self.parts:
                self.parts[id(eqn)] = [self._part(eqn, each) for each in _parts(eqn)]
            inside = self.parts[id(eqn)]
            return any(each.found(each.jaxpr.outvars[index], depth) for each in inside)
        if not of_examples:
            return False
        narrows = self._narrows(x)
        if name == "dot_general" and not narrows:
            if len(of_examples) == 1:
                return depth < _SUM
            batch_dims = eqn.params["dimension_numbers"][1]
            return depth == _START or not any(batch_dims)
        if name == "conv_general_dilated":
            return depth < _SUM and not narrows
        return name == "reduce_sum" or (name == "scatter-add" and depth < _SUM)

    def _scaled(self, eqn: Any) -> Any:
        """The gradient that an equation multiplies by something made of parameters."""
        of_examples = self._of_examples(eqn.invars)
        if len(of_examples) != 1:
            return None
        divides = eqn.primitive.name == "div" and of_examples[0] is not eqn.invars[0]
        return None if divides else of_examples[0]

    def _part(self, eqn: Any, part: Any, given: Iterable[int] = ()) -> "_Sums":
        """The search in a jaxpr of an equation."""
        inside = open_jaxpr(part)
        operands = eqn.invars[len(eqn.invars) - len(inside.invars) :]
        consts, carry = scan_counts(eqn) if eqn.primitive.name == "scan" else (0, 0)
        carried = range(consts, consts + carry)
        examples = [
            x
            for i, (x, operand) in enumerate(zip(inside.invars, operands, strict=True))
            if i in carried or self._of_examples([operand])
        ]

        def outside(index: int, depth: int) -> bool:
            return index not in carried and self.found(operands[index], depth)

        return _Sums(inside, examples, self.how, given, outside)

    # The rewrite

    def rewrite(self) -> Any:
        """The jaxpr, with sums in the type to sum in."""
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name == "add_any":
                # From the first to the last, because a sum of many is deep.
                for depth in (_START, _PRODUCT, _SUM):
                    self.found(eqn.outvars[0], depth)
        for eqn in reversed(self.jaxpr.eqns):
            self._rewrite(eqn)
        return self.jaxpr.replace(eqns=self.eqns[::-1])

    def want(self, x: Any, depth: int, sharding: NamedSharding | None = None) -> Any:
        """An array in the type to sum in: summed so, or else cast."""
        if variables([x]) and x in self.wanted:
            return self.wanted[x][0]
        if self.found(x, depth):
            eqn = self.made_by.get(x)
            if eqn is not None and eqn.primitive.name == "convert_element_type":
                # Its rounding would be before the sum over devices.
                operand = eqn.invars[0]
                if self._dtype(operand) == self._dtype(x) != x.aval.dtype:
                    return self.want(operand, depth, sharding)
            wide = self._like(x)
            self.wanted[x] = wide, depth, sharding
            return wide
        return self._cast(x, self._dtype(x))

    def _cast(self, x: Any, dtype: Any) -> Any:
        if x.aval.dtype == dtype:
            return x
        out = self.new(x.aval.update(dtype=dtype, weak_type=False))
        self.before.append(_cast_equation(x, out))
        return out

    def _emit(self, *eqns: Any) -> None:
        self.eqns += eqns[::-1]
        self.eqns += self.before[::-1]
        self.before.clear()

    def _rewrite(self, eqn: Any) -> None:
        name = eqn.primitive.name
        mark = self._mark_before(eqn)
        # Among those of 16 bits, one in float32 is of a parameter that is left in its type.
        if mark is not None and not self._narrows(mark.invars[0]):
            (x,), (out,) = mark.invars, eqn.outvars
            summed = self.want(x, _START, self._placement(out))
            self._emit(_cast_equation(summed, out))
        elif _has_marks(eqn) or any(x in self.wanted for x in eqn.outvars):
            if name in _MOVES:
                self._move(eqn)
            elif name in ("mul", "div"):
                self._scale(eqn)
            elif name == "scatter-add":
                self._scatter(eqn)
            elif _parts(eqn):
                self._inside(eqn)
            elif name in _SUMS:
                self._sum(eqn)
            elif name != "shard_map":
                inside = lambda part: _Sums(part, part.invars, self.how).rewrite()  # noqa: E731
                self._emit(eqn.replace(params=map_jaxprs_in(inside, eqn.params)))
            else:
                self._emit(eqn)
        else:
            self._emit(eqn)

    def _mark_before(self, eqn: Any) -> Any:
        """The mark of a gradient that an equation casts, or that it is itself."""
        if _is_mark(eqn):
            after = self.used_by.get(eqn.outvars[0], [None])[0]
            is_cast = after is not None and after.primitive.name == "convert_element_type"
            return None if is_cast else eqn
        if eqn.primitive.name == "convert_element_type":
            before = self._before(eqn)
            return before if before is not None and _is_mark(before) else None
        return None

    def _placement(self, x: Any) -> NamedSharding | None:
        """Where a gradient is updated."""
        for eqn in self.used_by.get(x, ()):
            if eqn is not None and eqn.primitive.name == "sharding_constraint":
                return eqn.params["sharding"]
        return None

    def _move(self, eqn: Any) -> None:
        (x,) = [x for x in eqn.outvars if x in self.wanted][:1]
        _, depth, sharding = self.wanted[x]
        sharding = sharding if eqn.primitive.name in _IN_PLACE else None
        operands = [
            self.want(x, depth, sharding) if _is_float(x) else x for x in eqn.invars
        ]
        outs = [
            self.wanted[x][0] if x in self.wanted else self._like(x) for x in eqn.outvars
        ]
        if eqn.primitive.name == "convert_element_type":
            moved = _cast_equation(operands[0], outs[0])
        else:
            moved = eqn.replace(invars=operands, outvars=outs)
        self._emit(*[eqn][: outs[0] is not eqn.outvars[0]], moved)

    def _before(self, eqn: Any) -> Any:
        """The equation that makes the first input of another, if there is one."""
        made = variables(eqn.invars[:1])
        return self.made_by.get(made[0]) if made else None

    def _scale(self, eqn: Any) -> None:
        (x,), scaled = eqn.outvars, self._scaled(eqn)
        out, depth, _ = self.wanted[x]
        operands = [
            self.want(each, depth)
            if each is scaled
            else self._cast(each, self._dtype(each))
            for each in eqn.invars
        ]
        self._emit(*[eqn][: out is not x], eqn.replace(invars=operands, outvars=[out]))

    def _sum(self, eqn: Any) -> None:
        """A product, or the sum of an array, in the type to sum in."""
        (x,), name = eqn.outvars, eqn.primitive.name
        out, depth, _ = self.wanted[x]
        operands, params = [*eqn.invars], eqn.params
        if name == "reduce_sum":
            narrows = out.aval.dtype.itemsize < x.aval.dtype.itemsize
            if narrows and operands[0].aval.size > x.aval.size:
                function = partial(_sum_in_parts, params, self.how)
                call = call_function(function, operands).replace(outvars=[out])
                self._emit(call, _cast_equation(out, x))
                return
            operands = [self.want(operands[0], _SUM)]
        else:
            of_examples = self._of_examples(operands)
            if len(of_examples) == 1 and depth < _SUM:
                # A product with other parameters.
                for i, each in enumerate(operands):
                    if each is of_examples[0] and self.found(each, _PRODUCT):
                        wide = self.want(each, _PRODUCT)
                        operands[i] = self._cast(wide, each.aval.dtype)
            if out is not x:
                params = {**params, "preferred_element_type": out.aval.dtype}
                if self.how.on_cpus:
                    # XLA has no kernel for some products of 16 bits with sums of 32.
                    operands = [self._cast(each, out.aval.dtype) for each in operands]
                    # Says that they are meant to be wide; on CPUs it changes nothing.
                    params["precision"] = (jax.lax.Precision.HIGHEST,) * 2
        summed = eqn.replace(invars=operands, params=params, outvars=[out])
        self._emit(summed, *[_cast_equation(out, x)][: out is not x])

    def _scatter(self, eqn: Any) -> None:
        (x,), (table, indices, updates) = eqn.outvars, eqn.invars
        out, depth, sharding = self.wanted[x]
        lookup = sharding and LookupGradient.of(eqn, sharding, self.how.dtype)
        if lookup is None and out is x:
            self._emit(eqn)
            return
        if lookup is None:
            updates = self.want(updates, _SUM)
        function = partial(scatter_rows, eqn.params) if lookup is None else lookup
        call = call_function(
            function, [self.want(table, depth, sharding), indices, updates]
        )
        if call.outvars[0].aval.dtype != out.aval.dtype:
            raise UsageTypeError(f"a sum of {call.outvars[0].aval} is to be {out.aval}")
        call = call.replace(outvars=[out], source_info=eqn.source_info, ctx=eqn.ctx)
        self._emit(call, *[_cast_equation(out, x)][: out is not x])

    def _inside(self, eqn: Any) -> None:
        """A loop, a branch or a call."""
        wanted = {
            i: self.wanted[x][1:] for i, x in enumerate(eqn.outvars) if x in self.wanted
        }
        more = [
            i
            for i, x in enumerate(eqn.outvars)
            if x in self.wanted and self.wanted[x][0] is not x
        ]
        consts, carry = scan_counts(eqn) if eqn.primitive.name == "scan" else (0, 0)
        carried = [i for i in more if i < carry]
        while True:
            given = [consts + i for i in carried]
            extra = [*carried, *(i for i in more if i >= carry)]
            parts = [self._part(eqn, part, given) for part in _parts(eqn)]
            results = [part._rewrite_for(wanted, extra) for part in parts]
            asked: dict[int, Any] = {}
            for part in parts:
                asked |= part._asked()
            new = [i - consts for i in asked if consts <= i < consts + carry]
            new = [i for i in new if i not in carried]
            if not new:
                break
            # What is summed over the loop so becomes one more state of it.
            carried += new
        operands = eqn.invars[len(eqn.invars) - len(parts[0].jaxpr.invars) :]
        asked = {
            i: self.want(operands[i], *how) for i, how in asked.items() if i not in given
        }
        inputs = [*given, *(i for i, x in asked.items() if x is not operands[i])]
        more_in = [
            asked[i] if i in asked else self.want(operands[i], _START) for i in inputs
        ]
        more_out = [
            self.wanted[x][0] if x in self.wanted else self._like(x)
            for x in (eqn.outvars[i] for i in extra)
        ]
        jaxprs = [
            map_jaxpr(lambda _: part._with(inputs, outs), old)  # noqa: B023
            for old, part, outs in zip(_parts(eqn), parts, results, strict=True)
        ]
        self._emit(_with_jaxprs(eqn, jaxprs, inputs, more_in, more_out, len(carried)))

    def _rewrite_for(
        self, wanted: dict[int, tuple[int, NamedSharding | None]], extra: list[int]
    ) -> list[Any]:
        """Rewrite, for an equation of which some results are wanted."""
        outs = self.jaxpr.outvars
        results = {
            i: self.want(outs[i], *wanted.get(i, (_START, None))) for i in {*wanted, *extra}
        }
        self._emit()
        self.jaxpr = self.rewrite()
        return [results[i] for i in extra]

    def _asked(self) -> dict[int, tuple[int, NamedSharding | None]]:
        """The inputs that are wanted, from how far, and with which sharding."""
        inputs = enumerate(self.jaxpr.invars)
        return {i: self.wanted[x][1:] for i, x in inputs if x in self.wanted}

    def _with(self, inputs: list[int], outs: list[Any]) -> Any:
        """The jaxpr with more inputs and results."""
        invars = [self.jaxpr.invars[i] for i in inputs]
        invars = [self.wanted[x][0] if x in self.wanted else self._like(x) for x in invars]
        return self.jaxpr.replace(
            invars=[*self.jaxpr.invars, *invars], outvars=[*self.jaxpr.outvars, *outs]
        )


def _with_jaxprs(
    eqn: Any,
    jaxprs: list[Any],
    inputs: list[int],
    more_in: list[Any],
    more_out: list[Any],
    carried: int,
) -> Any:
    """An equation with other jaxprs, which have more inputs and results.

    - `inputs`: the positions of the inputs that the further ones stand beside: those that
        a loop carries, `carried` of them, first.
    - `more_in`, `more_out`: their variables outside.
    """
    name, params = eqn.primitive.name, eqn.params
    invars, outvars = [*eqn.invars, *more_in], [*eqn.outvars, *more_out]
    if name == "cond" or (name != "scan" and not (more_in or more_out)):
        new = {"branches": tuple(jaxprs)} if name == "cond" else {"jaxpr": jaxprs[0]}
        return eqn.replace(params={**params, **new}, invars=invars, outvars=outvars)
    if not (more_in or more_out):
        return eqn.replace(params={**params, "jaxpr": jaxprs[0]})
    if name in ("checkpoint", "remat2"):
        new = {"jaxpr": jaxprs[0]}
        if isinstance(params["prevent_cse"], tuple):
            new["prevent_cse"] = (*params["prevent_cse"], *[True] * len(more_in))
        return eqn.replace(params={**params, **new}, invars=invars, outvars=outvars)
    function = core.jaxpr_as_fun(jaxprs[0])
    if name == "scan":
        function = partial(_scan, eqn, function, inputs, carried)
    call = call_function(function, invars, scope=None)
    return call.replace(outvars=outvars, source_info=eqn.source_info, ctx=eqn.ctx)


def _scan(
    eqn: Any, body: Callable[..., Any], inputs: list[int], carried: int, *operands: Array
) -> list[Array]:
    """A loop like that of an equation, with more inputs and results."""
    (consts, carry), count = scan_counts(eqn), len(eqn.invars)
    narrow, wide = operands[:count], operands[count:]
    stacked = [i >= consts + carry for i in inputs]
    wide_xs = [x for x, is_stacked in zip(wide, stacked, strict=True) if is_stacked]

    def step(state: Any, xs: Any) -> tuple[Any, Any]:
        first, sums = state
        rest = iter(xs[1])
        more = [
            sums[i] if i < carried else next(rest) if is_stacked else wide[i]
            for i, is_stacked in enumerate(stacked)
        ]
        out = body(*narrow[:consts], *first, *xs[0], *more)
        ys, more_out = out[carry : len(eqn.outvars)], out[len(eqn.outvars) :]
        return (out[:carry], more_out[:carried]), (ys, more_out[carried:])

    start = [*narrow[consts : consts + carry]], [*wide[:carried]]
    xs = [*narrow[consts + carry :]], wide_xs
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    (first, sums), (ys, more) = jax.lax.scan(step, start, xs, **options)
    return [*first, *ys, *sums, *more]


def _sum_in_parts(params: dict[str, Any], how: "How", x: Array) -> Array:
    """The sum of an array in its own type on each device, and in another over devices."""
    axes = params["axes"]
    # The examples are in front, and each device has as many, one after the other.
    dim = next((d for d in axes if x.shape[d] % how.devices == 0), None)
    if dim is None:
        return jax.lax.reduce_sum(x, axes).astype(how.dtype)
    x = x.reshape(*x.shape[:dim], how.devices, -1, *x.shape[dim + 1 :])
    inside = [d + (d >= dim) for d in axes if d != dim] + [dim + 1]
    parts = jax.lax.reduce_sum(x, inside).astype(how.dtype)
    return jax.lax.reduce_sum(parts, [dim - sum(d < dim for d in inside)])


def _parts(eqn: Any) -> list[Any]:
    """The jaxprs of a loop, a branch or a call; none of anything else."""
    if eqn.primitive.name == "cond":
        return [*eqn.params["branches"]]
    return [eqn.params["jaxpr"]] if eqn.primitive.name in _CALLS else []


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.aval.dtype, jnp.floating)


def _is_mark(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == _GRADIENT


def _has_marks(eqn: Any) -> bool:
    return any(_is_mark(each) for part in jaxprs_in(eqn.params) for each in equations(part))


def _cast_equation(x: Any, out: Any) -> Any:
    """An equation that casts, maybe to the same type."""
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16))(jnp.float32(0)).eqns
    params = {**eqn.params, "new_dtype": out.aval.dtype}
    return eqn.replace(invars=[x], outvars=[out], params=params)
