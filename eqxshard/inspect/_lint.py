"""`lint`: everything that lint finds in a step, before it runs."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from ..compiled._findings import Finding as Finding  # Public names of this room.
from ..compiled._findings import LintWarning as LintWarning
from ..compiled._hlo import parse_module
from ..training._eval_step import EvalStep
from ..training._inputs import ONE_BATCH
from ..training._state import refuse_state
from ..training._train_step import TrainStep
from ._functions import describe_function, lint_compiled, lower_function


class Findings(tuple[Finding, ...]):
    """The result of [`eqxshard.lint`][]: a tuple that prints as one line per finding."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(f"{each.kind}: {each}" for each in self) or "no findings"

    __repr__ = __str__  # A notebook shows it.


def lint(
    step: TrainStep | EvalStep | Callable[..., Any] | jax.stages.Lowered,
    /,
    *args: Any,
    **kwargs: Any,
) -> Findings:
    """Compile a step and look for what is most likely not meant, without running it.

    A step of ours is linted in the same way when it is first called, and
    `make_train_step(lint=...)` says what to do with the findings then. This function lists
    them.

    The kinds of findings:

    - `whole`: an array that its rule could not split, because no dim divides; or a part of
        the optimizer's state, larger than its parameter, that its rule did not split.
    - `unmatched`: a pattern of a rule that matches nothing.
    - `global-batch`: every device gathers the batch, or something computed from all of it,
        as a loop over examples does (`jax.lax.map`); use `jax.vmap`.
    - `per-layer`: the optimizer takes stacked layers for one array: it multiplies or
        factorizes them, or scales them by a norm of all of them; use
        [`eqxshard.per_layer`][].
    - `all-layers`: all stacked layers of a function of your own are gathered at once.
    - `donation`: a donated array whose memory is not reused.
    - `dtype`: most matrix products of the loss are in a wider type than the model's, or
        than that of a 16-bit precision.
    - `callback`: a call to the host, such as `jax.debug.print`.
    - `constant`: an array above 1 MB that is compiled in.

    The rule and the optimizer of a function of your own are not known, so it has no
    findings of kinds `whole`, `unmatched` and `per-layer`. Only such a function can have
    `all-layers`: a step of ours gathers layers one by one. The batch of a function is taken
    to be the arguments that are split by rows and not returned. Of a function that was
    lowered before, only the compiled text is read.

    **Arguments:**

    - `step`: from [`eqxshard.make_train_step`][] or [`eqxshard.make_eval_step`][]; or any
        other function, jitted or not, or the result of `jax.jit(fn).lower(...)`.
    - `args`, `kwargs`: the arguments of a call, with arrays or `jax.ShapeDtypeStruct`s:
        `state, batch, extra` of a train step, `model, batch` of an eval step; none for a
        function that was lowered before.

    **Returns:**

    A tuple of [`eqxshard.inspect.Finding`][]s, which prints as one line per finding.

    **Raises:**

    Whatever the step raises when it is called; `TypeError` if `step` is no function, or was
    lowered before and arguments are given.

    !!! Example

        ```python
        print(eqxshard.lint(train_step, state, batch))
        ```
    """
    if isinstance(step, TrainStep | EvalStep):
        return _lint_ours(step, *args, **kwargs)
    function = lower_function(step, args, kwargs)
    module = parse_module(function.lowered.compile().as_text() or "")
    of_text = lint_compiled(module, describe_function(function), function.step.inputs)
    return Findings([*function.findings(), *of_text])


def _lint_ours(step: TrainStep | EvalStep, *args: Any, **kwargs: Any) -> Findings:
    given = inspect.signature(step).bind(*args, **kwargs).arguments
    state, kept = given.get("state"), given.get("extra", given.get("model"))
    if isinstance(step, EvalStep):
        refuse_state(kept, "an eval step")
    call = step.machine.look_up(state, kept, ONE_BATCH)
    return Findings(step.machine.inspect(call, given["batch"])[1])
