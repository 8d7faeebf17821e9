"""Callbacks that act at some steps."""

import operator
import os
import re
from collections.abc import Callable

import jax

from ..sharding._paths import as_text, is_remote
from ._callbacks import Callback
from ._loop import Loop


class Every(Callback):
    """Call a function every some steps, say to draw samples.

    **Arguments:**

    - `steps`: the number of steps between calls.
    - `function`: called with the [`eqxshard.callbacks.Loop`][].

    !!! Example

        ```python
        def draw(loop):
            image = sample(loop.state.model, jax.random.key(0))
            plt.imsave(f"samples/{loop.step}.png", image)


        callbacks = [eqxshard.callbacks.Every(1_000, draw)]
        ```
    """

    def __init__(self, steps: int, function: Callable[[Loop], object]):
        self.every = operator.index(steps)
        self._function = function

    def after_step(self, loop: Loop) -> None:
        """Call it."""
        self._function(loop)


class Profile(Callback):
    """Record a profile of some steps with `jax.profiler`, to look at in TensorBoard.

    Waits for the steps before, and for those of the profile, so that it shows whole
    steps. With several processes, each writes its own.

    **Arguments:**

    - `first`, `last`: the first and the last step to record, counted from step 0 of the
        run; `first` is at least 2, since the first step compiles. A run that starts or
        ends in between records nothing, or a shorter profile.
    - `directory`: the folder to write to.

    **Raises:**

    `ValueError` unless `2 <= first <= last`.

    !!! Example

        ```python
        callbacks = [eqxshard.callbacks.Profile(100, 104, "runs/profile")]
        ```
    """

    def __init__(self, first: int, last: int, directory: str | os.PathLike[str]):
        if not 2 <= first <= last:
            raise ValueError(
                f"Profile({first}, {last}) cannot be recorded; use 2 <= first <= last."
            )
        self._first, self._last = operator.index(first), operator.index(last)
        is_url = is_remote(directory)
        self._directory = as_text(directory) if is_url else os.path.abspath(directory)
        self._recording = False

    @staticmethod
    def parse(text: str, directory: str | os.PathLike[str]) -> "Profile":
        """The profile that an option of a command line asks for.

        **Arguments:**

        - `text`: the first and the last step, such as `10:15`.
        - `directory`: the folder to write to.

        **Raises:**

        `ValueError` unless it is such a text, with 2 <= first <= last.
        """
        match = re.fullmatch(r"(\d+):(\d+)", text)
        first, last = map(int, match.groups()) if match else (0, 0)
        if not 2 <= first <= last:
            raise ValueError(
                f"{text!r} are not steps to profile; write START:STOP, such as 10:15, with "
                "2 <= START <= STOP."
            )
        return Profile(first, last, directory)

    def next_step(self, step: int) -> int | None:
        """The step before the first one, and the last one."""
        return next((s for s in (self._first - 1, self._last) if s > step), None)

    def after_step(self, loop: Loop) -> None:
        """Start or end the recording."""
        jax.block_until_ready(loop.state)
        self.close()
        if loop.step == self._first - 1:
            jax.profiler.start_trace(self._directory)
            self._recording = True

    def close(self) -> None:
        """End the recording, if the run ends before the last step."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()
