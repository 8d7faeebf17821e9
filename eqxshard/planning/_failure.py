"""An error in the process that compiles, on its way to the one that asked."""

import traceback
from typing import NamedTuple

import jax

from ..compiled._causes import user_line
from ..compiled._hlo import Frame


class Failure(NamedTuple):
    """What was raised.

    - `kind`, `message`: its type, and what it said.
    - `line`: the line of the user's code that raised it, as `model.py:12`, if any did.
    - `by_compiler`: whether XLA raised it.
    - `traceback`: as Python prints it.
    """

    kind: str
    message: str
    line: str | None
    by_compiler: bool
    traceback: str

    @staticmethod
    def of(error: Exception) -> "Failure":
        """From an exception."""
        frames = traceback.extract_tb(error.__traceback__)
        return Failure(
            type(error).__name__,
            str(error),
            user_line(Frame(x.filename, x.lineno or 0, x.name) for x in reversed(frames)),
            isinstance(error, jax.errors.JaxRuntimeError | NotImplementedError),
            "".join(traceback.format_exception(error)),
        )
