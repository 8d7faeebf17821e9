"""Lint of a step as it was traced: dtypes, callbacks and constants.

The compiled text would not say: compilers for CPUs compute bfloat16 in float32, and print
no large constants.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..compiled._causes import user_frame
from ..compiled._findings import Finding
from ..compiled._hlo import Frame
from ..sharding._leaves import format_array
from .rewrite._jaxprs import jaxprs_in, open_jaxpr

_LARGE = 10**6


class _Place(NamedTuple):
    """An equation, and the names of the transforms around it."""

    eqn: Any
    names: str

    @property
    def line(self) -> str | None:
        traceback = self.eqn.source_info.traceback
        frames = [] if traceback is None else traceback.frames
        found = user_frame(Frame(x.file_name, x.line_num, x.function_name) for x in frames)
        return found and found.place


def lint_jaxpr(
    jaxpr: Any, compute: Any, wide: Sequence[str], narrow: bool
) -> Iterator[Finding]:
    """The findings of kinds `dtype`, `callback` and `constant`.

    **Arguments:**

    - `jaxpr`: the step's.
    - `compute`: the dtype to compute in, if there is one.
    - `wide`: the paths of the model's arrays in float64.
    - `narrow`: whether the model has floating-point arrays in others.
    """
    places = list(_places(jaxpr))
    yield from _constants(jaxpr)
    if narrow:
        yield from _float64(places, wide)
    if compute is not None and jnp.dtype(compute).itemsize == 2:
        yield from _float32(places, jnp.dtype(compute).name)
    seen = set[str]()
    for place in places:
        name = place.eqn.primitive.name
        if name in _CALLBACKS and name not in seen:
            seen.add(name)
            yield Finding(
                "callback",
                None,
                place.line,
                f"the step calls the host ({_CALLBACKS[name]}), and devices wait for it. "
                "Return values as metrics instead, and compute on the device.",
            )


_CALLBACKS = {
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
}


def scanned_shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """The shapes of the arrays of which loops take a part in each iteration."""
    found = set()
    for place in _places(jaxpr):
        if place.eqn.primitive.name == "scan":
            inside = open_jaxpr(place.eqn.params["jaxpr"]).invars
            pairs = [(x.aval, y.aval) for x, y in zip(place.eqn.invars, inside)]
            # What a loop takes whole has the same shape inside of it.
            found |= {whole.shape for whole, part in pairs if whole.shape != part.shape}
    return found


def _places(jaxpr: Any, names: str = "") -> Iterator[_Place]:
    for eqn in open_jaxpr(jaxpr).eqns:
        inside = f"{names}/{eqn.source_info.name_stack}"
        yield _Place(eqn, inside)
        for part in jaxprs_in(eqn.params):
            yield from _places(part, inside)


def _constants(jaxpr: Any) -> Iterator[Finding]:
    """Arrays that the step was not given."""
    for var, value in zip(open_jaxpr(jaxpr).constvars, getattr(jaxpr, "consts", ())):
        if getattr(value, "nbytes", 0) < _LARGE:
            continue
        users = (
            _Place(eqn, "")
            for eqn in open_jaxpr(jaxpr).eqns
            if any(each is var for each in eqn.invars)
        )
        line = next((place.line for place in users), None)
        yield Finding(
            "constant",
            None,
            line,
            f"{format_array(value)}, {value.nbytes / 1e6:.3g} MB, is compiled in as a "
            "constant, on every device. Make it a field of the model, an entry of the "
            "batch, or a part of extra.",
        )
    for eqn in open_jaxpr(jaxpr).eqns:
        for part in jaxprs_in(eqn.params):
            yield from _constants(part)


def _float64(places: list[_Place], wide: Sequence[str]) -> Iterator[Finding]:
    """Those that only a part of the step has."""
    for path in wide:
        yield Finding(
            "dtype",
            path,
            None,
            f"{path} is float64, unlike the rest of the model. Make it with a dtype, such "
            "as jnp.float32.",
        )
    if wide:
        return
    for place in places:
        for var in place.eqn.outvars:
            # Numbers cost nothing.
            if _is(var, "float64", "complex128") and var.aval.shape:
                yield Finding(
                    "dtype",
                    None,
                    place.line,
                    f"the step computes {_text(var)}, and no array of the model is of that "
                    "type. Convert to jnp.float32 there, or leave jax_enable_x64 off.",
                )
                return


def _float32(places: list[_Place], compute: str) -> Iterator[Finding]:
    """Matrix products in float32, if they are most of the loss and its gradient."""
    products = [
        place
        for place in places
        if place.eqn.primitive.name == "dot_general" and "jvp(" in place.names
    ]
    wide = [
        place for place in products if any(_is(var, "float32") for var in place.eqn.invars)
    ]
    # One layer may need it, such as a softmax.
    if wide and 2 * len(wide) >= len(products):
        first = wide[0]
        yield Finding(
            "dtype",
            None,
            first.line,
            f"{len(wide)} of {len(products)} matrix products are in float32, under "
            f"Precision(compute={compute}); the first is of "
            f"{' and '.join(map(_text, first.eqn.invars))}. An array in float32 made its "
            f"products wide: cast it with .astype(x.dtype).",
        )


def _is(var: Any, *dtypes: str) -> bool:
    return str(getattr(var.aval, "dtype", "")) in dtypes


def _text(var: Any) -> str:
    return format_array(var.aval)
