"""`lint`: everything that lint finds in a step, before it runs."""

from jaxtyping import PyTree

from ..compiled._findings import Finding
from ..training._eval_step import EvalStep
from ..training._inputs import ONE_BATCH
from ..training._train_step import TrainStep


class Findings(tuple[Finding, ...]):
    """What [`eqxshard.lint`][] returns: a tuple, which prints as one line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(f"{each.kind}: {each}" for each in self) or "no findings"


def lint(
    step: TrainStep | EvalStep, state: PyTree, batch: PyTree, extra: PyTree = None
) -> Findings:
    """Compile a step and look for what is most likely not meant, without running it.

    The same is done when a step is first called, where `make_train_step(lint=...)` says
    what to do about it. Here everything is listed.

    The kinds of findings:

    - `whole`: an array that its rule could not split, because no dim divides.
    - `unmatched`: a pattern of a rule that matches nothing.
    - `global-batch`: every device gathers the batch, or something computed from all of it,
        as a loop over examples does (`jax.lax.map`); use `jax.vmap`.
    - `all-layers`: all stacked layers are gathered at once.
    - `donation`: a donated array whose memory is not reused.
    - `dtype`: most matrix products of the loss are in a wider type than the model's, or
        than that of a 16-bit precision.
    - `callback`: a call of the host.
    - `constant`: an array above 1 MB that is compiled in.

    **Arguments:**

    - `step`: from [`eqxshard.make_train_step`][] or [`eqxshard.make_eval_step`][].
    - `state`: for a train step a state, for an eval step a model; of arrays or of
        `jax.ShapeDtypeStruct`s, as from [`eqxshard.abstract_state`][].
    - `batch`, `extra`: as for a call; of arrays or of `jax.ShapeDtypeStruct`s.

    **Returns:**

    A tuple of [`eqxshard.Finding`][]s, which prints as one line for each.

    **Raises:**

    As the step does when it is called; `TypeError` if it is of another kind.

    !!! Example

        ```python
        print(eqxshard.lint(train_step, state, batch))
        ```
    """
    if isinstance(step, TrainStep):
        call = step.machine.look_up(state, extra, ONE_BATCH)
    elif isinstance(step, EvalStep):
        call = step.machine.look_up(None, state, ONE_BATCH)
    else:
        raise TypeError(
            f"lint takes a step of make_train_step or make_eval_step, not a "
            f"{type(step).__name__}."
        )
    return Findings(step.machine.inspect(call, batch)[1])
