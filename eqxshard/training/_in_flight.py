"""A bound on the number of dispatched steps that have not finished."""

import collections
from typing import Any

#: Two keep a device busy while the host prepares the next. More only hold memory, and
#: simulated CPU devices, whose collectives share one pool of threads, deadlock after some
#: hundreds.
IN_FLIGHT = 2


class InFlight:
    """Holds one result of each call that may not have finished, and bounds their number."""

    def __init__(self):
        self._results: collections.deque[Any] = collections.deque()

    def make_room(self) -> None:
        """Wait for the oldest if there is no room for another.

        Before a call, which takes its donated inputs: an interrupt finds them whole.
        """
        if len(self._results) == IN_FLIGHT:
            oldest = self._results.popleft()
            # NumPy's has no such method: a user's own step may return one.
            getattr(oldest, "block_until_ready", lambda: None)()

    def add(self, result: Any) -> None:
        """Add a result, for which there is room."""
        self._results.append(result)
