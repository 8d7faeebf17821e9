"""The warnings of a run: what is logged or warned of meanwhile, kept in a file."""

import contextlib
import json
import logging
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

#: The most warnings that are kept, each once.
_MOST = 200


class HeardWarnings:
    """Listens to `logging`, from its level WARNING, and to Python's warnings.

    All are still shown where they would be. Each text is kept once.
    """

    def __init__(self):
        self._lines: dict[str, str] = {}
        self._path: Path | None = None
        self._handler = _Handler(self.add)
        self._shown: Callable[..., None] = warnings.showwarning

    def start(self) -> None:
        """Listen from now on."""
        logging.getLogger().addHandler(self._handler)
        self._shown = warnings.showwarning
        warnings.showwarning = self._show

    def stop(self) -> None:
        """Listen no more."""
        logging.getLogger().removeHandler(self._handler)
        # Unless somebody else listens by now, too, who would be cut off.
        if warnings.showwarning == self._show:
            warnings.showwarning = self._shown

    def add(self, source: str, text: str) -> None:
        """Keep a warning, if it is new."""
        if text in self._lines or len(self._lines) >= _MOST:
            return
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._lines[text] = json.dumps({"time": now, "source": source, "text": text}) + "\n"
        if self._path is not None:
            # A full disk has been logged by others, and logging it here would come back.
            with (
                contextlib.suppress(OSError),
                self._path.open("a", encoding="utf-8") as file,
            ):
                file.write(self._lines[text])

    def write_to(self, path: Path, *, keep: bool) -> None:
        """Write what was heard, and from now on each warning, to a file.

        **Arguments:**

        - `path`: the file, which need not exist; without warnings, it is not made.
        - `keep`: keep what is there from an earlier start of the run.
        """
        if not keep:
            path.unlink(missing_ok=True)
        if self._lines:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(self._lines.values()))
        self._path = path

    def _show(self, message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        self.add(category.__name__, str(message))
        self._shown(message, category, *args, **kwargs)


class _Handler(logging.Handler):
    """Passes records on; shows those that nobody else shows, as `logging` does."""

    def __init__(self, heard: Callable[[str, str], None]):
        super().__init__(logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        # A malformed call must not raise into its caller; those that show it say so.
        with contextlib.suppress(Exception):
            self._heard(record.name, record.getMessage())
        # With a handler, even one that shows nothing, `logging` leaves out its last resort.
        if logging.lastResort is not None and not self._is_shown(record):
            logging.lastResort.handle(record)

    def _is_shown(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False
