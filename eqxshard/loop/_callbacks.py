"""Callbacks of `fit`: the base class, and the list of those that a run has."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ..distributed import allgather_json
from ..sharding._text import did_you_mean
from ._run import Run
from ._watchdog import Watchdog


class Callback:
    """Called by [`eqxshard.fit`][] during a run: override the methods that you need.

    After a step, in this order: `after_step`, the evaluation and `after_evaluation`,
    `after_report`, then the trackers get the report, and at last the checkpoint and
    `after_save`. Methods that a class does not override cost nothing.

    With several processes, every process calls its callbacks. What one of them asks for
    by `run.stop` or `run.save`, all do after the same step: they ask each other after each
    round of calls. Trackers get the values of the main process.

    - `every`: call `after_step` every this many steps; `None` for never. From a loader
        with `placement="device"`, a dispatch ends there.

    !!! Example

        ```python
        class PrintsLoss(eqxshard.callbacks.Callback):
            every = 100

            def after_step(self, run):
                print(run.step, run.metrics.compute()["loss"])
        ```
    """

    every: int | None = 1

    def after_step(self, run: Run) -> None:
        """Called after a step was dispatched, every `every` steps."""

    def after_evaluation(self, run: Run) -> None:
        """Called after an evaluation, which is in `run.values`."""

    def after_report(self, run: Run) -> None:
        """Called when the values of a report are known; what is logged here joins it.

        The metrics are then read right after their step, not during the next one.
        """

    def after_save(self, run: Run) -> None:
        """Called after a checkpoint was saved (a thread may still be writing it)."""

    def close(self) -> None:
        """Called once, when the run ends, whatever ended it."""

    def state(self) -> dict[str, Any]:
        """What to save with each checkpoint, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned when the run's checkpoint was saved."""

    def next_step(self, step: int) -> int | None:
        """The next step after `step` that `after_step` is to be called at."""
        return None if self.every is None else (step // self.every + 1) * self.every


class CallbackList:
    """The callbacks of a run.

    **Arguments:**

    - `callbacks`: called in order.
    - `run`: what they are called with.
    - `watchdog`: told what a run waits for.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run, watchdog: Watchdog):
        self._callbacks = callbacks
        self._run = run
        self._watchdog = watchdog
        self._at_steps = _with_own(callbacks, "after_step")
        #: Whether reports are read at once, for `after_report`.
        self.need_reports = bool(_with_own(callbacks, "after_report"))
        #: The next step that one of them is to be called after; -1 for none.
        self.next_step = self._next_step()

    @property
    def want_stop(self) -> bool:
        """Whether one of them asked to stop."""
        return self._run._why_stop is not None

    @property
    def want_save(self) -> bool:
        """Whether one of them asked to save, and it was not saved yet."""
        return self._run._wants_save

    def after_step(self) -> None:
        """Call those that are due after this step."""
        step = self._run.step
        # Those that are due are the ones that were not due a step earlier.
        due = [each for each in self._at_steps if each.next_step(step - 1) == step]
        self._call("after_step", due)
        self.next_step = self._next_step()

    def after(self, event: str) -> None:
        """Call a method of all that have it."""
        self._call(f"after_{event}", _with_own(self._callbacks, f"after_{event}"))

    def state(self) -> dict[str, Any]:
        """What they save with a checkpoint, by name."""
        states = {name: each.state() for name, each in self._named().items()}
        return {name: state for name, state in states.items() if state}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name, each in self._named().items():
            if name in states:
                each.restore(states[name])

    def _call(self, method: str, callbacks: Sequence[Callback]) -> None:
        if not callbacks:
            return
        self._watchdog.waits_for(f"the callbacks ({method}) of step {self._run.step}")
        clock = self._run._report.clock
        clock.enter("callbacks")
        for each in callbacks:
            getattr(each, method)(self._run)
        if jax.process_count() > 1:
            self._watchdog.waits_for(
                f"the others' callbacks ({method}) of step {self._run.step}"
            )
            clock.enter("other")
            everyone = allgather_json([self._run._why_stop, self._run._wants_save])
            reasons = [why for why, _ in everyone if why is not None]
            self._run._why_stop = reasons[0] if reasons else None
            self._run._wants_save = any(saves for _, saves in everyone)
        clock.enter("log")

    def _next_step(self) -> int:
        steps = [each.next_step(self._run.step) for each in self._at_steps]
        return min((step for step in steps if step is not None), default=-1)

    def _named(self) -> dict[str, Callback]:
        """By the name of the class, with a number from the second of its kind on."""
        named: dict[str, Callback] = {}
        for each in self._callbacks:
            name = type(each).__name__
            same = sum(type(other).__name__ == name for other in named.values())
            named[f"{name} {same + 1}" if same else name] = each
        return named


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse other things than callbacks, and what of them makes no sense."""
    if isinstance(callbacks, Callback):
        raise TypeError(
            f"callbacks is one {type(callbacks).__name__}; give a list of callbacks, such "
            f"as [{type(callbacks).__name__}(...)]."
        )
    for each in callbacks:
        if not isinstance(each, Callback):
            raise TypeError(
                f"a {type(each).__name__} is not a callback; give an instance of a "
                "subclass of eqxshard.callbacks.Callback."
            )
        if each.every is not None and each.every < 1:
            raise ValueError(
                f"{type(each).__name__}.every={each.every} must be at least 1, or None."
            )
        for name in dir(each):
            if name in _EVENTS or name.startswith("_"):
                continue
            if hint := did_you_mean(name, _EVENTS, cutoff=0.8):
                raise TypeError(
                    f"{type(each).__name__}.{name} is never called; {hint}If it is yours "
                    f"to call, use another name, such as _{name}."
                )


#: The methods that `fit` calls with the run.
_EVENTS = [name for name in vars(Callback) if name.startswith("after_")]


def _with_own(callbacks: Sequence[Callback], method: str) -> list[Callback]:
    """The callbacks that override a method."""
    base = getattr(Callback, method)
    return [each for each in callbacks if getattr(type(each), method) is not base]
