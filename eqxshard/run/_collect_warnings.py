"""Collect the warnings of a run: those that this library logs, and Python's `warnings`.

`warnings.showwarning` is replaced while a run lasts, which Python documents as the way to
handle warnings. `logging.captureWarnings` replaces it, too, but passes on only a text with
the path of a file in it, without the category, and shows nothing unless logging is set up.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

#: The parent of the loggers of all modules of this library.
_OURS = logging.getLogger("eqxshard")


class _Collector(logging.Handler):
    """Calls a function with the name of the logger and the text of each warning."""

    def __init__(self, keep: Callable[[str, str], None]):
        super().__init__(logging.WARNING)
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning, and show it if no other handler does."""
        # A malformed call must not raise into its caller. Handlers that show it report it.
        with contextlib.suppress(Exception):
            self._keep(record.name, record.getMessage())
        # Python shows records that no handler takes, but this one has taken it.
        others = {*logging.root.handlers, *_OURS.handlers} - {self}
        if not others and logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextlib.contextmanager
def collect_warnings(keep: Callable[[str, str], None]) -> Iterator[None]:
    """Collect the warnings of a run, which are still shown as without this.

    **Arguments:**

    - `keep`: called with the source and the text of each warning: with the name of the
        logger for those that this library logs, and with the name of the category for all
        that Python's `warnings` show.
    """
    show, collector = warnings.showwarning, _Collector(keep)

    def show_and_keep(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        keep(category.__name__, str(message))
        show(message, category, *args, **kwargs)

    warnings.showwarning = show_and_keep
    _OURS.addHandler(collector)
    try:
        yield
    finally:
        _OURS.removeHandler(collector)
        # If somebody has replaced it since, restoring it would cut them off.
        if warnings.showwarning is show_and_keep:
            warnings.showwarning = show
