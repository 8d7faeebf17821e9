"""`Interpreter`: a jaxpr computed again, with other outputs where rules have some.

A rule looks at a jaxpr and picks equations. For each it has a function from the inputs of
the equation to its outputs, or to `None` where it leaves the equation alone after all. All
other equations are computed as they are, and a jaxpr without a picked equation stays one
object, which JAX lowers once however often it is called.

Picked equations may be inside of jitted functions, loops, branches, `jax.checkpoint` and
functions with a derivative of their own, which are built again around them. Inside of code
for each device, and of other equations with jaxprs, only some of the rules apply.

`run_rewritten` is the one door to all rewrites. A rewrite never makes a program fail, or
differ beyond rounding, where plain JAX runs it. What a rewrite does not understand, it
leaves alone. If what it made does not trace, the program runs as it was, and a warning says
so. `EQXSHARD_REWRITE=off` in the environment turns all rewriting off. A check by
`equinox.error_if` is then left to Equinox, and if it fails on several devices, the step
does not return.
"""

import functools as ft
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..._errors import UsageError, UsageTypeError
from ..._jax import Literal, bind, mapped_axes
from ._checks import Checked, first_failed, has_checks
from ._jaxprs import (
    Apply,
    Rule,
    bind_at,
    call_whole,
    consts_of,
    has_shardings,
    jaxprs_in,
    last_uses,
    map_jaxprs_in,
    open_jaxpr,
    retrace,
    run_equations,
    scan_counts,
)

#: Primitives whose jaxprs are kernels.
_KERNELS = ("pallas_call", "custom_partitioning")
_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
#: The names that `jax.checkpoint` has had.
CHECKPOINTS = ("checkpoint", "remat2")


class Interpreter:
    """Evaluates jaxprs under some rules, of which the first that has outputs wins.

    - `rules`: for code that can return the number of a check that failed.
    - `inner_rules`: for all other code, such as that of `jax.shard_map`.
    - `plain`: makes an array of an input, which may be another PyTree in the place of an
        array.
    - `reads`: whether a picked equation can read an input as it is, by the position of the
        input; all other equations are given arrays.
    - `differentiated`: whether the program has been differentiated already; otherwise,
        functions with a derivative of their own stay as they are.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        inner_rules: Sequence[Rule] = (),
        *,
        plain: Callable[[Any], Any] = lambda x: x,
        reads: Callable[[Any, int, Any], bool] = lambda eqn, i, x: False,
        differentiated: bool = True,
    ):
        self._rules = rules
        self._plain = plain
        self._reads = reads
        self._differentiated = differentiated
        self._inner = Interpreter(inner_rules) if inner_rules else self
        self._picked: dict[Any, Mapping[int, Apply]] = {}
        self._jitted: dict[Any, Any] = {}

    def picks(self, jaxpr: Any) -> bool:
        """True if a rule picks an equation of a jaxpr, or of one inside of it."""
        return bool(self._look(open_jaxpr(jaxpr)))

    def rewrite(self, jaxpr: Any) -> Any:
        """A closed jaxpr under the rules.

        If something is checked in it, it has one more output: the number of the first check
        that failed, or 0.
        """
        if not self.picks(jaxpr):
            return jaxpr

        def rewritten(*args: Any) -> Any:
            outputs, failed = self.evaluate(jaxpr, args)
            if failed is None and has_checks(jaxpr):
                failed = jnp.int32(0)  # The checks are in code that returns no number.
            return outputs, failed

        inputs = [x.aval for x in open_jaxpr(jaxpr).invars]
        return jax.make_jaxpr(rewritten)(*inputs)

    def evaluate(
        self, jaxpr: Any, args: Iterable[Any], arrays: Mapping[int, Any] | None = None
    ) -> tuple[list[Any], Int[Array, ""] | None]:
        """Compute a jaxpr, which may be closed.

        **Arguments:**

        - `jaxpr`: the jaxpr.
        - `args`: its inputs.
        - `arrays`: the results of `plain` that are known, by the position of the input.

        **Returns:**

        The outputs; and the number of the first check that failed, or 0, or `None` if
        nothing was checked.
        """
        inside = open_jaxpr(jaxpr)
        values = dict(zip(inside.constvars, consts_of(jaxpr), strict=True))
        values.update(zip(inside.invars, args, strict=True))
        known = {inside.invars[i]: array for i, array in (arrays or {}).items()}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        def read_array(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            if atom not in known:
                known[atom] = self._plain(values[atom])
            return known[atom]

        picked, uses, failed = self._look(inside), last_uses(inside), []
        groups = itertools.groupby(enumerate(inside.eqns), lambda pair: pair[0] in picked)
        for is_picked, group in groups:
            pairs = [*group]
            if not is_picked:
                eqns = [eqn for _, eqn in pairs]
                values |= run_equations(eqns, read_array, uses, pairs[-1][0])
                continue
            for i, eqn in pairs:
                inputs = [
                    read(x) if self._reads(eqn, n, read(x)) else read_array(x)
                    for n, x in enumerate(eqn.invars)
                ]
                outputs = bind_at(eqn, picked[i], inputs)
                if outputs is None:
                    values |= run_equations([eqn], read_array, uses, i)
                    continue
                if isinstance(outputs, Checked):
                    outputs, number = outputs
                    failed.append(number)
                values.update(zip(eqn.outvars, outputs, strict=True))
        outputs = [_as_array(read_array(x), x.aval) for x in inside.outvars]
        return outputs, first_failed(*failed) if failed else None

    def _look(self, jaxpr: Any) -> Mapping[int, Apply]:
        """The functions for the equations of an open jaxpr that are picked, by position."""
        if jaxpr not in self._picked:
            found: dict[int, Apply] = {}
            for rule in self._rules:
                for i, apply in rule(jaxpr).items():
                    found[i] = _first_of(found[i], apply) if i in found else apply
            for i, eqn in enumerate(jaxpr.eqns):
                through = None if i in found else self._through(eqn)
                if through is not None:
                    found[i] = through
            self._picked[jaxpr] = found
        return self._picked[jaxpr]

    def _through(self, eqn: Any) -> Apply | None:
        """A function that builds an equation again, if something inside of it is picked."""
        name, parts = eqn.primitive.name, [*jaxprs_in(eqn.params)]
        if not parts or name in _KERNELS:
            return None
        if name in _DERIVATIVES:
            picks = self._differentiated and any(map(self.picks, parts))
            return (lambda inputs: self._inline(eqn, inputs)) if picks else None
        build: Callable[[Any, list[Any]], Any] | None = {
            "jit": None if has_shardings(eqn) else self.jit,
            "closed_call": self._inline,
            **dict.fromkeys(CHECKPOINTS, self.checkpoint),
            "scan": self.scan,
            "while": self._while,
            "cond": self.cond,
        }.get(name)
        if build is not None:
            is_picked = any(map(self.picks, parts))
        else:
            build = self._shard_map if name == "shard_map" else self._other
            is_picked = any(map(self._inner.picks, parts))
        return (lambda inputs: build(eqn, inputs)) if is_picked else None

    # Equations with jaxprs, built again

    def jit(self, eqn: Any, inputs: list[Any]) -> Any:
        """Build the call of a jitted function again."""
        part = eqn.params["jaxpr"]
        if part not in self._jitted:

            def jitted(*args: Any) -> Any:
                return self.evaluate(part, args)

            jitted.__name__ = jitted.__qualname__ = eqn.params["name"]
            # Called again with inputs of the same types, it is the same program.
            self._jitted[part] = jax.jit(jitted)
        return _result(*self._jitted[part](*inputs))

    def _inline(self, eqn: Any, inputs: list[Any]) -> Any:
        part, *_ = jaxprs_in(eqn.params)
        return _result(*self.evaluate(part, inputs))

    def checkpoint(self, eqn: Any, inputs: list[Any]) -> Any:
        """Build the call of a function in `jax.checkpoint` again."""
        params = eqn.params

        def again(inputs: list[Any]) -> Any:
            return self.evaluate(params["jaxpr"], inputs)

        if params["differentiated"] and self._differentiated:
            # `jax.checkpoint` itself makes no equation that was differentiated.
            part, inputs, structure = retrace(again, inputs)
            outputs = bind(eqn, inputs, params | {"jaxpr": part})
            return _result(*jax.tree.unflatten(structure, outputs))
        options = {name: params[name] for name in ("prevent_cse", "policy")}
        return _result(*jax.checkpoint(again, **options)(inputs))

    def scan(self, eqn: Any, inputs: list[Any]) -> Any:
        """Build a loop again."""
        start, count = scan_counts(eqn)
        consts, xs = inputs[:start], inputs[start + count :]
        carry = inputs[start : start + count]

        def body(carry: list[Any], xs: list[Any]) -> Any:
            args = [*consts, *carry, *xs]
            outputs, failed = self.evaluate(eqn.params["jaxpr"], args)
            return outputs[:count], (outputs[count:], failed)

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, (stacked, failed) = jax.lax.scan(body, carry, xs, **options)
        return _result([*carry, *stacked], None if failed is None else first_failed(failed))

    def _while(self, eqn: Any, inputs: list[Any]) -> Any:
        params = eqn.params
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        if open_jaxpr(params["cond_jaxpr"]).outvars[0].aval.shape:
            # Under vmap, the condition has dims. `jax.lax.while_loop` makes none like it.
            return self._other(eqn, inputs)

        def holds(carry: list[Any]) -> Array:
            args = [*inputs[:first], *carry]
            return self._inner.evaluate(params["cond_jaxpr"], args)[0][0]

        def step(carry: list[Any]) -> tuple[list[Any], Any]:
            args = [*inputs[first:second], *carry]
            outputs, failed = self.evaluate(params["body_jaxpr"], args)
            return outputs, jnp.int32(0) if failed is None else failed

        carry = inputs[second:]
        if not has_checks(params["body_jaxpr"]):
            return jax.lax.while_loop(holds, lambda carry: step(carry)[0], carry)
        # The loop stops once a check has failed: it might not end otherwise.
        return Checked(
            *jax.lax.while_loop(
                lambda pair: holds(pair[0]) & (pair[1] == 0),
                lambda pair: step(pair[0]),
                (carry, jnp.int32(0)),
            )
        )

    def cond(self, eqn: Any, inputs: list[Any]) -> Any:
        """Build a choice between branches again."""
        index, *operands = inputs
        is_checked = any(map(has_checks, eqn.params["branches"]))

        def branch(part: Any) -> Callable[[list[Any]], Any]:
            def run(operands: list[Any]) -> Any:
                outputs, failed = self.evaluate(part, operands)
                if is_checked and failed is None:
                    failed = jnp.int32(0)
                return outputs, failed

            return run

        branches = [branch(part) for part in eqn.params["branches"]]
        return _result(*jax.lax.switch(index, branches, operands))

    def _shard_map(self, eqn: Any, inputs: list[Any]) -> Any:
        params = eqn.params

        def per_device(*args: Any) -> Any:
            return self._inner.evaluate(params["jaxpr"], args)[0]

        return jax.shard_map(
            per_device,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=[*params["out_specs"]],
            axis_names=mapped_axes(eqn),
            check_vma=params["check_vma"],
        )(*inputs)

    def _other(self, eqn: Any, inputs: list[Any]) -> Any:
        """Build an equation again with other jaxprs, of the same types, as parameters."""

        def again(part: Any) -> Any:
            fn = lambda args: self._inner.evaluate(part, args)[0]  # noqa: E731
            return retrace(fn, [x.aval for x in open_jaxpr(part).invars], part)[0]

        params = map_jaxprs_in(again, eqn.params)
        return bind(eqn, inputs, params)


def _as_array(x: Any, aval: Any) -> Array:
    # A constant, such as a flag that `BatchNorm` sets, is a NumPy scalar.
    return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


def _result(outputs: list[Any], failed: Any) -> Any:
    return outputs if failed is None else Checked(outputs, failed)


def _first_of(first: Apply, second: Apply) -> Apply:
    def apply(inputs: list[Any]) -> Any:
        outputs = first(inputs)
        return second(inputs) if outputs is None else outputs

    return apply


# The door to all rewrites


def is_rewriting() -> bool:
    """True if programs are rewritten.

    **Raises:**

    `ValueError` if `EQXSHARD_REWRITE` is neither `on` nor `off`.
    """
    switch = os.environ.get("EQXSHARD_REWRITE", "on")
    if switch not in ("on", "off"):
        raise UsageError(f"EQXSHARD_REWRITE is {switch!r}; set it to 'on' or 'off'.")
    is_jit_on = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return switch == "on" and is_jit_on


def looks_for_nan() -> bool:
    """True if JAX looks for the operation of a program that made a nan, or an infinity.

    It does not look into jaxprs, so the loss function must be left as the user wrote it.
    """
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def run_rewritten(
    rewrite: Callable[[Any], Any], jaxpr: Any, out: Any, args: Any
) -> tuple[Any, list[Any]]:
    """Rewrite a function that was traced, and call it.

    The caller has traced the function: a mistake in the user's code is raised there, and is
    not taken for one of the rewrite.

    **Arguments:**

    - `rewrite`: a function from a closed jaxpr to another, which computes the same, and may
        have more outputs after these.
    - `jaxpr`, `out`: the function, and the shapes of its outputs, as from `jax.make_jaxpr`
        with `return_shape`.
    - `args`: its arguments.

    **Returns:**

    The outputs of the function, and those of the rewritten jaxpr after them.
    """
    leaves, structure = jax.tree.leaves(args), jax.tree.structure(out)
    flat = call_whole(_rewrite_or_leave(rewrite, jaxpr), leaves)
    count = structure.num_leaves
    return jax.tree.unflatten(structure, flat[:count]), flat[count:]


def _rewrite_or_leave(rewrite: Callable[[Any], Any], jaxpr: Any) -> Any:
    """A jaxpr rewritten, if that works and returns the same types."""
    try:
        rewritten = rewrite(jaxpr)
        ours, wanted = _types(rewritten), _types(jaxpr)
        if ours[: len(wanted)] != wanted:
            raise UsageTypeError(f"it returns {ours} in place of {wanted}")
        return rewritten
    except Exception as error:
        warn_once(f"{type(error).__name__}: {error}")
        return jaxpr


def _types(jaxpr: Any) -> list[Any]:
    return [(x.aval.shape, x.aval.dtype) for x in open_jaxpr(jaxpr).outvars]


@ft.cache
def warn_once(error: str) -> None:
    warnings.warn(
        f"eqxshard could not rewrite a step, which runs as plain JAX runs it ({error}); "
        "please report this, and set EQXSHARD_REWRITE=off until it is mended.",
        RuntimeWarning,
        stacklevel=2,
    )
