"""Logs which process the others wait for in every step, if one is slower by itself."""

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import jax

from ..distributed import is_main_process, post, read_posts

_LOG = logging.getLogger(__name__)

#: The parts of `Clock` in which a process waits for no other, and their names here.
_OWN = {"data": "data", "callbacks": "callbacks", "log": "reports and trackers"}
#: The parts of a step. (Others come between steps, such as evaluations.)
_STEP = (*_OWN, "dispatch", "device")
#: Compared at most this often; what is slow once, such as a file's first read, passes.
_WINDOW_SECONDS = 5.0


class Slow(NamedTuple):
    """A process that is slow, and what takes it so long."""

    process: int
    part: str


class Stragglers:
    """Compares where the processes spend their time, and logs each slow one once.

    Every process posts the seconds of its steps every few seconds, and waits for nobody;
    the main process compares. One that is slow twice in a row is logged.
    """

    def __init__(self):
        self._seconds: Counter[str] = Counter()
        self._steps = 0
        self._step: int | None = None
        self._suspects: set[Slow] = set()
        self._told: set[Slow] = set()

    def add(self, step: int, seconds: Mapping[str, float]) -> None:
        """Add the seconds of each part since the last report, which is at a step."""
        if jax.process_count() == 1:
            return
        last, self._step = self._step, step
        if last is None:
            # This report includes the start of the run.
            return
        self._steps += step - last
        self._seconds.update({part: seconds[part] for part in _STEP})
        if self._seconds.total() < _WINDOW_SECONDS:
            return
        mine = {part: taken / self._steps for part, taken in self._seconds.items()}
        self._seconds, self._steps = Counter(), 0
        # It is only for the log.
        with contextlib.suppress(Exception):
            post("steps", mine)
            if is_main_process():
                self._compare(read_posts("steps"))

    def _compare(self, posts: Mapping[int, Mapping[str, float]]) -> None:
        if len(posts) < jax.process_count():
            return
        suspects = find_slow(posts)
        for slow in sorted((suspects & self._suspects) - self._told):
            self._told.add(slow)
            _LOG.warning(
                "process %d is slow: it spends %.2f s per step on %s, the others %.2f s; "
                "all wait for it.",
                slow.process,
                posts[slow.process][slow.part],
                _OWN[slow.part],
                _of_others(posts, slow.process, slow.part),
            )
        self._suspects = suspects


def find_slow(posts: Mapping[int, Mapping[str, float]]) -> set[Slow]:
    """The processes that the others wait for, and the part that takes them longer.

    A process is slow if by itself it takes longer than the median of the others, by more
    than half of its step, and hardly ever waits for the devices. (If it does, it prepares
    a step while the last one runs, and nobody waits.)

    **Arguments:**

    - `posts`: by process, the seconds per step of each part.
    """
    slow: set[Slow] = set()
    for process, mine in posts.items():
        more = {part: mine[part] - _of_others(posts, process, part) for part in _OWN}
        step = sum(mine[part] for part in _STEP)
        if sum(more.values()) > step / 2 and mine["device"] < step / 10:
            slow.add(Slow(process, max(more, key=more.__getitem__)))
    return slow


def _of_others(posts: Mapping[int, Mapping[str, float]], process: int, part: str) -> float:
    return median(each[part] for other, each in posts.items() if other != process)
