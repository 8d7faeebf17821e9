"""The parts of a program that compute with matrices: each is of one layer's matrix.

An optimizer such as Muon multiplies matrices with themselves. Here these products are found
in its jaxpr, each with all that lies between them (a region): what goes in are the arrays
as they are stored, and what comes out is shaped like them.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core

from ._jaxprs import equations, jaxprs_in, open_jaxpr, variables

_FACTORIZATIONS = ("cholesky", "eigh", "householder_product", "lu", "qr", "schur", "svd")
_CALLS = ("jit", "pjit")


def has_matrices(jaxpr: Any) -> bool:
    """Whether a program multiplies or factorizes matrices."""
    return any(map(_is_matrix_work, equations(jaxpr)))


def _is_matrix_work(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        free = (len(contracted) + len(batch) < x.aval.ndim for x in eqn.invars)
        return all(free)
    return name in _FACTORIZATIONS or name == "triangular_solve"


def inline_calls(jaxpr: Any, kept: Iterable[str] = ()) -> Any:
    """An open jaxpr with the equations of those that it calls in their place.

    **Arguments:**

    - `jaxpr`: an open jaxpr.
    - `kept`: the names of functions whose calls stay.
    """
    new: Any = core.gensym()

    def atom(names: dict[Any, Any], x: Any) -> Any:
        return x if isinstance(x, core.Literal) else names.get(x, x)

    def walk(jaxpr: Any, names: dict[Any, Any]) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            invars = [atom(names, x) for x in eqn.invars]
            called = eqn.params.get("jaxpr")
            inlined = eqn.primitive.name in _CALLS and eqn.params["name"] not in kept
            if inlined and not called.consts:
                inside = dict(zip(open_jaxpr(called).invars, invars, strict=True))
                yield from walk(open_jaxpr(called), inside)
                results = [atom(inside, x) for x in open_jaxpr(called).outvars]
                names.update(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [new(x.aval) for x in eqn.outvars]
            names.update(zip(eqn.outvars, outvars, strict=True))
            yield eqn.replace(invars=invars, outvars=outvars)

    names: dict[Any, Any] = {}
    eqns = [*walk(jaxpr, names)]
    return jaxpr.replace(eqns=eqns, outvars=[atom(names, x) for x in jaxpr.outvars])


def is_matrix(x: Any) -> bool:
    """Whether a variable is an array of two dims or more, not counting those of size 1."""
    shape = getattr(x.aval, "shape", ())
    return not isinstance(x, core.Literal) and sum(size > 1 for size in shape) > 1


class Regions:
    """The regions of a jaxpr without calls.

    Two products belong together if a matrix goes from one to the other, whatever is done to
    it on its way; with a number on its way, such as a norm of all gradients, they do not.

    - `eqns`: the equations of the jaxpr.
    - `found`: the positions of the equations of each region, in order.
    """

    def __init__(self, jaxpr: Any, kept: Iterable[str] = ()):
        """Find them; calls of the functions that are `kept` are regions of their own."""
        self.jaxpr, self.eqns = jaxpr, jaxpr.eqns
        self._made = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.outvars}
        self._users: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for x in variables(eqn.invars):
                self._users.setdefault(x, []).append(i)
        self._outputs = {*variables(jaxpr.outvars)}
        kept = {*kept}
        alone = {
            i
            for i, eqn in enumerate(self.eqns)
            if eqn.primitive.name in _CALLS and eqn.params["name"] in kept
        }
        parts = self._grown([{i} for i in alone], self._connected(alone))
        self.found = [sorted(part) for part in parts]

    def inputs(self, region: list[int]) -> list[Any]:
        """What a region reads, in the order in which it does."""
        made = {x for i in region for x in self.eqns[i].outvars}
        read = (x for i in region for x in variables(self.eqns[i].invars))
        return [x for x in dict.fromkeys(read) if x not in made]

    def outputs(self, region: list[int]) -> list[Any]:
        """What others read of a region."""
        inside = {*region}

        def is_read(x: Any) -> bool:
            return x in self._outputs or not inside.issuperset(self._users.get(x, ()))

        return [x for i in region for x in self.eqns[i].outvars if is_read(x)]

    def body(self, region: list[int]) -> Any:
        """A region as a closed jaxpr."""
        parts = {"constvars": [], "eqns": [self.eqns[i] for i in region]}
        if hasattr(self.jaxpr, "consts"):
            parts["consts"] = []  # Since JAX 0.11, where all jaxprs have them.
        body = self.jaxpr.replace(
            **parts, invars=self.inputs(region), outvars=self.outputs(region)
        )
        return core.ClosedJaxpr(body, [])

    def levels(self) -> list[int] | None:
        """For each equation, how many regions must have been computed before it.

        `None` if regions wait for each other.
        """
        level = [0] * len(self.eqns)
        home = {i: region for region in self.found for i in region}
        for _ in range(len(self.found) + 2):
            before = [*level]
            for i in range(len(self.eqns)):
                group = home.get(i, [i])
                if group[0] != i:
                    continue
                read = self.inputs(group)
                made = (self._made[x] for x in read if x in self._made)
                latest = max((level[j] + (j in home) for j in made), default=0)
                for j in group:
                    level[j] = latest
            if level == before:
                return level
        return None

    def _connected(self, alone: set[int]) -> list[set[int]]:
        """Products, each with those that its matrices go to, and what lies between."""
        parts: dict[int, set[int]] = {}
        home: dict[int, int] = {}
        #: The regions that a matrix comes from.
        sources: dict[Any, set[int]] = {}
        number = itertools.count()

        def join(members: set[int], others: Iterable[int]) -> None:
            joined = next(number)
            for other in {home[j] for j in others}:
                members |= parts.pop(other)
            parts[joined] = members
            home.update(dict.fromkeys(members, joined))

        for i, eqn in enumerate(self.eqns):
            if i in alone:
                continue
            above = {j for x in variables(eqn.invars) for j in sources.get(x, ())}
            if _has_matrices(eqn):
                join({i}, above)
                above = {i}
            for x in filter(is_matrix, eqn.outvars):
                sources[x] = above
        pending = list(parts)
        while pending:
            name = pending.pop()
            between = self._between(parts[name]) if name in parts else set()
            if between & alone:
                # Those are not taken apart, and this is left as it is.
                for j in parts.pop(name):
                    del home[j]
            elif name in parts and between - parts[name]:
                join(between, [j for j in between if j in home])
                pending.append(max(parts))
        return list(parts.values())

    def _between(self, part: set[int]) -> set[int]:
        """A part, with the equations on the ways from it to itself."""
        first, last = min(part), max(part)
        below = {x for i in part for x in self.eqns[i].outvars}
        after = set()
        for i in range(first, last + 1):
            if i in part or not below.isdisjoint(variables(self.eqns[i].invars)):
                after.add(i)
                below.update(self.eqns[i].outvars)
        above = {x for i in part for x in variables(self.eqns[i].invars)}
        found = {*part}
        for i in range(last, first - 1, -1):
            if i in after and (i in part or not above.isdisjoint(self.eqns[i].outvars)):
                found.add(i)
                above.update(variables(self.eqns[i].invars))
        return found

    def _grown(self, others: list[set[int]], parts: list[set[int]]) -> list[set[int]]:
        """Parts with what is done to one matrix before and after, and all others.

        So they begin and end with arrays that are shaped as they are stored.
        """
        taken = {i for part in (*others, *parts) for i in part}
        #: What no region has a part in.
        early: set[Any] = set()
        for i, eqn in enumerate(self.eqns):
            made_early = all(
                x in early or x not in self._made for x in variables(eqn.invars)
            )
            if made_early and i not in taken:
                early.update(eqn.outvars)

        for part in parts:
            grows = True
            while grows:
                read = (x for j in part for x in variables(self.eqns[j].invars))
                before = {self._made[x] for x in read if x in self._made} - taken
                made = (x for j in part for x in self.eqns[j].outvars)
                after = {j for x in made for j in self._users.get(x, ())} - taken
                new = {j for j in before if self._is_before(j, part)}
                new |= {j for j in after if self._is_after(j, part, early)}
                part |= new
                taken |= new
                grows = bool(new)
        return [*others, *parts]

    def _is_before(self, i: int, part: set[int]) -> bool:
        """Whether an equation does something to one matrix, for a part alone."""
        eqn = self.eqns[i]
        users = [j for x in eqn.outvars for j in self._users.get(x, ())]
        matrices = {x for x in variables(eqn.invars) if is_matrix(x)}
        read = not self._outputs.isdisjoint(eqn.outvars)
        return part.issuperset(users) and len(matrices) <= 1 and not read

    def _is_after(self, i: int, part: set[int], early: set[Any]) -> bool:
        """Whether an equation does something to a part's matrices, and to nothing else."""
        made = {x for j in part for x in self.eqns[j].outvars}
        read = {x for j in part for x in variables(self.eqns[j].invars)}
        inputs = variables(self.eqns[i].invars)
        if not any(is_matrix(x) and x in made for x in inputs):
            return False
        return all(
            x in made or (x in read if is_matrix(x) else x in early or x not in self._made)
            for x in inputs
        )


def _has_matrices(eqn: Any) -> bool:
    """Whether an equation, or what it calls or repeats, is work with matrices."""
    if eqn.primitive.name == "shard_map":
        return False  # Each device has its own part already.
    inside = any(has_matrices(part) for part in jaxprs_in(eqn.params))
    return _is_matrix_work(eqn) or inside
