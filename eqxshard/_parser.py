"""The command lines of `python -m eqxshard` and of its modules."""

import argparse
import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with status 2."""
        # Messages of our own are sentences that say what to do; argparse's are not.
        end = "" if message.endswith(".") else f"; see {self.prog} --help."
        print(f"error: {message}{end}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def allow_closed_stdout() -> Iterator[None]:
    """End without a word, with status 141, if nobody reads standard output any more.

    As `head` does, whoever reads it may leave early. Shells report 141 for that.
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
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
