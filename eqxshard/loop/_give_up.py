"""The end of a run whose steps are not finite any more."""

import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from ..debug._crash_dump import write_crash_dump
from ..debug._script import name_in_script, script_path
from ..training._state import TrainState
from ..training._train_step import TrainStep
from ._chunks import closing_iterator
from ._run import Run


def give_up(run: Run, train_step: Any, steps: Sequence[int]) -> NoReturn:
    """Write a crash dump of the first of some steps; raise `FloatingPointError`."""
    message = (
        f"the loss, a gradient or an update of {len(steps)} steps in a row, from step "
        f"{steps[0]} on, was not finite"
    )
    if run.checkpointer is None:
        raise FloatingPointError(
            f"{message}; use a lower learning rate, or give fit a checkpointer to get a "
            "crash dump that helps to find the cause."
        )
    ours = isinstance(run.state, TrainState) and isinstance(train_step, TrainStep)
    if not ours or run.extra:
        raise FloatingPointError(
            f"{message}; there is no crash dump, which can be made only of one state and a "
            "step from make_train_step without extra."
        )
    run.loader.seek(steps[0] - 1)
    with closing_iterator(run.loader) as batches:
        batch = next(batches)
    folder = run.checkpointer.directory / "crash_dump"
    try:
        write_crash_dump(folder, run.state, steps, batch, train_step, run.loader)
    # A full disk, say, or a part of the batch that cannot be written.
    except Exception as error:
        raise FloatingPointError(
            f"{message}; a crash dump could not be written: {error}"
        ) from error
    command = ["python", "-m", "eqxshard.replay", str(folder), script_path() or "SCRIPT"]
    name = name_in_script(train_step.config.loss_fn)
    if name != "loss_fn":
        command += ["--loss", name or "NAME"]
    raise FloatingPointError(f"{message}; find the cause with `{shlex.join(command)}`.")
