"""The argument parser of `python -m eqxshard` and `python -m eqxshard.launch`."""

import argparse
import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with status 2."""
        # Messages of our own are sentences that say what to do; argparse's are not.
        end = "" if message.endswith(".") else f"; see {self.prog} --help."
        print(f"error: {message}{end}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def allow_closed_stdout() -> Iterator[None]:
    """Exit silently, with status 141, when the reader of standard output has gone.

    Readers such as `head` leave early. 141 is what shells report for that (SIGPIPE).
    """
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        if not is_stdout_closed():
            raise
        # What is left in the buffer must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def is_stdout_closed() -> bool:
    """True if standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
