"""What a program prints of an error: one line, or where in the user's code it was."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

import jax

from .._errors import ON_PURPOSE
from .._parser import is_stdout_closed
from ..compiled._causes import is_ours, is_users
from ..distributed import exit_process
from ..planning._process import ELSEWHERE
from ..sharding._text import say
from ..training._advice import traceback_steps
from ..training._memory import is_out_of_memory

_JAX_HIDES = "JAX has removed its internal frames"


_NO_MEMORY = (
    "This was outside of training; use a smaller model or batch, or a rule and a mesh that "
    "split the state, such as fsdp()."
)


@contextlib.contextmanager
def exit_on_errors(*, whole_traceback: bool = False) -> Iterator[None]:
    """End the process at an error: with one line if it was raised on purpose.

    Those are a `UsageError`, and an `OSError` where this library asked for the file: exit
    status 2. Another error is a bug. Its traceback shows the user's own code alone, whose
    last line is the place to look at: exit status 1.

    **Arguments:**

    - `whole_traceback`: show the whole traceback of any error.
    """
    filtering = jax.config.values["jax_traceback_filtering"]
    if whole_traceback:
        jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_stdout_closed():
            raise
        on_purpose = _is_on_purpose(error)
        status = 2 if on_purpose else 1
        if whole_traceback:
            traceback.print_exc()
        elif is_out_of_memory(error) and _is_in_ours(error):
            notes = getattr(error, "__notes__", [])
            notes = [note for note in notes if _JAX_HIDES not in note] or [_NO_MEMORY]
            first = str(error).partition("\n")[0] or type(error).__name__
            say("\n".join([f"error: {first}", *notes]), sys.stderr)
        elif on_purpose:
            say(f"error: {error}", sys.stderr)
        elif (elsewhere := _traceback_elsewhere(error)) is not None:
            print(elsewhere, file=sys.stderr)
        else:
            _print_users_part(error)
        exit_process(status)
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def _is_on_purpose(error: Exception) -> bool:
    if isinstance(error, ON_PURPOSE):
        return True
    if _traceback_elsewhere(error) is not None:
        return False
    if isinstance(error, OSError):
        # It may come from deep in Python; who asked for the file is to blame.
        return _is_in_ours(error)
    return False


def _is_in_ours(error: Exception) -> bool:
    """Whether it was this library that called what failed, and not the user's code."""
    files = [_file(step) for step in traceback_steps(error)]
    return is_ours(next((x for x in reversed(files) if is_ours(x) or is_users(x)), ""))


def _traceback_elsewhere(error: Exception) -> str | None:
    """The traceback of an error in the process that compiles a plan."""
    notes: list[str] = getattr(error, "__notes__", [])
    found = (note for note in notes if note.startswith(ELSEWHERE))
    return next((note.removeprefix(ELSEWHERE).strip() for note in found), None)


def _file(step: TracebackType) -> str:
    return step.tb_frame.f_code.co_filename


def _print_users_part(error: Exception) -> None:
    """Print a traceback of what is neither installed, nor of this library."""
    report = traceback.TracebackException.from_exception(error)
    shown: traceback.TracebackException | None = report
    is_whole = True
    while shown is not None:
        own = [each for each in shown.stack if is_users(each.filename)]
        if own and len(own) < len(shown.stack):
            shown.stack, is_whole = traceback.StackSummary.from_list(own), False
        # What JAX says of frames that it hides is true of all that is installed.
        notes = getattr(shown, "__notes__", None) or []
        shown.__notes__ = [note for note in notes if _JAX_HIDES not in note]
        shown = shown.__cause__ or shown.__context__
    print(*report.format(), sep="", end="", file=sys.stderr)
    if not is_whole:
        print("Only your own code is shown; --traceback shows the rest.", file=sys.stderr)
