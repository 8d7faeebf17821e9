"""The warnings of a run: those of this library's log, and those of Python's `warnings`."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

#: The loggers of all modules of this library are below it.
_OURS = logging.getLogger("eqxshard")


class _Listener(logging.Handler):
    """Calls a function with the name of the logger and the text of each warning."""

    def __init__(self, keep: Callable[[str, str], None]):
        super().__init__(logging.WARNING)
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning, and show it if nothing else does."""
        # A malformed call must not raise into its caller; those that show it say so.
        with contextlib.suppress(Exception):
            self._keep(record.name, record.getMessage())
        # Python shows by itself what no handler takes, and this one has taken it.
        others = {*logging.root.handlers, *_OURS.handlers} - {self}
        if not others and logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextlib.contextmanager
def hearing_warnings(keep: Callable[[str, str], None]) -> Iterator[None]:
    """Call a function with the source and the text of each warning of a run.

    These are the ones that this library logs, and all that Python's `warnings` show. They
    are shown as they would be without it.
    """
    show, listener = warnings.showwarning, _Listener(keep)

    def show_and_keep(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        keep(category.__name__, str(message))
        show(message, category, *args, **kwargs)

    warnings.showwarning = show_and_keep
    _OURS.addHandler(listener)
    try:
        yield
    finally:
        _OURS.removeHandler(listener)
        # Unless somebody else listens by now, too, who would be cut off.
        if warnings.showwarning is show_and_keep:
            warnings.showwarning = show
