"""How an error ends a program: with one line, or with a traceback of the user's code."""

import contextlib
import sys
import traceback
from collections.abc import Iterator

import jax

from .._errors import ON_PURPOSE
from .._parser import is_stdout_closed
from ..distributed import exit_process
from ..sharding._text import say
from ..training._advice import is_out_of_memory, shorten_traceback


@contextlib.contextmanager
def filtering_tracebacks(how: str) -> Iterator[None]:
    """Set JAX's option `jax_traceback_filtering`, which this library obeys, too.

    **Arguments:**

    - `how`: a value of this option; `"off"` keeps all frames.
    """
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", how)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@contextlib.contextmanager
def exit_on_errors(
    *, whole_traceback: bool = False, remedy: str = "--traceback shows them"
) -> Iterator[None]:
    """End the process at an error, with a message on stderr.

    A `UsageError` or a `UsageTypeError` prints one line, and the exit status is 2. Devices
    that run out of memory print one message, and any other error prints its traceback
    without the frames of this library, JAX and Equinox. The exit status of both is 1.

    **Arguments:**

    - `whole_traceback`: show the whole traceback of any error.
    - `remedy`: how to see the frames that are left out.
    """
    how = "off" if whole_traceback else jax.config.values["jax_traceback_filtering"]
    # With "auto", JAX would add its own note on removed frames to that of `_print_short`.
    how = "tracebackhide" if how == "auto" else how
    try:
        with filtering_tracebacks(how):
            yield
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_stdout_closed():
            raise
        if whole_traceback:
            traceback.print_exc()
        elif isinstance(error, ON_PURPOSE):
            say(f"error: {error}", sys.stderr)
        elif is_out_of_memory(error) and not isinstance(error, MemoryError):
            first = str(error).partition("\n")[0]
            notes = getattr(error, "__notes__", [])
            say("\n".join([f"error: {first}", *notes]), sys.stderr)
        else:
            _print_short(error, remedy)
        exit_process(2 if isinstance(error, ON_PURPOSE) else 1)


def _print_short(error: Exception, remedy: str) -> None:
    whole = error.__traceback__
    shorten_traceback(error)
    traceback.print_exception(error)
    if error.__traceback__ is not whole:
        print(
            f"Frames of eqxshard, JAX and Equinox are left out; {remedy}.",
            file=sys.stderr,
        )
