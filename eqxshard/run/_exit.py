"""What a program prints of an error: one line, or where in the user's code it was."""

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

    - `how`: `"off"` keeps all frames.
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
    """End the process at an error.

    A `UsageError` is one line, and the exit status is 2. Devices without enough memory are
    one message. Another error has its traceback, without the frames of this library, JAX
    and Equinox. The exit status of both is 1.

    **Arguments:**

    - `whole_traceback`: show the whole traceback of any error.
    - `remedy`: how to see the frames that are left out.
    """
    how = "off" if whole_traceback else jax.config.values["jax_traceback_filtering"]
    # Without a note that JAX has removed its frames, which is done here.
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
