"""The command lines of `python -m eqxshard` and of its modules."""

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with status 2."""
        # Messages of our own are sentences that say what to do; argparse's are not.
        end = "" if message.endswith(".") else f"; see {self.prog} --help."
        print(f"error: {message}{end}", file=sys.stderr)
        sys.exit(2)
