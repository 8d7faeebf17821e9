"""Callbacks of `fit`: the base class, and the list of those that a run has."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._errors import UsageError, UsageTypeError
from ._loop import Loop


class Callback:
    """Called by [`eqxshard.fit`][] during a run: override the methods that you need.

    After a step, in this order: `after_step`, the evaluation and `after_evaluation`,
    `after_report`, then the trackers get the report, and at last the checkpoint and
    `after_save`. Methods that a class does not override cost nothing.

    With several processes, every process calls its callbacks. What one of them asks for
    by `loop.stop` or `loop.save`, all do after the same step: they ask each other after
    each round of calls. Trackers get the values of the main process.

    - `every`: call `after_step` every this many steps; `None` for never. From a loader
        with `placement="device"`, a dispatch ends there.

    !!! Example

        ```python
        class PrintsLoss(eqxshard.callbacks.Callback):
            every = 100

            def after_step(self, loop):
                print(loop.step, loop.metrics.compute()["loss"])
        ```
    """

    every: int | None = 1

    def __init_subclass__(cls):
        for name in vars(cls):
            if name.startswith("after_") and not hasattr(Callback, name):
                events = ", ".join(each for each in vars(Callback) if each[:6] == "after_")
                raise UsageTypeError(
                    f"{cls.__name__}.{name} is never called; override one of {events}, or "
                    f"use another name, such as _{name}."
                )

    def after_step(self, loop: Loop) -> None:
        """Called after a step was dispatched, every `every` steps."""

    def after_evaluation(self, loop: Loop) -> None:
        """Called after an evaluation, which is in `loop.values`."""

    def after_report(self, loop: Loop) -> None:
        """Called when the values of a report are known; what is logged here joins it.

        The metrics are then read right after their step, not during the next one.
        """

    def after_save(self, loop: Loop) -> None:
        """Called after a checkpoint was saved (a thread may still be writing it)."""

    def close(self) -> None:
        """Called once, when the run ends, whatever ended it."""

    def state(self) -> dict[str, Any]:
        """JSON values to save with each checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned when the run's checkpoint was saved."""

    def ended(self, state: Mapping[str, Any]) -> str | None:
        """Why the run that saved this has ended; `None` if it is to go on when it resumes.

        **Arguments:**

        - `state`: what `state` returned.
        """

    def next_step(self, step: int) -> int | None:
        """The next step after `step` that `after_step` is to be called at."""
        return None if self.every is None else (step // self.every + 1) * self.every


#: The name of the skipped steps among the states of callbacks; no class can have this name.
_SKIPPED = "skipped steps"


class CallbackList:
    """The callbacks of a run.

    **Arguments:**

    - `callbacks`: called in order.
    - `loop`: the run, which they are called with.
    """

    def __init__(self, callbacks: Sequence[Callback], loop: Loop):
        self._callbacks = callbacks
        self._loop = loop
        self._at_steps = self._with_own("after_step")
        #: Whether reports are read at once, for `after_report`.
        self.need_reports = bool(self._with_own("after_report"))

    def after_step(self) -> None:
        """Call those that are due after this step."""
        step = self._loop.step
        # Those that are due are the ones that were not due a step earlier.
        due = [each for each in self._at_steps if each.next_step(step - 1) == step]
        self._call("after_step", due)

    def after(self, event: str) -> None:
        """Call a method of all callbacks that override it."""
        self._call(f"after_{event}", self._with_own(f"after_{event}"))

    def next_step(self, step: int) -> int | None:
        """The next step after `step` that a callback is to be called at."""
        steps = [each.next_step(step) for each in self._at_steps]
        return min((step for step in steps if step is not None), default=None)

    def state(self) -> dict[str, Any]:
        """The states to save with a checkpoint, by name, and the skipped steps."""
        states = {name: each.state() for name, each in _named(self._callbacks).items()}
        states[_SKIPPED] = self._loop.report.skipped.state()
        return {name: state for name, state in states.items() if state}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name, each in _named(self._callbacks).items():
            if name in states:
                each.restore(states[name])
        if _SKIPPED in states:
            self._loop.report.skipped.restore(states[_SKIPPED])

    def _call(self, method: str, callbacks: Sequence[Callback]) -> None:
        if not callbacks:
            return
        loop, before = self._loop, self._loop.state
        what = f"callbacks ({method}) of step {loop.step}"
        with loop.clock.phase("callbacks", f"the {what}"):
            for each in callbacks:
                getattr(each, method)(loop)
            if loop.state is not before:
                loop.check_step()
        with loop.clock.phase("other", f"the others' {what}"):
            loop.agree()

    def _with_own(self, method: str) -> list[Callback]:
        """The callbacks that override a method."""
        base = getattr(Callback, method)
        return [each for each in self._callbacks if getattr(type(each), method) is not base]


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by the names of their classes, numbered from a class's second on."""
    named: dict[str, Callback] = {}
    for each in callbacks:
        name = type(each).__name__
        same = sum(type(other).__name__ == name for other in named.values())
        named[f"{name} {same + 1}" if same else name] = each
    return named


def why_ended(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> str | None:
    """Why the run that saved these states has ended, if one of its callbacks ended it."""
    named = _named(callbacks)
    reasons = (named[name].ended(states[name]) for name in named if name in states)
    return next((reason for reason in reasons if reason is not None), None)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse anything that is not a callback."""
    if not isinstance(callbacks, Collection):
        what = type(callbacks).__name__
        raise UsageTypeError(f"callbacks= is a {what}; give a list of callbacks.")
    for each in callbacks:
        if not isinstance(each, Callback):
            raise UsageTypeError(
                f"a {type(each).__name__} is not a callback; give an instance of a "
                "subclass of eqxshard.callbacks.Callback."
            )
        if each.every is not None and each.every < 1:
            raise UsageError(
                f"{type(each).__name__}.every={each.every} must be at least 1, or None."
            )
