"""Traced programs without the sharding types of Explicit axes.

On Explicit axes the gradient of a weight has the type of the weight: whole wherever it is
computed. XLA then sums all of it on all devices, where it could reduce-scatter. The types
are there for the user's code, which has been traced by then. Without them the program is
what a model on Auto axes gives, constrained where the user said how an array is split.
"""

import functools as ft
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..._jax import Literal, ShapedArray, context_of, gensym, mesh_of, with_context
from ...sharding._explicit import auto_mesh, is_explicit, to_auto
from ...sharding._spec import axes_of
from ._jaxprs import equations, map_jaxpr, map_jaxprs_in

_NO_MESH = jax.sharding.AbstractMesh((), ())


def erase_types(jaxpr: Any) -> Any:
    """A closed jaxpr without the types of Explicit axes.

    With per-device code (`jax.shard_map`) on Explicit axes, or without any, the jaxpr as
    it was.
    """
    eqns = [*equations(jaxpr)]
    typed = [eqn for eqn in eqns if is_explicit(mesh_of(eqn))]
    if not typed or any(eqn.primitive.name == "shard_map" for eqn in typed):
        return jaxpr
    # Constants may be on the mesh of `jax.set_mesh`, where tracing computed them.
    consts = to_auto(jaxpr.consts)
    return map_jaxpr(_Eraser().erase, jaxpr.replace(consts=consts))


class _Eraser:
    """The variables of a program, and those that they become."""

    def __init__(self):
        self._new: Any = gensym()
        self._names: dict[Any, Any] = {}

    def erase(self, jaxpr: Any) -> Any:
        """An open jaxpr without types."""
        constvars, invars = map(self._variables, (jaxpr.constvars, jaxpr.invars))
        eqns = []
        for eqn in jaxpr.eqns:
            sharding = _resharded(eqn)
            if sharding is not None and not is_explicit(sharding.mesh):
                # From Explicit axes back to Auto ones, which moves nothing.
                self._names[eqn.outvars[0]] = self._atoms(eqn.invars)[0]
                continue
            eqns.append(self._erase(eqn, sharding))
        parts = {"constvars": constvars, "invars": invars, "eqns": eqns}
        if hasattr(jaxpr, "consts"):
            # Since JAX 0.11, which has one type for both, open jaxprs have them too.
            parts["consts"] = jaxpr.consts
        return jaxpr.replace(
            **parts, outvars=self._atoms(jaxpr.outvars), debug_info=jaxpr.debug_info
        )

    def _erase(self, eqn: Any, sharding: NamedSharding | None) -> Any:
        invars, outvars = self._atoms(eqn.invars), self._variables(eqn.outvars)
        if sharding is not None:
            (constraint,) = _constraint(sharding, invars[0].aval)
            return constraint.replace(invars=invars, outvars=outvars)
        params = {name: self._parameter(each) for name, each in eqn.params.items()}
        new = eqn.replace(invars=invars, outvars=outvars, params=params)
        return with_context(new, _without_types(context_of(eqn)))

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, NamedSharding) and is_explicit(value.mesh):
            return None
        if isinstance(value, jax.sharding.AbstractMesh) and is_explicit(value):
            return _NO_MESH
        if isinstance(value, ShapedArray):
            return _untyped(value)
        return map_jaxprs_in(lambda part: map_jaxpr(self.erase, part), value)

    def _variables(self, variables: Any) -> list[Any]:
        for variable in variables:
            self._names[variable] = self._new(_untyped(variable.aval))
        return [self._names[variable] for variable in variables]

    def _atoms(self, atoms: Any) -> list[Any]:
        return [
            Literal(x.val, _untyped(x.aval)) if isinstance(x, Literal) else self._names[x]
            for x in atoms
        ]


def _untyped(aval: Any) -> Any:
    """The type of an array without a sharding."""
    if not isinstance(aval, ShapedArray) or not is_explicit(aval.sharding.mesh):
        return aval
    spec = PartitionSpec(*[None] * aval.ndim)
    return aval.update(sharding=NamedSharding(_NO_MESH, spec))


def _resharded(eqn: Any) -> NamedSharding | None:
    """Where an equation puts an array, if it is `jax.sharding.reshard`."""
    return eqn.params["dst_sharding"] if eqn.primitive.name == "reshard" else None


def _constraint(sharding: NamedSharding, aval: Any) -> list[Any]:
    """The equation that constrains an array on Auto axes."""
    mesh, spec = auto_mesh(sharding.mesh), sharding.spec
    if sharding.mesh.auto_axes:
        # Auto axes may split the dims of which the type says nothing.
        spec = PartitionSpec(*[axes_of(e) or PartitionSpec.UNCONSTRAINED for e in spec])

    def constrain(x: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.lax.with_sharding_constraint(x, spec)

    return jax.make_jaxpr(constrain)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).eqns


@ft.lru_cache(64)
def _without_types(context: Any) -> Any:
    """The context of an equation, without Explicit axes."""
    if not is_explicit(context.cur_abstract_mesh):
        return context
    with (
        context.manager,
        jax.sharding.use_abstract_mesh(_NO_MESH),
    ):
        (eqn,) = jax.make_jaxpr(jax.lax.neg)(1.0).eqns
    return context_of(eqn)
